"""The threads of a store: one named executor, and staged searches in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import faiss

from ragcache_core.errors import StoreError
from ragcache_core.retrieval.base import Cancellation, Stage, Vectors, stage_cuts
from ragcache_core.retrieval.snapshot import Snapshot
from ragcache_core.types import Document, RetrievalUpdate

_Result = TypeVar("_Result")


class SearchThreads:
    """Runs blocking work for callers in any number of event loops. Safe to use from several threads."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._executor = ThreadPoolExecutor(
            max_workers=min(16, (os.cpu_count() or 1) + 4),
            thread_name_prefix="ragcache-retrieval",
            initializer=_use_one_thread,
        )

    def close(self) -> None:
        """Finish what runs and end the threads."""
        self._executor.shutdown(wait=True)

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run ``work`` in a thread.

        Raises:
            StoreError: the store was closed.
        """
        try:
            return self._executor.submit(work)
        except RuntimeError as error:
            raise closed_error(self._owner) from error

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Return what ``work`` returns. A cancelled caller does not wait for it."""
        return await asyncio.wrap_future(self.submit(work))

    async def updates(
        self, snapshot: Snapshot, vector: Vectors, k: int, stages: int | Sequence[float] | None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage: one call of the executor for each, awaited in between."""
        index = snapshot.index_for(k)
        cancel = Cancellation()
        steps = index.stages(vector, int(k), stage_cuts(stages, index.work(k)), cancel)
        seen: dict[int, Document] = {}
        number = 0

        def advance() -> RetrievalUpdate | None:
            stage: Stage | None = next(steps, None)
            return None if stage is None else snapshot.update(stage, number, seen)

        try:
            while (update := await self._stoppable(advance, cancel)) is not None:
                yield update
                if update.is_final:
                    return
                number += 1
        finally:
            cancel.cancel()

    async def _stoppable(self, work: Callable[[], _Result], cancel: Cancellation) -> _Result:
        """Run ``work``; when the caller is cancelled, stop it and wait until its thread is free."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel.cancel()
            if not future.done():
                await asyncio.wait([asyncio.wrap_future(future)])
            raise


def closed_error(owner: str) -> StoreError:
    """Return the error of a store that is used after it was closed."""
    return StoreError(f"{owner} was closed: open it again")


def _use_one_thread() -> None:
    faiss.omp_set_num_threads(1)  # per thread: a team of threads for each stage costs more than the stage
