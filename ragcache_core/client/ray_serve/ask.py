"""A request on its way to a replica: what is sent there, and what decides which one gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache_core.routing.load import AskedPrompt

Headers = list[tuple[str, str]]
Head = tuple[int, Headers]
"""Status and headers of an answer."""
UNREACHED = 502
"""The status of a replica whose server takes no connection."""
HOPS = frozenset(("connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"))
"""Headers that each server sets itself."""


@dataclass(frozen=True, slots=True)
class Count:
    """Tells whoever chose a replica what becomes of a request. May be called by any thread."""

    failed: Callable[[], None]
    answered: Callable[[], None]
    end: Callable[[], None]


@dataclass(eq=False, slots=True)
class Ask:
    """One try of a request. Who sends it and who chooses are in one process; the replica gets four attributes alone.

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
    prompt: AskedPrompt | None = None
    replica: str | None = None
    tried: frozenset[str] = frozenset()
    on_chosen: Callable[[str], None] | None = None
    sent_to: str | None = None
    _count: Count | None = None
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[Ask], tuple[str, str, Headers, bytes]]:
        return Ask, (self.method, self.path, self.headers, self.body)

    def again(self) -> Ask:
        """Return the next try, after this one failed."""
        tried = self.tried if self.sent_to is None else self.tried | {self.sent_to}
        return Ask(self.method, self.path, self.headers, self.body, self.prompt, self.replica, tried, self.on_chosen)

    def begin(self, name: str, count: Count | None) -> None:
        """Note who gets it, in the place of whoever was chosen before."""
        with self._lock:
            self.sent_to = name
            before, self._count = self._count, count
            if self._is_over:  # it was given up while somebody chose; what counted before has ended
                before, self._count = count, None
        if before is not None:
            before.end()
        if self.on_chosen is not None:
            self.on_chosen(name)

    def failed(self) -> None:
        """Note that its replica does not answer it, and may not answer others for a while."""
        if self._count is not None:
            self._count.failed()

    def answered(self) -> None:
        """Note that its answer has begun."""
        if self._count is not None:
            self._count.answered()

    def end(self) -> None:
        """Note that it is over, answered or not. May be called again."""
        with self._lock:
            count = None if self._is_over else self._count
            self._is_over = True
        if count is not None:
            count.end()
