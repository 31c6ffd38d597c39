"""One search with speculation: what is started, given up and confirmed while its stages arrive.

One task reads the search, one asks the engine for its load, threads send speculations, and all of them post what they
have to the inbox of the one task that decides::

    updates -------- stage, end ----+
    door ----------- load ----------+--> inbox --> SpeculativePipeline --> start, cancel, confirm
    threads -------- sent, failed --+
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ragcache_core.client.load import Load
from ragcache_core.client.speculating import Speculation
from ragcache_core.client.speculating_door import SpeculatingDoor
from ragcache_core.client.stages import read_stages
from ragcache_core.client.starting import Speculator, StartedSpeculation
from ragcache_core.speculation import Action, Cancel, Confirm, Generate, SettlingHistory, SpeculativePipeline, Start
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document, RetrievalUpdate

_logger = logging.getLogger(__name__)

_LOAD_FRESH_S = 0.05
"""What the engine said of its load longer ago starts nothing: it is asked again."""
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.16
"""How long an engine without room is left alone: longer each time, since it has enough to do."""
_SELDOM_RIGHT = "what stages of earlier searches named was seldom right in the end"
_START_GRACE_S = 0.1
"""How long final documents wait for a start that is on its way: the request would have to be made all the same."""


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Something that happened during a search.

    ``stage``: a stage ended; ``doc_ids`` are best first, with their ``scores``. ``start``, ``cancel``, ``confirm``: a
    speculation from ``doc_ids``, in the order of the prompt, was sent, given up, or right. ``miss``: the final
    documents were not those of the speculation that was sent. ``search_s`` is the time since the search began,
    ``hidden_search_s`` how much of it the engine worked on the answer already; known once the documents are final.
    """

    kind: Literal["stage", "start", "cancel", "confirm", "miss"]
    stage: int
    doc_ids: tuple[DocId, ...]
    scores: tuple[float, ...]
    is_final: bool
    hidden_search_s: float | None
    search_s: float


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The final documents of a search, and the speculation that may be answering from them already.

    ``update`` holds the documents best first, ``documents`` in the order of the prompt. Who gets the result owns the
    ``speculation``: the real request joins it, or its ``cancel()`` ends it.
    """

    update: RetrievalUpdate
    documents: tuple[Document, ...]
    report: PipelineReport
    speculation: Speculation | None


_DocIds = tuple[DocId, ...]
_Handler = Callable[[], Awaitable[PipelineResult | None]]


class SearchRun:
    """One search. All but what threads post happens in its event loop; what is decided, in the caller's task."""

    def __init__(
        self,
        door: SpeculatingDoor | None,
        speculator: Speculator | None,
        on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None,
        arrange: Callable[[Sequence[Document]], Sequence[Document]] | None,
        history: SettlingHistory,
    ) -> None:
        self._began_s = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[_Handler] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._door, self._speculator, self._on_event, self._arrange = door, speculator, on_event, arrange
        self._pipeline: SpeculativePipeline[_DocIds] = SpeculativePipeline(max_prefill_bs=0)  # until told
        self._history = history
        self._candidates: list[tuple[int, _DocIds]] = []  # what stages named, in the order of the prompt
        self._load: Load | None = None
        self._load_told_s = 0.0
        self._is_asking = False
        self._poll_s = _FIRST_POLL_S
        self._live: StartedSpeculation | None = None
        self._documents: tuple[Document, ...] = ()  # of the last stage, in the order of the prompt
        self._arranged: dict[_DocIds, tuple[Document, ...]] = {}
        self._events: list[PipelineEvent] = []
        self._num_stages = self._num_started = self._num_cancelled = self._num_unpromising = 0
        self._stage = 0
        self._cannot: str | None = None  # why nothing can be speculated in this search
        self._failure: str | None = None

    async def result(self, updates: AsyncIterator[RetrievalUpdate], timeout_s: float | None) -> PipelineResult:
        """Return what the search comes to. Whoever awaits it ends the tasks, and abandons a run that failed."""
        self._spawn(self._search(updates, timeout_s))
        if self._door is None or self._speculator is None:
            self._cannot = "there is no engine to speculate on" if self._door is None else "speculation is off"
        elif self._history.is_hopeless:
            self._cannot = _SELDOM_RIGHT
        else:
            self._ask_load(0.0)
        while True:
            handle = await self._inbox.get()
            result = await handle()
            await self._tell()
            if result is not None:
                return result

    def abandon(self) -> None:
        """Cancel what was asked ahead."""
        self._pipeline.on_closed()
        if self._live is not None:
            self._live.abandon()

    async def end_tasks(self) -> None:
        """Leave no task, and the updates closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The search

    async def _search(self, updates: AsyncIterator[RetrievalUpdate], timeout_s: float | None) -> None:
        def on_stage(update: RetrievalUpdate) -> None:
            self._inbox.put_nowait(partial(self._on_stage, update, self._now_s()))

        try:
            await read_stages(updates, timeout_s, on_stage)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of whatever kind: the caller waits for it
            self._inbox.put_nowait(partial(self._on_search_failed, error))

    async def _on_search_failed(self, error: BaseException) -> None:
        raise error

    async def _on_stage(self, update: RetrievalUpdate, search_s: float) -> PipelineResult | None:
        self._num_stages += 1
        self._stage = update.stage
        doc_ids = _ids(update.documents)
        self._events.append(
            PipelineEvent("stage", update.stage, doc_ids, update.scores, update.is_final, None, search_s)
        )
        if update.is_final:
            return await self._finish(update, self._in_prompt_order(doc_ids, update.documents), search_s)
        if update.documents:
            self._documents = self._in_prompt_order(doc_ids, update.documents)
            self._candidates.append((update.stage, _ids(self._documents)))
        if update.documents and self._cannot is None:
            load, is_fresh = self._load, time.perf_counter() - self._load_told_s < _LOAD_FRESH_S
            num_pending = load.num_pending_prefills if load and is_fresh else self._pipeline.max_prefill_bs
            is_idle = load is not None and load.num_pending_prefills == 0
            is_promising = self._history.is_promising(update.stage, is_idle=is_idle)
            self._num_unpromising += not is_promising
            self._perform(
                self._pipeline.on_stage(
                    _ids(self._documents), is_final=False, num_pending=num_pending, is_promising=is_promising
                )
            )
            if self._pipeline.is_deferred:
                self._ask_load(self._poll_s if is_fresh else 0.0)
        return None

    def _in_prompt_order(self, doc_ids: _DocIds, documents: tuple[Document, ...]) -> tuple[Document, ...]:
        if self._arrange is None:
            return documents
        if doc_ids not in self._arranged:  # the cache that decides changes meanwhile, by our own speculation too
            self._arranged[doc_ids] = tuple(self._arrange(documents))
        return self._arranged[doc_ids]

    async def _finish(
        self, update: RetrievalUpdate, documents: tuple[Document, ...], search_s: float
    ) -> PipelineResult:
        doc_ids = _ids(documents)
        for stage, candidates in self._candidates:
            self._history.record(stage, candidates, doc_ids)
        if self._live is not None and self._live.doc_ids == doc_ids:
            await self._settle(self._live)
        actions = self._pipeline.on_stage(doc_ids, is_final=True, num_pending=0)
        self._perform(actions)
        speculation = self._live.speculation if self._live is not None and isinstance(actions[-1], Confirm) else None
        unhidden_s = search_s
        if speculation is not None:
            speculation.confirm()
            begun_s = speculation.sent_s if speculation.started_s is None else speculation.started_s
            unhidden_s = min(max(begun_s - self._began_s, 0.0), search_s)
        if self._num_started:
            kind: Literal["confirm", "miss"] = "miss" if speculation is None else "confirm"
            self._events.append(PipelineEvent(kind, self._stage, doc_ids, (), True, search_s - unhidden_s, search_s))
        report = PipelineReport(
            search_s, unhidden_s, self._num_stages, self._num_started, self._num_cancelled,
            is_confirmed=speculation is not None, skipped_because=self._why_nothing_started(),
        )  # fmt: skip
        return PipelineResult(update, documents, report, speculation)

    # The engine's load

    def _ask_load(self, delay_s: float) -> None:
        if not self._is_asking and self._cannot is None:
            self._is_asking = True
            self._spawn(self._read_load(delay_s))

    async def _read_load(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        assert self._door is not None
        load, why_not = None, "the engine takes no speculative requests"
        try:
            if await self._door.acan_speculate():
                load, why_not = await self._door.apending_prefills(), "the engine did not tell its load"
        except Exception as error:  # whatever it is: the answer does not depend on it
            why_not = f"the engine did not tell its load: {error}"
        self._inbox.put_nowait(partial(self._on_load, load, why_not))

    async def _on_load(self, load: Load | None, why_not: str) -> None:
        self._is_asking = False
        if load is None or load.max_prefill_bs == 0:
            self._cannot = why_not
            return
        self._load, self._load_told_s = load, time.perf_counter()
        self._pipeline.max_prefill_bs = load.max_prefill_bs
        self._perform(self._pipeline.on_load(load.num_pending_prefills))
        if self._pipeline.is_deferred:
            self._ask_load(self._poll_s)
            self._poll_s = min(2 * self._poll_s, _LAST_POLL_S)

    # Speculations

    def _perform(self, actions: Sequence[Action[_DocIds]]) -> None:
        for action in actions:
            match action:
                case Start(number):
                    assert self._speculator is not None
                    self._live = live = StartedSpeculation(
                        self._speculator, self._documents, number=number, stage=self._stage
                    )
                    live.add_sent_callback(partial(self._post, partial(self._on_sent, live)))
                case Cancel():
                    self._cancel()
                case Confirm() | Generate():
                    pass  # the final stage's own business

    def _cancel(self) -> None:
        live = self._live
        assert live is not None
        self._announce(live)
        self._live = None
        live.abandon()
        if live.speculation is not None:
            self._count_cancelled(live)
        elif not live.is_sent:
            self._failure = self._failure or "the documents changed before a speculation was sent"

    async def _settle(self, live: StartedSpeculation) -> None:
        """Wait a little for what is on its way to the engine; unless it lives then, it has failed."""
        await live.wait_until_sent(_START_GRACE_S)
        self._announce(live)
        if not live.is_alive:
            live.abandon()
            self._fail(live, "the documents were final before a speculation was sent")

    async def _on_sent(self, started: StartedSpeculation) -> None:
        self._announce(started)

    def _announce(self, started: StartedSpeculation) -> None:
        if started.is_announced or not started.is_sent:
            return
        started.is_announced = True
        if (error := started.error) is not None:
            _logger.warning("nothing was sent ahead of a search's end: %s: %s", type(error).__name__, error)
            self._fail(started, f"the speculator raised {type(error).__name__}: {error}")
        elif (speculation := started.speculation) is not None:
            self._num_started += 1
            self._tell_later("start", started)
            speculation.add_done_callback(lambda _: self._post(partial(self._on_done, started)))
            if started is not self._live:  # given up while a thread sent it
                self._count_cancelled(started)
        elif started is self._live:
            self._failure = self._failure or "nothing could be sent ahead"

    async def _on_done(self, started: StartedSpeculation) -> None:
        if not started.is_alive:
            assert started.speculation is not None
            self._fail(started, f"the speculation failed: {started.speculation.error or 'it was cancelled'}")

    def _fail(self, started: StartedSpeculation, why: str) -> None:
        self._failure = self._failure or why
        if started is self._live:
            self._live = None
            self._pipeline.on_failed(started.number)
            if self._pipeline.is_deferred:
                self._ask_load(self._poll_s)

    def _count_cancelled(self, started: StartedSpeculation) -> None:
        self._num_cancelled += 1
        self._tell_later("cancel", started)

    # What is told

    def _tell_later(self, kind: Literal["start", "cancel"], started: StartedSpeculation) -> None:
        self._events.append(PipelineEvent(kind, started.stage, started.doc_ids, (), False, None, self._now_s()))

    async def _tell(self) -> None:
        events, self._events = self._events, []
        if self._on_event is None:
            return
        for event in events:
            if (told := self._on_event(event)) is not None:
                await told

    def _why_nothing_started(self) -> str | None:
        if self._num_started:
            return None
        if (why := self._cannot or self._failure) is not None:
            return why
        if not self._documents:
            return "the search had no candidates before its final documents"
        if self._num_unpromising == len(self._candidates):
            return _SELDOM_RIGHT
        if self._load is None:
            return "the documents were final before the engine had told its load"
        pending, limit = self._load.num_pending_prefills, self._load.max_prefill_bs
        return f"the engine had no room: {pending} prefills pending, max_prefill_bs is {limit}"

    # Tasks and threads

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, handle: _Handler) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, handle)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def _ids(documents: Sequence[Document]) -> _DocIds:
    return tuple(document.doc_id for document in documents)
