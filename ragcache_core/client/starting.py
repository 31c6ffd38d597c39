"""Send a speculation from a thread, and give it up at any moment: before it was sent, meanwhile, or after."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from ragcache_core.client.speculating import Speculation
from ragcache_core.types import DocId, Document


class _Threads:
    """The executor of all starts; a fork gets one of its own."""

    def __init__(self) -> None:
        self.start_anew()
        os.register_at_fork(after_in_child=self.start_anew)

    def start_anew(self) -> None:
        self.executor = ThreadPoolExecutor(4, "ragcache-speculate")


_threads = _Threads()


class Speculator(Protocol):
    """Knows what can be sent ahead. It is called in a thread: it may block for the milliseconds of tokenising."""

    def start(self, documents: Sequence[Document]) -> Speculation | None:
        """Send what follows from ``documents``, in the order of the prompt; ``None`` if nothing can be sent."""
        ...


class StartedSpeculation:
    """One start: in a thread first, then in the engine."""

    def __init__(self, speculator: Speculator, documents: Sequence[Document], *, number: int, stage: int) -> None:
        """Have a thread send it, in a copy of the caller's context."""
        self.number = number
        self.stage = stage
        self.doc_ids: tuple[DocId, ...] = tuple(document.doc_id for document in documents)
        self.is_announced = False
        self._future: Future[Speculation | Exception | None] = _threads.executor.submit(
            copy_context().run, _attempt, speculator, documents
        )

    @property
    def is_sent(self) -> bool:
        """Whether the thread is done with it, well or not."""
        return self._future.done()

    @property
    def speculation(self) -> Speculation | None:
        """What was sent, if it was."""
        outcome = self._outcome()
        return None if isinstance(outcome, Exception) else outcome

    @property
    def is_alive(self) -> bool:
        """Whether its answer comes, or came: it was sent, and neither failed nor was cancelled."""
        speculation = self.speculation
        return speculation is not None and not (speculation.is_failed or speculation.is_cancelled)

    @property
    def error(self) -> Exception | None:
        """What the speculator raised, if it did."""
        outcome = self._outcome()
        return outcome if isinstance(outcome, Exception) else None

    def abandon(self) -> None:
        """Cancel what was sent, or what a thread is about to send. Safe at any moment, and more than once."""
        if not self._future.cancel():
            self._future.add_done_callback(lambda _: self._cancel())

    def add_sent_callback(self, f: Callable[[], None]) -> None:
        """Call ``f`` once :attr:`is_sent`, in any thread."""
        self._future.add_done_callback(lambda _: f())

    async def wait_until_sent(self, timeout_s: float) -> None:
        """Wait for the thread, but not longer than ``timeout_s``."""
        if not self._future.done():
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=timeout_s)

    def _outcome(self) -> Speculation | Exception | None:
        return self._future.result() if self._future.done() and not self._future.cancelled() else None

    def _cancel(self) -> None:
        if (speculation := self.speculation) is not None:
            speculation.cancel()


def _attempt(speculator: Speculator, documents: Sequence[Document]) -> Speculation | Exception | None:
    try:
        return speculator.start(documents)
    except Exception as error:  # whatever it is: the answer does not depend on it
        return error
