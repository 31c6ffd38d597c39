"""A scripted search, engine and speculator for the runner of a search with speculation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from ragcache_core.client.pipeline.run import PipelineResult, run_pipeline
from ragcache_core.client.speculation import client as attempt
from ragcache_core.client.speculation.client import EngineLoad, PreparedRequest
from ragcache_core.types import Document, RetrievalUpdate
from tests.support.waiting import until

STEP_S = 0.02
"""Longer than anything here takes but what is told to."""


class Sent:
    """A speculation that was sent; the test says what becomes of it."""

    def __init__(self, doc_ids: tuple[str, ...]) -> None:
        self.doc_ids = doc_ids
        self.sent_s = time.perf_counter()
        self.started_s: float | None = self.sent_s
        self.making_s = 0.0
        self.can_be_adopted = self.is_claimed = self.has_documents = True
        self.error: Exception | None = None
        self.is_cancelled = self.is_confirmed = False
        self._callbacks: list[Callable[[Any], None]] = []

    @property
    def is_failed(self) -> bool:
        return self.error is not None

    def cancel(self) -> None:
        self.is_cancelled = True
        self._done()

    def confirm(self) -> None:
        self.is_confirmed = True

    def fail(self) -> None:
        self.error = RuntimeError("the engine died")
        thread = threading.Thread(target=self._done)  # as the engine handle's own thread does
        thread.start()
        thread.join()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def _done(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class ScriptedSpeculator:
    """Notes what is sent; may be slow, raise, or have nothing to send."""

    def __init__(self, *, takes_s: float = 0.0, error: BaseException | None = None, has_any: bool = True) -> None:
        self.sent: list[Sent] = []
        self.prefetched: list[tuple[str, ...]] = []
        self.threads: set[int] = set()
        self.num_calls = 0
        self._takes_s, self._error, self._has_any = takes_s, error, has_any

    def prepare(self, documents: Sequence[Document]) -> Any:
        self.num_calls += 1
        self.threads.add(threading.get_ident())
        time.sleep(self._takes_s)
        if self._error is not None:
            raise self._error
        if not self._has_any:
            return None
        return Prepared(self, documents)

    def _send(self, documents: Sequence[Document]) -> Any:
        self.sent.append(Sent(tuple(d.doc_id for d in documents)))
        return self.sent[-1]

    def shown(self) -> list[tuple[str, ...]]:
        return [sent.doc_ids for sent in self.sent]

    def alive(self) -> list[Sent]:
        return [sent for sent in self.sent if not sent.is_cancelled and not sent.is_failed]


class Prepared(PreparedRequest):
    """A request that is sent, or only read ahead."""

    def __init__(self, speculator: ScriptedSpeculator, documents: Sequence[Document]) -> None:
        self._speculator, self._documents = speculator, documents

    def __call__(self) -> Any:
        return self._speculator._send(self._documents)

    def prefetch(self) -> None:
        self._speculator.prefetched.append(tuple(document.doc_id for document in self._documents))


class ScriptedDoor:
    """An engine with that many pending prefills."""

    def __init__(
        self, num_pending: int = 0, *, max_prefill_bs: int = 2, can: bool = True, error: Exception | None = None
    ) -> None:
        self.num_pending = num_pending
        self.has_room: bool | None = None  # as the number says
        self.reads_ahead = False
        self.num_submitted = 0
        self.answers_after_s = 0.0
        self._max_prefill_bs, self._can, self._error = max_prefill_bs, can, error

    async def acan_speculate(self) -> bool:
        return self._can

    async def apending_prefills(self) -> EngineLoad | None:
        self.num_submitted += 1
        await asyncio.sleep(self.answers_after_s)
        if self._error is not None:
            raise self._error
        has_room = self.num_pending < self._max_prefill_bs if self.has_room is None else self.has_room
        return EngineLoad(self.num_pending, self._max_prefill_bs, has_room, self.reads_ahead)


def document(doc_id: str) -> Document:
    return Document(doc_id, f"text of {doc_id}")


def update(doc_ids: str, stage: int = 0, *, is_final: bool = False) -> RetrievalUpdate:
    return RetrievalUpdate(
        tuple(document(d) for d in doc_ids), tuple(float(i) for i in range(len(doc_ids))), stage, is_final
    )


class Source:
    """A search that shows the given documents every ``STEP_S``, the last finally; knows whether it was closed."""

    def __init__(self, *stages: str, error: Exception | None = None, ends: bool = True, final: bool = True) -> None:
        self.is_closed = False
        self.between: dict[int, Callable[[], object]] = {}
        self._stages, self._error, self._ends, self._final = stages, error, ends, final

    async def updates(self) -> AsyncGenerator[RetrievalUpdate]:
        try:
            for i, doc_ids in enumerate(self._stages):
                await asyncio.sleep(STEP_S)
                self.between.get(i, lambda: None)()
                is_last = i == len(self._stages) - 1
                yield update(doc_ids, i, is_final=is_last and self._ends and self._final and self._error is None)
            if self._error is not None:
                raise self._error
            if not self._ends:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def run(source: Source, door: Any, speculator: Any, **settings: Any) -> PipelineResult:
    """Run the pipeline, and see that whatever came of it nothing is left."""
    before = asyncio.all_tasks()
    try:
        return await run_pipeline(source.updates(), door, speculator, **settings)
    finally:
        assert asyncio.all_tasks() == before
        assert source.is_closed


def join_starts() -> None:
    """Wait for all starts to be made."""
    assert until(lambda: attempt._threads.num_busy == 0, 60)
