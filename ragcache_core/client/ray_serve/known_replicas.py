"""Requests to Ray Serve replicas, the replicas' state, and the choice of a replica."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes
from ragcache_core.log import logger_of
from ragcache_core.routing.choice import ReplicaState, choose_replica
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import InFlightRequest, PromptInfo, ReplicaLoad

Headers = list[tuple[str, str]]
Head = tuple[int, Headers]
"""Status and headers of an answer."""
BAD_GATEWAY = 502
"""The status of a replica whose server takes no connection."""
HOP_BY_HOP_HEADERS = frozenset(
    ("connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding")
)
"""Headers that each server sets itself."""
_REST_S = 2.0
logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class Count:
    """Reports the progress of a request to the router. Thread-safe."""

    failed: Callable[[], None]
    answered: Callable[[], None]
    end: Callable[[], None]


@dataclass(eq=False, slots=True)
class ReplicaRequest:
    """One attempt of a request. Sender and router share a process; the replica gets only four attributes.

    Attributes:
        path: with its query, as it came.
        prompt: of a completion, which counts as its replica's load.
        replica: the only one that can answer it.
        tried: replicas that did not.
        on_chosen: told who was chosen, in whatever thread that is done.
        sent_to: the replica that was chosen.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    prompt: PromptInfo | None = None
    replica: str | None = None
    tried: frozenset[str] = frozenset()
    on_chosen: Callable[[str], None] | None = None
    sent_to: str | None = None
    _count: Count | None = None
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[ReplicaRequest], tuple[str, str, Headers, bytes]]:
        return ReplicaRequest, (self.method, self.path, self.headers, self.body)

    def again(self) -> ReplicaRequest:
        """Return the next attempt, after this one failed."""
        tried = self.tried if self.sent_to is None else self.tried | {self.sent_to}
        return ReplicaRequest(
            self.method, self.path, self.headers, self.body, self.prompt, self.replica, tried, self.on_chosen
        )

    def begin(self, name: str, count: Count | None) -> None:
        """Record the replica that gets the request in place of an earlier choice."""
        with self._lock:
            self.sent_to = name
            before, self._count = self._count, count
            if self._is_over:  # it was cancelled while a replica was chosen; what counted before has ended
                before, self._count = count, None
        if before is not None:
            before.end()
        if self.on_chosen is not None:
            self.on_chosen(name)

    def failed(self) -> None:
        """Record that the replica does not answer, and may not answer other requests for a while."""
        if self._count is not None:
            self._count.failed()

    def answered(self) -> None:
        """Record that the answer has begun."""
        if self._count is not None:
            self._count.answered()

    def end(self) -> None:
        """Record the end of the request, answered or not. Idempotent."""
        with self._lock:
            count = None if self._is_over else self._count
            self._is_over = True
        if count is not None:
            count.end()


@dataclass(eq=False, slots=True)
class _Replica:
    url: str
    serves: Mapping[str, Any]
    mirror: CachedPrefixes
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    rests_until_s: float = 0.0


class ReplicaStates:
    """Tracks what each replica has cached, and the requests sent to it from here. Thread-safe."""

    def __init__(self, follow: Callable[[str, str], CachedPrefixes] = CachedPrefixes) -> None:
        """Take ``follow``, which makes the cache index of a server from its address (ending in ``/v1``) and key."""
        self._follow = follow
        self._lock = threading.Lock()
        self._index = PathIndex()
        self._all: dict[str, _Replica] = {}

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the present replicas by name, with ``url``, ``api_key`` and what each ``serves``.

        One that serves something else than the oldest is asked nothing.
        """
        with self._lock:
            gone = [self._all.pop(name) for name in self._all.keys() - reports.keys()]
            for replica in gone:
                deque(self._index.leave(replica.load.expected), 0)
            new = [name for name in reports if name not in self._all]
        for replica in gone:  # closing an index waits for its thread
            threading.Thread(target=replica.mirror.close, name="ragcache-mirror-end", daemon=True).start()
        for name in new:
            url, serves = reports[name]["url"], reports[name]["serves"]
            mirror = self._follow(url, reports[name]["api_key"])
            mirror.keep_in(self._index, self._lock)
            with self._lock:
                replica = self._all[name] = _Replica(url, serves, mirror)
                deque(self._index.join(replica.load.expected), 0)
                self._check_same_model(name)

    def _check_same_model(self, name: str) -> None:
        oldest, replica = next(iter(self._all.values())), self._all[name]
        for what, value in oldest.serves.items():
            if replica.serves.get(what) != value:
                logger.error(
                    "RC-REPLICA-DIFFERS: the replica at %s has another %s than that at %s, %.80r and not %.80r, and "
                    "gets no requests while that one runs: put the same model on every node",
                    *(replica.url, what, oldest.url, replica.serves.get(what), value),
                )

    def choose(self, names: Sequence[str], ask: ReplicaRequest) -> list[str]:
        """Return the replica of ``names`` for a request, then the alternatives if it is full; empty if there is none.

        It counts as the load of the first until it ends.
        """
        if ask.replica is not None and ask.replica in names:
            ask.begin(ask.replica, None)
            return [ask.replica]
        prompt, count = ask.prompt, None
        willing = sorted(self._willing(names, ask).items())
        with self._lock:
            known = [
                ReplicaState(name, one.mirror.known_in(self._index) if prompt and prompt.documents else None, one.load)
                for name, one in willing
            ]
            if not known:
                return []
            if prompt is None:
                chosen = min(known, key=lambda replica: replica.load.num_running)
            else:
                chosen = choose_replica(self._index, known, prompt)
                count = self._count(chosen.name, chosen.load.begin(prompt, chosen.num_cached_tokens(prompt)))
        ask.begin(chosen.name, count)
        return [chosen.name, *(replica.name for replica in known if replica is not chosen)]

    def sent(self, name: str, ask: ReplicaRequest) -> None:
        """Record the replica that got a request; it differs from the chosen one if that was full."""
        if name == ask.sent_to:
            return
        count = None
        with self._lock:
            if ask.prompt is not None and (replica := self._all.get(name)) is not None:
                count = self._count(name, replica.load.begin(ask.prompt, 0))
        ask.begin(name, count)

    def _count(self, name: str, sent: InFlightRequest) -> Count:
        return Count(partial(self._rest, name), partial(self._locked, sent.answered), partial(self._locked, sent.end))

    def _locked(self, note: Callable[[], None]) -> None:
        with self._lock:
            note()

    def _rest(self, name: str) -> None:
        with self._lock:
            if (replica := self._all.get(name)) is not None:
                replica.rests_until_s = time.monotonic() + _REST_S

    def _willing(self, names: Sequence[str], ask: ReplicaRequest) -> dict[str, _Replica]:
        """Return the replicas that may be able to answer; if there are none, all that serve the same model."""
        now_s = time.monotonic()
        with self._lock:
            serves = next((replica.serves for replica in self._all.values()), None)
            same = {name: one for name, one in self._all.items() if name in names and one.serves == serves}
        untried = {name: replica for name, replica in same.items() if name not in ask.tried}
        return {name: one for name, one in untried.items() if one.rests_until_s <= now_s} or untried or same
