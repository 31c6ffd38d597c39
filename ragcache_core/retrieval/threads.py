"""The threads of a store: one executor for its staged searches, and coroutines for blocking callers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ragcache_core.errors import StoreError
from ragcache_core.retrieval.base import Cancellation, SearchThroughput, Stage, faiss, stage_cuts
from ragcache_core.retrieval.lexical import words_of
from ragcache_core.retrieval.search import Search, SearchQuery, SearchQuestion
from ragcache_core.retrieval.storage.snapshot import Snapshot
from ragcache_core.runtime.daemon_threads import DaemonThreadPool
from ragcache_core.types import RetrievalUpdate

_Result = TypeVar("_Result")

_INTERRUPT_POLL_S = 0.25
_LEAST_EMBEDDING_S = 0.005
"""A question that is embedded in less time has no stage of words alone."""
_threads = DaemonThreadPool("ragcache-retrieve")
"""Threads for calls that may block for ever: a user's retriever, embedder, reranker or filter."""


class SearchThreads:
    """Runs blocking work for callers in any event loop. Thread-safe."""

    def __init__(self, owner: str, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._owner = owner
        self._clock_s = clock_s
        self._pace = SearchThroughput()
        self._embedding_s = 0.0  # the last question's
        self._executor = ThreadPoolExecutor(
            max_workers=min(16, (os.cpu_count() or 1) + 4),
            thread_name_prefix="ragcache-retrieval",
            initializer=_use_one_thread,
        )

    def close(self) -> None:
        """Finish running work and end the threads."""
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

    async def text_updates(
        self, snapshot: Snapshot, text: str, query: SearchQuery, stages: int | Sequence[float] | None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what :meth:`updates` does. Where embedding questions takes long, and words count, the first stage is
        the result of the words alone while the question is embedded.
        """

        def embed() -> SearchQuestion:
            began_s = self._clock_s()
            question = SearchQuestion.of(snapshot, text)
            self._embedding_s = self._clock_s() - began_s
            return question

        embedding, num_early = self.submit(embed), 0
        has_words = snapshot.manifest.options.word_weight and query.mmr is None and not callable(query.where)
        if has_words and self._embedding_s >= _LEAST_EMBEDDING_S and isinstance(text, str):
            words = SearchQuestion(np.zeros(0, np.float32), words_of(text))
            early = await self.run(lambda: Search(snapshot, words, query).run_words())
            if early.documents and not embedding.done():
                yield early
                num_early = 1
        question = await asyncio.wrap_future(embedding)
        async with aclosing(self.updates(snapshot, question, query, stages)) as updates:
            async for update in updates:
                yield replace(update, stage=update.stage + num_early) if num_early else update

    async def updates(
        self, snapshot: Snapshot, question: SearchQuestion, query: SearchQuery, stages: int | Sequence[float] | None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the result of each stage. Each stage is one call of the executor, awaited in between.

        The index's search is timed if it reaches its end, without the waits, the words, the filter and the reading of
        documents. A filter that is a function has one stage, in a thread of its own.
        """
        if callable(query.where):
            yield await in_thread(lambda: Search(snapshot, question, query).run())
            return
        cancel = Cancellation()
        if question.words is None and query.where is None:
            search = Search(snapshot, question, query)
        else:
            search = await self._stoppable(lambda: Search(snapshot, question, query), cancel)
        cuts = stage_cuts(stages, search.work, self._pace.multiply_adds_per_ms, search.max_default_stages)
        steps = search.stages(cuts, cancel)
        number = 0
        searched_s = 0.0

        def advance() -> RetrievalUpdate | None:
            nonlocal searched_s
            began_s = self._clock_s()
            stage: Stage | None = next(steps, None)
            searched_s += self._clock_s() - began_s
            if stage is None:
                return None
            if stage.is_final:
                self._pace.record(search.work, searched_s)
            return search.update(stage, number)

        try:
            while (update := await self._stoppable(advance, cancel)) is not None:
                yield update
                if update.is_final:
                    return
                number += 1
        finally:
            cancel.cancel()

    async def _stoppable(self, work: Callable[[], _Result], cancel: Cancellation) -> _Result:
        """Run ``work``; if the caller is cancelled, stop it and wait until its thread is free."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel.cancel()
            if not future.done():
                await asyncio.wait([asyncio.wrap_future(future)])
            raise


def run_blocking(make: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Return the result of the coroutine of ``make``, with or without an event loop in this thread.

    It runs in a loop of its own, in a thread of its own with a copy of the caller's context; both have ended when this
    returns or raises. An interrupt of the caller cancels the coroutine and is raised when that has cleaned up.
    """
    result: Future[_Result] = Future()
    is_interrupted = False
    cancel: Callable[[], object] | None = None

    async def run() -> _Result:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if is_interrupted:
            raise asyncio.CancelledError
        return await make()

    def work() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(asyncio.run(run()))
            except BaseException as error:
                result.set_exception(error)

    # Not an executor: an interrupt while that starts its thread makes it forget the thread.
    thread = threading.Thread(target=copy_context().run, args=(work,), name="ragcache-blocking")
    try:
        thread.start()
        while not wait((result,), _INTERRUPT_POLL_S).done:
            pass  # an interrupt in the microsecond before a wait is noticed when it ends
    except BaseException:
        if not result.cancel():
            is_interrupted = True
            if cancel is not None:
                with suppress(RuntimeError):  # the loop is closed: it was just done
                    cancel()
            wait((result,))
            thread.join()
        raise
    thread.join()
    return result.result()


def closed_error(owner: str) -> StoreError:
    """Return the error for using a closed store."""
    return StoreError(f"{owner} was closed: open it again")


def _use_one_thread() -> None:
    faiss.omp_set_num_threads(1)  # per thread: a team of threads for each stage costs more than the stage


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """Return the result of a blocking call in a new thread, so that one without end delays no other."""
    outcome: Future[_Result] = Future()
    outcome.set_running_or_notify_cancel()  # a time-out cannot cancel it any more, only forget it

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    _threads.run(run)
    return await asyncio.wrap_future(outcome)
