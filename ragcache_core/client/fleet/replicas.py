"""The replicas of a fleet: their state, their load, what they have cached, and which of them gets a request."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast
from urllib.parse import quote

import httpx

from ragcache_core.client.engine import Engine
from ragcache_core.client.http.affinity import RequestInfo
from ragcache_core.client.http.attempt import (
    CONNECTION_ERRORS,
    NO_RETRY,
    Health,
    check_progress,
    engine_died,
    is_first_token_timeout,
)
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes, CachedPrefixIndex
from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.errors import EngineUnreachableError
from ragcache_core.log import logger_of
from ragcache_core.ordering import CachedPaths
from ragcache_core.routing.choice import ReplicaState, below_cached_load_limit, choose_order, choose_replica
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import InFlightRequest, ReplicaLoad
from ragcache_core.runtime.handle import OneProcess
from ragcache_core.types import DocId
from ragcache_core.wire import REQUEST_ROUTE, SPECULATION_ROUTE

HOME = "https://ragcache-fleet"
"""In place of a replica's address, until one is chosen."""
_RESPONSE_OF = re.compile(r"(?:(?:chat)?cmpl-)?(.*-r([0-9]{1,6}))")
_PLACED = re.compile(r"-r\d+$")
_REQUEST_ID = "X-Request-Id"
"""vLLM makes the id of a response from it: which replica has that response's figures is read off its end."""
_LATE = "ragcache_late"
"""Extension of a request that is sent once more: who was late with its first token, and gets it again as the last."""
_MAX_SPECULATIONS = 4096
_MAX_MOVED = 4096
_MAX_REST_S = 60.0
_REST_S = 2.0
_UNREACHED = (502, 503)
"""A server that takes no requests now says 503; of a proxy before it both are that it does not reach it. With 504 it
has waited for the answer: sent again, what takes long would be computed by every replica."""

logger = logger_of(__name__)


class Replica:
    """One server of a fleet. May be used by any thread."""

    def __init__(self, engine: Engine, number: int) -> None:
        """``number``: of this replica alone, as long as the fleet lives."""
        self.engine = engine
        self.number = number
        self.name = engine.base_url
        self.load = ReplicaLoad()
        self.mirror = cast("CachedPrefixes", engine.integration.cached_prefixes)
        self._failed: tuple[float, int] | None = None
        self._rests_until_s = 0.0

    def is_ready(self) -> bool:
        """Return whether it takes requests, as far as is known. Asks nothing that has to be waited for."""
        watch = self.engine.integration.watch
        if watch.health() is not Health.READY or time.monotonic() < self._rests_until_s:
            return False
        if (failed := self._failed) is not None:
            failed_s, run = failed
            if watch.run == run and not watch.healthy_since(failed_s):
                return False
            self._failed = None
        return True

    def failed(self) -> None:
        """Leave it alone until it is seen alive."""
        watch = self.engine.integration.watch
        self._failed = time.monotonic(), watch.run
        watch.request_health_check(watch.run)

    def rest(self, seconds: float) -> None:
        """Leave it alone for a while: it said so."""
        self._rests_until_s = time.monotonic() + seconds


class ReplicaSet:
    """Chooses among replicas; as a whole it is watched like one server, which answers while one of them does.

    What it knows of their load are the requests that go through it.
    """

    run = 1

    def __init__(self, engines: Sequence[Engine], retry_timeout_s: float | None) -> None:
        """``retry_timeout_s``: how long a request waits where no replica answers."""
        self.retry_timeout_s = retry_timeout_s
        self.all: tuple[Replica, ...] = ()
        self._num_added = 0
        self._of_load: dict[ReplicaLoad, Replica] = {}
        self._process = OneProcess()
        self._lock = threading.Lock()
        self.index = PathIndex()
        """What all have cached; only inside :meth:`known`."""
        self._speculations: OrderedDict[str, Replica] = OrderedDict()
        self._moved: OrderedDict[str, str] = OrderedDict()
        self._over: deque[InFlightRequest] = deque()
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> None:
        """Take one more replica."""
        with self._counting():
            replica = Replica(engine, self._num_added)
            self._num_added += 1
            self._of_load[replica.load] = replica
            deque(self.index.join(replica.load.expected), 0)
        replica.mirror.keep_in(self.index, self._lock)
        self.all = (*self.all, replica)

    def remove(self, replica: Replica) -> None:
        """Send a replica no more requests; it goes on with those that it has."""
        self.all = tuple(each for each in self.all if each is not replica)

    def forget(self, replica: Replica) -> None:
        """Drop what is known of a removed replica, which answers nothing any more."""
        with self._counting():
            for speculation in [each for each, at in self._speculations.items() if at is replica]:
                del self._speculations[speculation]
            deque(self.index.leave(replica.load.expected), 0)
            del self._of_load[replica.load]

    def ready(self) -> list[Replica]:
        """Return those that take requests."""
        return [replica for replica in self.all if replica.is_ready()]

    @contextmanager
    def known(self, *, has_documents: bool = True) -> Iterator[list[ReplicaState]]:
        """Give those that take requests, which do not change inside; ``has_documents``: what they have cached, too."""
        ready, index = self.ready(), self.index
        with self._counting():
            yield [
                ReplicaState(one.name, one.mirror.known_in(index) if has_documents else None, one.load) for one in ready
            ]

    # Replicas of a transport

    def send(self, request: httpx.Request) -> RoutedRequest:
        """Choose who gets ``request``, and count that as its load until it ends."""
        request = self._followed(request)
        if not asks_completion(request):
            return RoutedRequest(self, self._pinned(request) or self._idlest(), request, None)
        info = RequestInfo.of(request)
        with self.known(has_documents=bool(info.prompt.documents)) as known:
            late = request.extensions.get(_LATE)
            in_time = [replica for replica in self._some(known) if replica.name != late]
            chosen = choose_replica(self.index, in_time or known, info.prompt)
            replica = self._replica(chosen)
            sending = RoutedRequest(self, replica, request, info)
            sending.sent = chosen.load.begin(info.prompt, chosen.num_cached_tokens(info.prompt))
            if info.speculation is not None:
                self._speculations[info.speculation] = replica
                if len(self._speculations) > _MAX_SPECULATIONS:
                    self._speculations.popitem(last=False)
        return sending

    def _pinned(self, request: httpx.Request) -> Replica | None:
        """Return the replica that alone can answer this."""
        if found := SPECULATION_ROUTE.search(request.url.path):
            with self._counting():
                return self._speculations.get(found[1])
        if found := _response(request):
            return next((replica for replica in self.all if replica.number == int(found[2])), None)
        return None

    def moved(self, name: str, new_name: str) -> None:
        """Note what an answer is called that began elsewhere, where it goes on."""
        self._moved[name] = new_name
        if len(self._moved) > _MAX_MOVED:
            self._moved.popitem(last=False)

    def _followed(self, request: httpx.Request) -> httpx.Request:
        """Return a question about an answer by the name that it has where it went on."""
        if not (found := _response(request)) or found[1] not in self._moved:
            return request
        name = found[1]
        while (later := self._moved.get(name)) is not None:
            name = later
        path = request.url.raw_path.decode("ascii").replace(quote(found[1], safe=""), quote(name, safe=""))
        url = request.url.copy_with(raw_path=path.encode("ascii"))
        return httpx.Request(request.method, url, headers=request.headers, extensions=request.extensions)

    def _some(self, known: list[ReplicaState]) -> list[ReplicaState]:
        """Return the replicas that take requests.

        Raises:
            httpx.ConnectError: none does.
        """
        if not known:
            why = f"none of the {len(self.all)} replicas takes requests: {', '.join(self.names()) or 'none is known'}"
            raise httpx.ConnectError(why) from EngineUnreachableError(f"{why}: are the servers running?")
        return known

    def _idlest(self) -> Replica:
        with self.known(has_documents=False) as known:
            return self._replica(min(self._some(known), key=lambda replica: replica.load.num_running))

    def _replica(self, known: ReplicaState) -> Replica:
        return self._of_load[known.load]

    def answered(self, sent: InFlightRequest) -> None:
        """Note that a request has its first token."""
        with self._counting():
            sent.answered()

    def done(self, sent: InFlightRequest) -> None:
        """Note that a request is over. Never waits: Python may collect an answer in a thread that is counting."""
        self._over.append(sent)
        self._count_over()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Hold the lock of the counts and the index; count the requests that ended before and meanwhile."""
        self._process.check()
        try:
            with self._lock:
                while self._over:
                    self._over.popleft().end()
                yield
        finally:
            self._count_over()

    def _count_over(self) -> None:
        """Count what has ended, unless another thread holds the lock: it does so then."""
        while self._over and self._lock.acquire(blocking=False):
            try:
                while self._over:
                    self._over.popleft().end()
            finally:
                self._lock.release()

    def names(self) -> list[str]:
        """Return the replicas' addresses."""
        return [replica.name for replica in self.all]

    # A watch, as that of one server

    def health(self) -> Health:
        states = {replica.engine.integration.watch.health() for replica in self.all}
        return Health.GONE if states == {Health.GONE} else Health.READY

    def request_health_check(self, run: int) -> None:
        """Do nothing: the one that failed is known, and left alone."""

    def healthy_since(self, monotonic_s: float) -> bool:
        return bool(self.ready())

    def stall_reason(self) -> str | None:
        return None  # each request knows its replica

    def exit_reason(self) -> str:
        return "; ".join(replica.engine.integration.watch.exit_reason() for replica in self.all)


class RoutedRequest:
    """A request on its way to a replica."""

    def __init__(
        self, replicas: ReplicaSet, replica: Replica, request: httpx.Request, info: RequestInfo | None
    ) -> None:
        """``info``: of a completion, which counts."""
        self._replicas = replicas
        self._replica = replica
        self._unaddressed = request
        self.sent: InFlightRequest | None = None
        """How it counts, until it is over."""
        self.request = self._addressed(request, info)

    def _addressed(self, request: httpx.Request, info: RequestInfo | None) -> httpx.Request:
        root = self._replica.name.removesuffix("/v1")
        headers = httpx.Headers(request.headers)
        headers.pop("Host", None)
        headers["Authorization"] = f"Bearer {self._replica.engine.api_key}"
        if info is not None:
            header_id, name = headers.get(_REQUEST_ID), info.request_id
            if header_id and not (
                name and re.fullmatch(rf"{re.escape(header_id)}(-r\d+)+", name)
            ):  # the name goes on elsewhere
                name = header_id
            name = name or uuid.uuid4().hex
            headers[_REQUEST_ID] = f"{name}-r{self._replica.number}"
            if _PLACED.search(name):
                self._replicas.moved(name, headers[_REQUEST_ID])
        url = f"{root}{request.url.raw_path.decode('ascii')}"
        return httpx.Request(
            request.method, url, headers=headers, content=request.content, extensions=request.extensions
        )

    def check(self) -> None:
        check_progress(self._replica.engine.integration.watch)

    def answered(self, response: httpx.Response) -> None:
        if response.status_code in _UNREACHED and self.sent is not None:
            self._replica.rest(_seconds(response.headers.get("Retry-After")))
            if self._replicas.ready():
                raise _BusyError(f"{self._replica.name} takes no requests now", request=self.request)

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        if engine_died(response, first_bytes):
            self._replica.failed()
        elif self.sent is not None:
            self._replicas.answered(self.sent)

    def failed(self, error: BaseException) -> BaseException:
        self.end()
        if is_first_token_timeout(error):
            self._unaddressed.extensions[_LATE] = self._replica.name
        is_suspicious = not NO_RETRY.keys() <= self.request.extensions.keys()
        if (
            is_suspicious
            and isinstance(error, (*CONNECTION_ERRORS, httpx.ConnectTimeout))
            and not isinstance(error, _BusyError)
        ):
            logger.debug("replica %s failed: %s: %s", self._replica.name, type(error).__name__, error)
            self._replica.failed()
        if isinstance(error, httpx.ConnectTimeout):
            return httpx.ConnectError(f"{self._replica.name} accepts no connection: {error}", request=self.request)
        return error

    def end(self) -> None:
        if self.sent is not None:
            sent, self.sent = self.sent, None
            self._replicas.done(sent)


class _BusyError(httpx.ConnectError):
    """A replica takes no requests now, and said so."""


def _response(request: httpx.Request) -> re.Match[str] | None:
    """Return the id in a question about an answer that a replica of this fleet gave, and that replica's number."""
    found = REQUEST_ROUTE.search(request.url.path)
    return found and _RESPONSE_OF.match(found[1])


def _seconds(retry_after: str | None) -> float:
    try:
        return max(min(_MAX_REST_S, float(retry_after or _REST_S)), 0.1)  # no number is the longest
    except ValueError:
        return _REST_S


class FleetPrefixes(CachedPrefixIndex):
    """The mirrors of the replicas that may get the next request: an order is chosen together with its replica."""

    def __init__(self, replicas: ReplicaSet) -> None:
        """The mirrors are the replicas' own, which close them."""
        self._replicas = replicas

    @property
    def is_current(self) -> bool:
        return all(replica.mirror.is_current for replica in self._replicas.ready())

    def order(self, documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool) -> tuple[int, ...] | None:
        with self._replicas.known() as replicas:
            return choose_order(self._replicas.index, replicas, documents, prefix=prefix, keep_first=keep_first)

    @contextmanager
    def reading(self) -> Iterator[Sequence[CachedPaths] | None]:
        with self._replicas.known() as replicas:
            known = [replica for replica in below_cached_load_limit(replicas) if replica.mirrors is not None]
            yield [paths for replica in known for paths in replica.caches] or None

    def refresh(self, timeout_s: float) -> bool:
        ready = self._replicas.ready()
        with ThreadPoolExecutor(len(ready) or 1) as threads:
            return all([*threads.map(lambda replica: replica.mirror.refresh(timeout_s), ready)])

    def close(self) -> None:
        """Do nothing."""
