"""Headers by which any proxy before several servers keeps together what belongs together; ``docs/operate/proxies.md``.

A proxy that hashes :data:`~ragcache_core.wire.SESSION_HEADER` sends a document, or a conversation, always to the same
server; one that keeps a table of :data:`~ragcache_core.wire.SPECULATION_HEADER` and
:data:`~ragcache_core.wire.REPLICA_HEADER` sends a confirmation, and a question for a request's figures, to the server
that has them. A server without a proxy reads none of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import unquote

import httpx
from pydantic_core import from_json

from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.log import logger_of
from ragcache_core.ordering import MAX_PATH_DOCUMENTS, static_prefix_digest
from ragcache_core.prompt import texts_of
from ragcache_core.routing.load import PromptInfo
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import KEY, REPLICA_HEADER, REQUEST_ROUTE, SESSION_HEADER, SPECULATION_HEADER, SPECULATION_ROUTE

logger = logger_of(__name__)

_OPENING = 64
"""Tokens by which prompts without documents are told apart."""
_CHARACTERS_PER_TOKEN = 4
_RESPONSE_ID = re.compile(rb'"id":\s*"([^"]{1,200})"')
_MAX_REMEMBERED = 4096
_BAD_GATEWAY, _UNAVAILABLE = 502, 503
_UNSENT = b"error sending request for url"
"""What vllm-router says, with status 500, of a server that is gone."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the body of a request says of it: its prompt, its speculation, and the id that a header would hide."""

    prompt: PromptInfo
    speculation: str | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, request: httpx.Request) -> RequestInfo:
        """Read it from the body; what is no JSON of ours goes by nothing, and the server refuses it."""
        try:
            body = _read(request.content)
            params = body.get("kv_transfer_params") or {}
            hints = params.get(KEY) or {}
            speculation, request_id = hints.get("speculation"), body.get("request_id")
            return cls(
                _prompt(body, hints.get("documents") or (), params.get("prompt_token_ids") or body.get("prompt")),
                speculation if isinstance(speculation, str) else None,
                request_id.strip() if is_sendable(request_id) else None,
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return cls(PromptInfo((), (), 0, 0, None, ""))


def _read(content: bytes) -> Any:
    try:
        return from_json(content)  # thousands of token ids in half the time
    except ValueError:
        return json.loads(content)  # reads halves of surrogate pairs as well


def is_sendable(value: object) -> TypeGuard[str]:
    """Return whether a header can hold this."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _prompt(body: Mapping[str, Any], named: Sequence[Any], token_ids: object) -> PromptInfo:
    """Return what decides who gets a request; its documents' places are known where its prompt is tokens."""
    named = named[:MAX_PATH_DOCUMENTS]
    documents = tuple(str(each["id"]) for each in named)
    key = f"{body.get('cache_salt')}\0{documents[0] if documents else _opening(body)}"
    if not isinstance(token_ids, list) or any("start" not in each for each in named):
        return _of_texts(body, [str(each.get("text", "")) for each in named], documents, key)
    spans = [(str(each["id"]), int(each["start"]), int(each.get("end", 0))) for each in named]
    if not spans:
        return PromptInfo((), (), 0, len(token_ids), None, key)
    first = PromptSegment(SegmentKind.DOCUMENT, spans[0][1], len(token_ids), spans[0][0])
    prefix = static_prefix_digest(token_ids, [first])
    return PromptInfo(documents, tuple(end for _, _, end in spans), first.start, len(token_ids), prefix, key)


def _of_texts(body: Mapping[str, Any], texts: Sequence[str], documents: tuple[str, ...], key: str) -> PromptInfo:
    """Return what is known of a prompt whose tokens the server makes: its lengths are estimated by its characters."""
    shown = body.get("prompt") or "\n".join(
        text for message in body.get("messages") or () for text in texts_of(message.get("content"))
    )
    prompt = shown if isinstance(shown, str) else str(shown)
    num_tokens, position = len(prompt) // _CHARACTERS_PER_TOKEN, 0
    places: list[tuple[int, int]] = []
    for text in texts:
        if (start := prompt.find(text, position)) < 0:
            return PromptInfo(documents, (), 0, num_tokens, None, key)
        position = start + len(text)
        places.append((start, position))
    if not places:
        return PromptInfo(documents, (), 0, num_tokens, None, key)
    static, ends = prompt[: places[0][0]], tuple(end // _CHARACTERS_PER_TOKEN for _, end in places)
    digest = hashlib.sha256(static.encode("utf-8", "replace")).digest()
    return PromptInfo(documents, ends, len(static) // _CHARACTERS_PER_TOKEN, num_tokens, None, key, digest)


def _opening(body: Mapping[str, Any]) -> str:
    """Return the beginning of a prompt without documents: all turns of a conversation share it."""
    if messages := body.get("messages"):
        ends = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        return json.dumps(messages[: ends + 1])
    prompt = body.get("prompt")
    return prompt[: _CHARACTERS_PER_TOKEN * _OPENING] if isinstance(prompt, str) else str(list(prompt or ())[:_OPENING])


@dataclass(frozen=True, slots=True)
class _ReplicaHint:
    """Where an answer came from: the session by which a proxy chose the server, and what that is called."""

    session: str | None = None
    replica: str | None = None


class ProxyAffinity:
    """Puts the headers on requests to one address, in the place of a fleet's choice. May be used by any thread."""

    def __init__(self) -> None:
        self._speculations: OrderedDict[str, _ReplicaHint] = OrderedDict()
        self._answers: OrderedDict[str, _ReplicaHint] = OrderedDict()
        self._is_removal_logged = False

    def send(self, request: httpx.Request) -> AffineRequest:
        """Return ``request`` with its headers; those that an application has set stay."""
        place, is_unnamed = None, False
        hints: dict[str, str | None] = {}
        if asks_completion(request):
            info = RequestInfo.of(request)
            place = _ReplicaHint(
                hashlib.blake2b(info.prompt.key.encode(errors="surrogatepass"), digest_size=8).hexdigest()
            )
            hints = {SESSION_HEADER: place.session, SPECULATION_HEADER: info.speculation}
            if info.speculation is not None:
                _remember(self._speculations, info.speculation, place)
        elif found := SPECULATION_ROUTE.search(request.url.path):
            known = self._speculations.get(found[1], _ReplicaHint())
            hints = {SESSION_HEADER: known.session, SPECULATION_HEADER: found[1]}
        elif found := REQUEST_ROUTE.search(request.url.path):
            known = self._answers.get(unquote(found[1]), _ReplicaHint())
            is_unnamed = known.session is not None and known.replica is None
            hints = {SESSION_HEADER: known.session, REPLICA_HEADER: known.replica}
        for name, value in hints.items():
            if is_sendable(value):  # what a server refuses in a body is not to fail here
                request.headers.setdefault(name, value)
        return AffineRequest(self, request, place, is_unnamed=is_unnamed)

    def answered(self, place: _ReplicaHint, response: httpx.Response, first_bytes: bytes) -> None:
        """Remember where the answer of this id came from."""
        if found := _RESPONSE_ID.search(first_bytes):
            replica = response.headers.get(REPLICA_HEADER)
            _remember(self._answers, found[1].decode(errors="replace"), _ReplicaHint(place.session, replica))

    def log_removal(self, request: httpx.Request) -> None:
        """Log once that answers of a server with RAGCache come without the header that names it."""
        if not self._is_removal_logged:
            self._is_removal_logged = True
            logger.warning(
                "RC-PROXY-HEADERS: a proxy at %s removes %s from answers, so statistics of requests and confirmations "
                "may reach another replica: let %s and x-ragcache-* pass in both directions",
                request.url.netloc.decode(),
                REPLICA_HEADER,
                SESSION_HEADER,
            )


class AffineRequest:
    """A request on its way, to one address whatever happens."""

    def __init__(
        self, affinity: ProxyAffinity, request: httpx.Request, place: _ReplicaHint | None, *, is_unnamed: bool
    ) -> None:
        """``place``: of a completion, whose answer is remembered.

        ``is_unnamed``: a question about an answer that came without the name of its replica.
        """
        self._affinity = affinity
        self._place = place
        self._is_unnamed = is_unnamed
        self.request = request

    def check(self) -> None:
        """Do nothing: who sends it watches the address."""

    def answered(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "")
        is_of_proxy = response.status_code == _BAD_GATEWAY or (
            response.status_code == _UNAVAILABLE and "json" not in kind
        )
        if is_of_proxy and self._place is not None:
            raise self._unsent(response)
        if self._is_unnamed and response.status_code == httpx.codes.OK:  # so it is a server with RAGCache
            self._affinity.log_removal(self.request)

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        if self._place is None:
            return
        if response.status_code == httpx.codes.OK:
            self._affinity.answered(self._place, response, first_bytes)
        elif response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and _UNSENT in first_bytes:
            raise self._unsent(response)

    def failed(self, error: BaseException) -> BaseException:
        return error

    def end(self) -> None:
        """Do nothing: it is counted nowhere."""

    def _unsent(self, response: httpx.Response) -> httpx.ConnectError:
        """Return an error after which it is sent again: no server behind the proxy has begun to answer it."""
        why = f"{self.request.url.host} has no server that answers: status {response.status_code}"
        return httpx.ConnectError(why, request=self.request)


def _remember(places: OrderedDict[str, _ReplicaHint], name: str, place: _ReplicaHint) -> None:
    places[name] = place
    if len(places) > _MAX_REMEMBERED:
        places.popitem(last=False)
