"""The replicas of a fleet: how they are, what each is answering, and which of them gets a request."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import httpx

from ragcache_core.client.engine import Engine
from ragcache_core.client.fleet.choice import choose_replica, with_room
from ragcache_core.client.http.attempt import BROKEN, SENT_ONCE, Health, check_progress, engine_died
from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.errors import EngineUnreachableError
from ragcache_core.ordering import MAX_PATH_DOCUMENTS, static_prefix_digest
from ragcache_core.types import DocId, PromptSegment, SegmentKind
from ragcache_core.wire import KEY

HOME = "http://ragcache-fleet"
"""In place of a replica's address, until one is chosen."""
_SPECULATION_ROUTE = re.compile(r"/v1/ragcache/speculations/([^/]+)")
_REQUEST_ROUTE = re.compile(r"/v1/ragcache/requests/(?:(?:chat)?cmpl-)?(.*-r(\d+))")
_PLACED = re.compile(r"-r\d+$")
_REQUEST_ID = "X-Request-Id"
"""vLLM makes the id of a response from it: which replica has that response's figures is read off its end."""
_MAX_SPECULATIONS = 4096
_MAX_MOVED = 4096
_MAX_REST_S = 60.0
_REST_S = 2.0
_OPENING = 64
"""Tokens, or four times as many characters, by which prompts without documents are told apart."""
_UNREACHED = (502, 503, 504)
"""A server that takes no requests now says 503; of a proxy before it all three are that it does not reach it."""

_logger = logging.getLogger(__name__)
_all: WeakSet[ReplicaSet] = WeakSet()


class Replica:
    """One server of a fleet. May be used by any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.base_url
        self.num_running = 0
        self._failed: tuple[float, int] | None = None
        self._rests_until_s = 0.0

    def is_ready(self) -> bool:
        """Return whether it takes requests, as far as is known. Asks nothing that has to be waited for."""
        watch = self.engine.integration.watch
        if watch.health() is not Health.READY or time.monotonic() < self._rests_until_s:
            return False
        if (failed := self._failed) is not None:
            failed_s, run = failed
            if watch.run == run and not watch.seen_alive_since(failed_s):
                return False
            self._failed = None
        return True

    def failed(self) -> None:
        """Leave it alone until it is seen alive."""
        watch = self.engine.integration.watch
        self._failed = time.monotonic(), watch.run
        watch.suspect(watch.run)

    def rest(self, seconds: float) -> None:
        """Leave it alone for a while: it said so."""
        self._rests_until_s = time.monotonic() + seconds


class ReplicaSet:
    """Chooses among replicas; as a whole it is watched like one server, which answers while one of them does.

    What it knows of their load are the requests that go through it. A fork begins with none.
    """

    run = 1

    def __init__(self, engines: Sequence[Engine], patience_s: float | None) -> None:
        """``patience_s``: how long a request waits where no replica answers."""
        self.patience_s = patience_s
        self.all = [Replica(engine) for engine in engines]
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._speculations: OrderedDict[str, Replica] = OrderedDict()
        self._moved: OrderedDict[str, str] = OrderedDict()
        for replica in self.all:
            replica.num_running = 0

    def ready(self) -> list[Replica]:
        """Return those that take requests."""
        return [replica for replica in self.all if replica.is_ready()]

    def with_room(self) -> list[Replica]:
        """Return those that may get the next request, in the order of :attr:`all`."""
        ready = {replica.name: replica for replica in self.ready()}
        with self._lock:
            return [ready[name] for name in _with_room(ready)]

    # Replicas of a transport

    def send(self, request: httpx.Request) -> RoutedRequest:
        """Choose who gets ``request``, and count that as its load until it ends."""
        request = self._followed(request)
        asked = _Asked.of(request) if asks_completion(request) else None
        ready = {replica.name: replica for replica in self.ready()}
        num_cached = {name: _num_cached_tokens(replica, asked) for name, replica in ready.items()}  # waits for mirrors
        with self._lock:
            replica = self._pinned(request) or self._choose(asked, ready, num_cached)
            sending = RoutedRequest(self, replica, request, asked)
            if asked is not None:
                replica.num_running += 1
                if asked.speculation is not None:
                    self._speculations[asked.speculation] = replica
                    if len(self._speculations) > _MAX_SPECULATIONS:
                        self._speculations.popitem(last=False)
        return sending

    def _pinned(self, request: httpx.Request) -> Replica | None:
        """Return the replica that alone can answer this."""
        if found := _SPECULATION_ROUTE.search(request.url.path):
            return self._speculations.get(found[1])
        if (found := _REQUEST_ROUTE.search(request.url.path)) and int(found[2]) < len(self.all):
            return self.all[int(found[2])]
        return None

    def moved(self, name: str, new_name: str) -> None:
        """Note what an answer is called that began elsewhere, where it goes on."""
        self._moved[name] = new_name
        if len(self._moved) > _MAX_MOVED:
            self._moved.popitem(last=False)

    def _followed(self, request: httpx.Request) -> httpx.Request:
        """Return a question about an answer by the name that it has where it went on."""
        if not (found := _REQUEST_ROUTE.search(request.url.path)) or found[1] not in self._moved:
            return request
        name = found[1]
        while (later := self._moved.get(name)) is not None:
            name = later
        path = request.url.raw_path.decode("ascii").replace(found[1], name)
        url = request.url.copy_with(raw_path=path.encode("ascii"))
        return httpx.Request(request.method, url, headers=request.headers, extensions=request.extensions)

    def _choose(self, asked: _Asked | None, ready: Mapping[str, Replica], num_cached: Mapping[str, int]) -> Replica:
        """Return who gets a request; what is no completion goes to the idlest.

        Raises:
            httpx.ConnectError: no replica takes any.
        """
        if not (candidates := _with_room(ready)):
            why = f"none of the {len(self.all)} replicas takes requests: {', '.join(self.names())}"
            raise httpx.ConnectError(why) from EngineUnreachableError(f"{why}: are the servers running?")
        if asked is None:
            return ready[min(candidates, key=lambda name: ready[name].num_running)]
        return ready[choose_replica(candidates, asked.key, num_cached.__getitem__)]

    def done(self, replica: Replica) -> None:
        """Note that a request of it is over."""
        with self._lock:
            replica.num_running -= 1

    def names(self) -> list[str]:
        """Return the replicas' addresses."""
        return [replica.name for replica in self.all]

    # A watch, as that of one server

    def health(self) -> Health:
        is_gone = all(replica.engine.integration.watch.health() is Health.GONE for replica in self.all)
        return Health.GONE if is_gone else Health.READY

    def suspect(self, run: int) -> None:
        """Do nothing: the one that failed is known, and left alone."""

    def seen_alive_since(self, monotonic_s: float) -> bool:
        return bool(self.ready())

    def why_in_vain(self) -> str | None:
        return None  # each request knows its replica

    def why_gone(self) -> str:
        return "; ".join(replica.engine.integration.watch.why_gone() for replica in self.all)


class RoutedRequest:
    """A request on its way to a replica."""

    def __init__(self, replicas: ReplicaSet, replica: Replica, request: httpx.Request, asked: _Asked | None) -> None:
        """``asked``: of a completion, which counts."""
        self._replicas = replicas
        self._replica = replica
        self._is_counted = asked is not None
        self._process = os.getpid()
        self.request = self._addressed(request, asked)

    def _addressed(self, request: httpx.Request, asked: _Asked | None) -> httpx.Request:
        root = self._replica.name.removesuffix("/v1")
        headers = httpx.Headers(request.headers)
        headers.pop("Host", None)
        headers["Authorization"] = f"Bearer {self._replica.engine.api_key}"
        if asked is not None:
            said, name = headers.get(_REQUEST_ID), asked.request_id
            if said and not (name and re.fullmatch(rf"{re.escape(said)}(-r\d+)+", name)):  # the name goes on elsewhere
                name = said
            name = name or uuid.uuid4().hex
            headers[_REQUEST_ID] = f"{name}-r{self._replicas.all.index(self._replica)}"
            if _PLACED.search(name):
                self._replicas.moved(name, headers[_REQUEST_ID])
        url = f"{root}{request.url.raw_path.decode('ascii')}"
        return httpx.Request(
            request.method, url, headers=headers, content=request.content, extensions=request.extensions
        )

    def check(self) -> None:
        check_progress(self._replica.engine.integration.watch)

    def answered(self, response: httpx.Response) -> None:
        if response.status_code in _UNREACHED and self._is_counted:
            self._replica.rest(_seconds(response.headers.get("Retry-After")))
            if self._replicas.ready():
                raise _BusyError(f"{self._replica.name} takes no requests now", request=self.request)

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        if engine_died(response, first_bytes):
            self._replica.failed()

    def failed(self, error: BaseException) -> BaseException:
        self.end()
        is_suspicious = not SENT_ONCE.keys() <= self.request.extensions.keys()
        if is_suspicious and isinstance(error, (*BROKEN, httpx.ConnectTimeout)) and not isinstance(error, _BusyError):
            _logger.debug("replica %s failed: %s: %s", self._replica.name, type(error).__name__, error)
            self._replica.failed()
        if isinstance(error, httpx.ConnectTimeout):
            return httpx.ConnectError(f"{self._replica.name} accepts no connection: {error}", request=self.request)
        return error

    def end(self) -> None:
        if self._is_counted:
            self._is_counted = False
            if self._process == os.getpid():  # else a fork ends what it has of its parent's
                self._replicas.done(self._replica)


class _BusyError(httpx.ConnectError):
    """A replica takes no requests now, and said so."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What of a request decides who gets it: its documents in order, else how its prompt begins."""

    documents: tuple[DocId, ...]
    prefix: bytes | None
    key: str
    speculation: str | None
    request_id: str | None
    """The one that the body names, which the header would hide."""

    @classmethod
    def of(cls, request: httpx.Request) -> _Asked:
        """Read it from the body; what is no JSON of ours goes by nothing, and the server refuses it."""
        try:
            body = json.loads(request.content)
            params = body.get("kv_transfer_params") or {}
            said = params.get(KEY) or {}
            spans = [(str(each["id"]), int(each["start"])) for each in said.get("documents") or ()]
            documents = tuple(name for name, _ in spans[:MAX_PATH_DOCUMENTS])
            token_ids = params.get("prompt_token_ids") or body.get("prompt")
            prefix = None
            if spans and isinstance(token_ids, list):
                first = PromptSegment(SegmentKind.DOCUMENT, spans[0][1], len(token_ids), spans[0][0])
                prefix = static_prefix_digest(token_ids, [first])
            key = documents[0] if documents else _opening(body)
            speculation = said.get("speculation")
            salted = f"{body.get('cache_salt')}\0{key}"
            request_id = body.get("request_id")
            is_sendable = isinstance(request_id, str) and request_id.isascii() and request_id.isprintable()
            return cls(
                documents,
                prefix,
                salted,
                speculation if isinstance(speculation, str) else None,
                request_id.strip() if is_sendable else None,
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return cls((), None, "", None, None)


def _opening(body: Mapping[str, Any]) -> str:
    """Return how a prompt without documents begins: the turns of a conversation begin alike."""
    if messages := body.get("messages"):
        ends = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        return json.dumps(messages[: ends + 1])
    prompt = body.get("prompt")
    return prompt[: 4 * _OPENING] if isinstance(prompt, str) else str(list(prompt or ())[:_OPENING])


def _with_room(ready: Mapping[str, Replica]) -> list[str]:
    return with_room({name: replica.num_running for name, replica in ready.items()})


def _num_cached_tokens(replica: Replica, asked: _Asked | None) -> int:
    if asked is None or not asked.documents:
        return 0
    with replica.engine.integration.cached_prefixes.reading() as engines:
        return max((each.num_document_tokens(asked.prefix, asked.documents) for each in engines or ()), default=0)


def _seconds(retry_after: str | None) -> float:
    try:
        return max(min(_MAX_REST_S, float(retry_after or _REST_S)), 0.1)  # no number is the longest
    except ValueError:
        return _REST_S


def _start_all_anew() -> None:
    for replicas in list(_all):
        replicas._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
