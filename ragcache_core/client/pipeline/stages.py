"""Read the stages of any search: it may raise, return too many documents, never end, or end without a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from ragcache_core.errors import ConfigError, SearchError, SearchTimeoutError
from ragcache_core.log import logger_of
from ragcache_core.types import Document, RetrievalUpdate

logger = logger_of(__name__)

_HINT = "write stages(query, k) as an async def that yields RetrievalUpdates"
CANCELLED_BY_SOURCE = "the search was cancelled by its source: see the source"
DEFAULT_TIMEOUT_S = 60.0
"""How long a search may take by default: a source that hangs must not block its caller for good."""
_CLOSE_S, _CUT_OFF_S = 1.0, 0.05
"""How long a source may take to clean up, and then to see that it is cancelled: one that hangs is left behind."""

_Result = TypeVar("_Result")


def check_timeout(timeout_s: float | None) -> None:
    """Reject an invalid time-out.

    Raises:
        ConfigError: it is not above 0.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}: give seconds above 0, or None for no limit")


def check_updates(updates: object) -> None:
    """Reject a search whose updates cannot be read stage by stage.

    Raises:
        SearchError: it is no asynchronous iterator.
    """
    if not isinstance(updates, AsyncIterable):
        raise SearchError(f"the search's updates are {updates!r}: {_HINT}")


def check_stage(update: object) -> None:
    """Reject an invalid stage.

    Raises:
        SearchError: it is no update, or what it found are no documents.
    """
    if not isinstance(update, RetrievalUpdate):
        raise SearchError(f"a stage of the search is {update!r}: {_HINT}")
    for document in update.documents:
        if not isinstance(document, Document):
            raise SearchError(f"stage {update.stage} of the search yielded {document!r}: yield Documents only")


async def read_stages(
    updates: AsyncIterator[RetrievalUpdate], on_stage: Callable[[RetrievalUpdate], None], *, k: int | None = None
) -> None:
    """Pass each stage to ``on_stage``, with its first ``k`` distinct documents, until the final one.

    Raises:
        SearchTimeoutError: the source timed out.
        SearchError: the search ended without a final stage, or what it yields are no stages.
    """
    check_updates(updates)
    try:
        async for update in updates:
            check_stage(update)
            on_stage(cut_stage(update, k))
            if update.is_final:
                return
            await asyncio.sleep(0)  # a source that never waits would keep everything else from running, time-outs too
        raise SearchError("the search ended without final documents: its last update must have is_final=True")
    except TimeoutError as error:
        raise SearchTimeoutError(f"the search timed out: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SearchError(CANCELLED_BY_SOURCE) from error


async def close_stages(updates: AsyncIterator[RetrievalUpdate]) -> None:
    """Close the source. An exception from it is logged, and changes no result."""
    try:
        if isinstance(updates, Coroutine):
            updates.close()  # never awaited
        elif (aclose := getattr(updates, "aclose", None)) is not None:
            await aclose()
    except Exception:
        logger.warning("RC-SOURCE-OPEN: a source of stages could not be closed", exc_info=True)


def cut_stage(update: RetrievalUpdate, k: int | None) -> RetrievalUpdate:
    """Return a stage with its first ``k`` distinct documents."""
    first = {document.doc_id: i for i, document in reversed(list(enumerate(update.documents)))}
    kept = sorted(first.values())[:k]
    if len(kept) == len(update.documents):
        return update
    return replace(
        update,
        documents=tuple(update.documents[i] for i in kept),
        scores=tuple(update.scores[i] for i in kept if i < len(update.scores)),
    )


class SearchTasks(Generic[_Result]):
    """The event queue of a search, and the tasks that fill it. All but :meth:`post` run in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Callable[[], Awaitable[_Result | None]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._is_closing = False  # the reader is on its way out
        self._time_out: asyncio.TimerHandle | None = None

    async def handle_next(self) -> _Result | None:
        """Wait for the next event, and return the result of its handler."""
        handle = await self._inbox.get()
        return await handle()

    def put(self, handle: Callable[[], Awaitable[_Result | None]]) -> None:
        """Append ``handle`` to the queue."""
        self._inbox.put_nowait(handle)

    def post(self, handle: Callable[[], Awaitable[_Result | None]]) -> None:
        """Do :meth:`put` from any thread."""
        with suppress(RuntimeError):  # the loop was closed: no caller waits any more
            self._loop.call_soon_threadsafe(self.put, handle)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` until it, or the search, ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def read(
        self,
        updates: AsyncIterator[RetrievalUpdate],
        timeout_s: float | None,
        on_stage: Callable[[RetrievalUpdate, float], Awaitable[_Result | None]],
        on_failed: Callable[[BaseException], Awaitable[_Result | None]],
        *,
        k: int | None,
    ) -> None:
        """Read a search's stages, each cut to its first ``k`` documents.

        Args:
            updates: the stages.
            timeout_s: how long until the last of them; then the search has failed.
            on_stage: takes a stage, and when it ended by ``time.perf_counter()``.
            on_failed: takes what went wrong with the search.
            k: how many documents were asked for.
        """

        def on_done(reader: asyncio.Task[None]) -> None:
            if reader.cancelled():  # by its source, or by us: then the inbox has no reader any more
                self.put(partial(on_failed, SearchError(CANCELLED_BY_SOURCE)))

        self._reader = self.spawn(self._read(updates, on_stage, on_failed, k))
        self._reader.add_done_callback(on_done)
        if timeout_s is not None:  # not around the source: a clean-up that hangs would hold it up
            error = SearchTimeoutError(
                f"the documents were not final after {timeout_s:g} s: allow more time, or search less"
            )
            self._time_out = self._loop.call_later(timeout_s, self.put, partial(on_failed, error))

    async def end(self) -> None:
        """End all tasks and close the updates; cancel them if that takes too long."""
        if self._time_out is not None:
            self._time_out.cancel()
        for task in self._tasks:
            if task is not self._reader:
                task.cancel()
            elif not self._is_closing:
                self._is_closing = task.cancel()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        finally:
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            logger.warning(
                "RC-SOURCE-OPEN: closing a search took more than %g s and was cut off: see how its source ends",
                _CLOSE_S,
            )
            await asyncio.wait(self._tasks, timeout=_CUT_OFF_S)

    async def _read(
        self,
        updates: AsyncIterator[RetrievalUpdate],
        on_stage: Callable[[RetrievalUpdate, float], Awaitable[_Result | None]],
        on_failed: Callable[[BaseException], Awaitable[_Result | None]],
        k: int | None,
    ) -> None:
        def take(update: RetrievalUpdate) -> None:
            self._is_closing = self._is_closing or update.is_final
            self.put(partial(on_stage, update, time.perf_counter()))

        try:
            await read_stages(updates, take, k=k)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of whatever kind: the caller waits for it
            self._is_closing = True
            self.put(partial(on_failed, error))
        finally:
            await close_stages(updates)
