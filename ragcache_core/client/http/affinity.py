"""Headers by which a proxy routes related requests to the same server; see ``docs/operate/proxies.md``.

A proxy that hashes :data:`~ragcache_core.wire.SESSION_HEADER` sends a document, or a conversation, always to the same
server; one that keeps a table of :data:`~ragcache_core.wire.SPECULATION_HEADER` and
:data:`~ragcache_core.wire.REPLICA_HEADER` sends a confirmation, and a question for a request's figures, to the server
that has them. A server without a proxy reads none of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import unquote

import httpx
from pydantic_core import from_json

from ragcache_core.client.speculation.request_capture import asks_completion, asks_prompt
from ragcache_core.log import logger_of
from ragcache_core.ordering import MAX_PATH_DOCUMENTS, static_prefix_digest
from ragcache_core.prompt import texts_of
from ragcache_core.routing.load import PromptInfo
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import KEY, REPLICA_HEADER, REQUEST_ROUTE, SESSION_HEADER, SPECULATION_HEADER, SPECULATION_ROUTE

logger = logger_of(__name__)

_OPENING = 64
"""Number of tokens that distinguish prompts without documents."""
_CHARACTERS_PER_TOKEN = 4
_RESPONSE_ID = re.compile(rb'"id":\s*"([^"]{1,200})"')
_MAX_REMEMBERED = 4096
_BAD_GATEWAY, _UNAVAILABLE = 502, 503
_UNSENT = b"error sending request for url"
"""The error of vllm-router, with status 500, for a server that is gone."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The parts of a request's body that decide its routing: prompt, speculation, and id."""

    prompt: PromptInfo
    speculation: str | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, request: httpx.Request) -> RequestInfo:
        """Read them from the body; empty for an unknown body, which the server rejects."""
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
    """Return whether a header can contain this text."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _prompt(body: Mapping[str, Any], named: Sequence[Any], token_ids: object) -> PromptInfo:
    """Return the routing key of a request's prompt; with the documents' spans if the prompt is tokens."""
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
    """Return the routing key of a prompt of texts; lengths are estimated from characters."""
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
    """Return the beginning of a prompt without documents, which all turns of a conversation share."""
    if messages := body.get("messages"):
        ends = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        return json.dumps(messages[: ends + 1])
    prompt = body.get("prompt")
    return prompt[: _CHARACTERS_PER_TOKEN * _OPENING] if isinstance(prompt, str) else str(list(prompt or ())[:_OPENING])


@dataclass(frozen=True, slots=True)
class _ReplicaHint:
    """The server of an answer: its session, by which a proxy chose it, and its id."""

    session: str | None = None
    replica: str | None = None


class ProxyAffinity:
    """Adds the routing headers to requests for one address behind a proxy. Thread-safe."""

    def __init__(self) -> None:
        self._speculations: OrderedDict[str, _ReplicaHint] = OrderedDict()
        self._answers: OrderedDict[str, _ReplicaHint] = OrderedDict()
        self._is_removal_logged = False

    def send(self, request: httpx.Request) -> AffineRequest:
        """Return ``request`` with the headers; headers of the application are kept."""
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
        elif asks_prompt(request):  # of any server: a proxy that hashes sends the next try to another one
            request.headers[SESSION_HEADER] = secrets.token_hex(8)
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
        """Record the server of the answer with this id."""
        if found := _RESPONSE_ID.search(first_bytes):
            replica = response.headers.get(REPLICA_HEADER)
            _remember(self._answers, found[1].decode(errors="replace"), _ReplicaHint(place.session, replica))

    def log_removal(self, request: httpx.Request) -> None:
        """Log once if a proxy removes the header that names the server."""
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
    """A request to one fixed address."""

    def __init__(
        self, affinity: ProxyAffinity, request: httpx.Request, place: _ReplicaHint | None, *, is_unnamed: bool
    ) -> None:
        """Take ``place``: the routing key of a completion, whose server is recorded.

        ``is_unnamed``: a question about an answer that came without the name of its replica.
        """
        self._affinity = affinity
        self._place = place
        self._is_unnamed = is_unnamed
        self._may_be_repeated = place is not None or asks_prompt(request)
        self.request = request

    def check(self) -> None:
        """Do nothing: the sender monitors the address."""

    def answered(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "")
        is_of_proxy = response.status_code == _BAD_GATEWAY or (
            response.status_code == _UNAVAILABLE and "json" not in kind
        )
        if is_of_proxy and self._may_be_repeated:
            raise self._unsent(response)
        if self._is_unnamed and response.status_code == httpx.codes.OK:  # so it is a server with RAGCache
            self._affinity.log_removal(self.request)

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        if response.status_code == httpx.codes.OK and self._place is not None:
            self._affinity.answered(self._place, response, first_bytes)
        elif (
            self._may_be_repeated
            and response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
            and _UNSENT in first_bytes
        ):
            raise self._unsent(response)

    def failed(self, error: BaseException) -> BaseException:
        return error

    def end(self) -> None:
        """Do nothing: these requests are not counted."""

    def _unsent(self, response: httpx.Response) -> httpx.ConnectError:
        """Return an error after which the request is sent again, as no server has begun to answer it."""
        why = f"{self.request.url.host} has no server that answers: status {response.status_code}"
        return httpx.ConnectError(why, request=self.request)


def _remember(places: OrderedDict[str, _ReplicaHint], name: str, place: _ReplicaHint) -> None:
    places[name] = place
    if len(places) > _MAX_REMEMBERED:
        places.popitem(last=False)
