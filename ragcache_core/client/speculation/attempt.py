"""Make and send a speculation in a thread; it can be cancelled before it is sent, meanwhile, and after."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from ragcache_core.client.speculation.client import PreparedRequest
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.errors import EngineError
from ragcache_core.runtime.kept_threads import KeptThreads
from ragcache_core.types import Document

_MAX_THREADS = 32
_threads = KeptThreads("ragcache-speculate", most=_MAX_THREADS)
"""Those of all starts, some of which may be stuck."""


class Speculator(Protocol):
    """Knows what can be sent ahead. It is called in a thread: it may block for the milliseconds of tokenising."""

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation] | None:
        """Make the request that follows from ``documents``, in the order of the prompt; return what sends it.

        ``None`` if nothing can be sent.
        """
        ...


class StartedSpeculation:
    """One start: in a thread first, then in the engine.

    Attributes:
        number: which start of its search it is, once it may be sent.
        stage: the stage that it was sent at.
    """

    def __init__(self, speculator: Speculator, documents: tuple[Document, ...]) -> None:
        """Have a thread make its request, in a copy of the caller's context; :meth:`send` lets it go."""
        self.number = self.stage = -1
        self.documents = documents
        self.is_announced = False
        self._begun_s: float | None = None
        self._sendable_s = 0.0
        self._may_send = self._may_prefetch = False
        self._decided = threading.Event()
        self._future: Future[Speculation | BaseException | None] = Future()
        try:
            is_begun = _threads.run(partial(self._run, speculator))
        except RuntimeError as error:  # no more threads
            self._future.set_result(error)
            return
        if not is_begun:
            self._future.set_result(
                EngineError(f"{_MAX_THREADS} other starts are on their way: see whether the speculator hangs")
            )

    def send(self, *, number: int, stage: int) -> None:
        """Send it as soon as it is made."""
        self.number, self.stage = number, stage
        self._sendable_s, self._may_send = time.perf_counter(), True
        self._decided.set()

    def prefetch(self) -> None:
        """Do not send it: only have the engine read what it has on disk of it, as soon as it is made."""
        self._may_prefetch = True
        self._decided.set()

    @property
    def is_sent(self) -> bool:
        """Whether the thread has sent it, or failed to."""
        return self._future.done() and not self._future.cancelled()

    @property
    def speculation(self) -> Speculation | None:
        """What was sent, if it was."""
        outcome = self._outcome()
        return None if isinstance(outcome, BaseException) else outcome

    @property
    def is_alive(self) -> bool:
        """Whether it was sent, and neither failed nor was cancelled."""
        speculation = self.speculation
        return speculation is not None and not (speculation.is_failed or speculation.is_cancelled)

    @property
    def error(self) -> BaseException | None:
        """What the speculator raised, if it did."""
        outcome = self._outcome()
        return outcome if isinstance(outcome, BaseException) else None

    def abandon(self) -> None:
        """Cancel what was sent, or what a thread is about to send. Safe at any moment, and more than once."""
        self._may_send = False
        self._decided.set()
        if not self._future.cancel():
            self._future.add_done_callback(lambda _: self._cancel())

    def add_sent_callback(self, f: Callable[[], None]) -> None:
        """Call ``f`` once :attr:`is_sent`, in any thread."""
        self._future.add_done_callback(lambda _: f())

    async def wait_until_sent(self, grace_s: float) -> None:
        """Wait for a thread that began, and might send, at most ``grace_s`` ago; what has not begun is cancelled."""
        if self._future.done() or self._future.cancel() or self._begun_s is None:
            return
        left_s = max(self._begun_s, self._sendable_s) + grace_s - time.perf_counter()
        if left_s > 0:
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=left_s)

    def _outcome(self) -> Speculation | BaseException | None:
        return self._future.result() if self.is_sent else None

    def _cancel(self) -> None:
        if (speculation := self.speculation) is not None:
            speculation.cancel()

    def _run(self, speculator: Speculator) -> None:
        self._begun_s = time.perf_counter()
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            outcome: Speculation | BaseException | None = self._send(speculator)
        except BaseException as error:  # whatever it is: the answer does not depend on it
            outcome = error
        self._future.set_result(outcome)

    def _send(self, speculator: Speculator) -> Speculation | None:
        began_s = time.thread_time()
        send = speculator.prepare(self.documents)
        making_s = time.thread_time() - began_s
        if send is None:
            return None
        self._decided.wait()  # whoever started it lets it go or abandons it
        if self._may_prefetch and isinstance(send, PreparedRequest):
            send.prefetch()
        if not self._may_send:
            return None
        speculation = send()
        speculation.making_s = making_s
        return speculation


class Starts:
    """The starts of one search; at most one of them is made before it is known whether it may be sent."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._ahead: StartedSpeculation | None = None

    def make(self, documents: tuple[Document, ...]) -> None:
        """Make a request from ``documents`` ahead, unless that is done; what was made from others is dropped."""
        if self._ahead is None or self._ahead.documents != documents:
            self.drop()
            self._ahead = StartedSpeculation(self._speculator, documents)

    def take(self, documents: tuple[Document, ...]) -> StartedSpeculation:
        """Return the start from ``documents``, its request made ahead or being made now; it is the caller's."""
        self.make(documents)
        assert self._ahead is not None
        taken, self._ahead = self._ahead, None
        return taken

    def drop(self) -> None:
        """Give up what was made ahead."""
        if self._ahead is not None:
            self._ahead.abandon()
            self._ahead = None
