"""Run a staged search and the generation it leads to at the same time (RAGCache §5.3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ragcache_core.client.pipeline.result import PipelineEvent, PipelineResult, non_overlapped_search_s
from ragcache_core.client.pipeline.stages import SearchTasks, check_timeout
from ragcache_core.client.speculation.client import (
    EngineLoad,
    SpeculationClient,
    SpeculativeRequests,
    Speculator,
    StartedSpeculation,
)
from ragcache_core.client.tracing import SearchTrace, search_span
from ragcache_core.log import logger_of
from ragcache_core.speculation import Action, Cancel, Confirm, Generate, SpeculativePipeline, StageStabilityStats, Start
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document, RetrievalUpdate

_LOAD_FRESH_S = 0.05
"""Seconds after which a reported load is too old to start a speculation."""
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.16
"""How long an engine that cannot admit a speculation is not asked again: longer each time, since it is busy."""
_BUSY_ANSWERS = 2
"""An engine that has no room so often, one time after the other, is busy: it may just have answered."""
_LOW_HIT_RATE = "what stages of earlier searches named was seldom right in the end, or came too late to gain by it"
_NOT_ENOUGH_SAMPLES = "too few searches were seen to say which stages are right, and the engine is not idle"
_START_GRACE_S = 0.1
"""Final documents wait for a start that began no longer ago: the request would have to be made all the same."""

_Documents = tuple[Document, ...]
_OnLoad = Callable[[EngineLoad | None, str], Awaitable[PipelineResult | None]]
_LATE_S = 0.05
"""An event loop may be that late of itself."""

__all__ = ["PipelineEvent", "PipelineResult", "Speculator", "run_pipeline"]
logger = logger_of(__name__)


class _LoadWatch:
    """The engine's last reported load during one search, and the time of the next request for it."""

    def __init__(self, client: SpeculationClient, tasks: SearchTasks[PipelineResult]) -> None:
        self._client, self._tasks = client, tasks
        self._is_polling = False
        self._poll_s = _FIRST_POLL_S
        self._reported_at_s = 0.0
        self._num_full = 0
        self.latest: EngineLoad | None = None
        self.most_full = 0
        """The most answers in a row that said that there is no room."""

    @property
    def is_fresh(self) -> bool:
        """Whether the last report is recent enough to start a speculation."""
        return time.perf_counter() - self._reported_at_s < _LOAD_FRESH_S

    @property
    def has_room(self) -> bool:
        """Whether the scheduler would admit a speculation, by its last report."""
        return self.latest is not None and self.latest.has_room

    def ask(self, on_reported: _OnLoad, *, at_once: bool = False) -> None:
        """Call ``on_reported`` with the load, or with the reason why it is unknown; later if the engine is busy."""
        if not self._is_polling:
            self._is_polling = True
            self._tasks.spawn(self._ask(on_reported, 0.0 if at_once else self._poll_s))

    def note(self, load: EngineLoad) -> None:
        """Record a report."""
        self.latest, self._reported_at_s = load, time.perf_counter()
        self._num_full = 0 if load.has_room else self._num_full + 1
        self.most_full = max(self.most_full, self._num_full)

    def poll_less(self) -> None:
        """Increase the pause before the next requests for the load."""
        self._poll_s = min(2 * self._poll_s, _LAST_POLL_S)

    async def _ask(self, on_reported: _OnLoad, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        load, why_not = None, "the engine takes no speculative requests"
        try:
            if await self._client.acan_speculate():
                load, why_not = await self._client.apending_prefills(), "the engine did not tell its load"
        except Exception as error:  # whatever it is: the answer does not depend on it
            why_not = f"the engine did not tell its load: {error}"
        self._tasks.put(partial(self._emit, on_reported, load, why_not))

    async def _emit(self, on_reported: _OnLoad, load: EngineLoad | None, why_not: str) -> PipelineResult | None:
        self._is_polling = False
        return await on_reported(load, why_not)


@dataclass(slots=True)
class _SearchTally:
    """Counts of a search, and the reason why it started no speculation.

    Attributes:
        cannot: why nothing can be speculated in this search.
        failure: why the first start failed.
        unpromising: why candidates started nothing.
    """

    num_stages: int = 0
    num_started: int = 0
    num_cancelled: int = 0
    num_candidates: int = 0
    cannot: str | None = None
    failure: str | None = None
    unpromising: list[str] = field(default_factory=list)

    def fail(self, why: str) -> None:
        """Record why a start failed, unless an earlier one did."""
        self.failure = self.failure or why

    def why_nothing_started(self, load: EngineLoad | None) -> str | None:
        """Return the reason why nothing was started; ``None`` if something was."""
        if self.num_started:
            return None
        if (why := self.cannot or self.failure) is not None:
            return why
        if not self.num_candidates:
            return "the search had no candidates before its final documents"
        why_none = self.unpromising[-1] if len(self.unpromising) >= self.num_candidates else None
        if why_none == _LOW_HIT_RATE:
            return why_none
        if load is None:
            return "the documents were final before the engine had told its load"
        if load.has_room:
            return why_none or "the documents were final before the engine had told its load again"
        if pending := load.num_pending_prefills:
            return f"the engine had no room: real requests that wait for their first token: {pending}"
        return (
            "the engine had no room: it answers real requests, which on a CPU leave none, or it has as many "
            "speculative ones as max_prefill_bs allows"
        )


class SearchRun:
    """One search with speculation: speculations start, are cancelled and confirmed as its stages arrive.

    One task reads the search, one asks the engine for its load, and threads send speculations. All of them post to the
    inbox of the caller's task, which makes all decisions::

        updates -------- stage, end ----+
        client --------- load ----------+--> inbox --> SpeculativePipeline --> start, cancel, confirm
        threads -------- sent, failed --+
    """

    def __init__(
        self,
        client: SpeculationClient | None,
        speculator: Speculator | None,
        on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None,
        arrange: Callable[[Sequence[Document]], Sequence[Document]] | None,
        history: StageStabilityStats | None,
        k: int | None,
        trace: SearchTrace | None,
    ) -> None:
        self._began_s = time.perf_counter()
        self._tasks: SearchTasks[PipelineResult] = SearchTasks()
        self._on_event, self._arrange = on_event, arrange
        self._load = None if client is None else _LoadWatch(client, self._tasks)
        self._starts = None if speculator is None else SpeculativeRequests(speculator)
        self._pipeline: SpeculativePipeline[_Documents] = SpeculativePipeline(max_prefill_bs=0)  # until told
        self._history, self._trace = history, trace
        self._k = k
        self._candidates: list[tuple[int, _Documents, float]] = []  # what stages named, as prompts show it, and when
        self._any_speculation_sent = False  # anything was sent
        self._is_over = False
        self._live: StartedSpeculation | None = None
        self._documents: _Documents = ()  # of the last stage, in the order of the prompt
        self._prefetched: _Documents = ()
        self._arranged: dict[tuple[DocId, ...], tuple[_Documents, _Documents]] = {}
        self._events: list[PipelineEvent] = []
        self._stage = 0
        self._tally = _SearchTally()

    async def result(self, updates: AsyncIterator[RetrievalUpdate], timeout_s: float | None) -> PipelineResult:
        """Return the result of the search. The caller ends the tasks, and abandons a failed run."""
        if self._history is not None:
            self._history.num_running += 1
        self._tasks.read(updates, timeout_s, self._on_stage, self._on_search_failed, k=self._k)
        if self._load is None or self._starts is None:
            self._tally.cannot = "there is no engine to speculate on" if self._load is None else "speculation is off"
        elif self._history is not None and self._history.never_worthwhile:
            self._tally.cannot = _LOW_HIT_RATE
        self._poll_load(at_once=True)
        while True:
            result = await self._tasks.handle_next()
            await self._emit()
            if result is not None:
                return result

    def abandon(self) -> None:
        """Cancel all speculative requests."""
        self._pipeline.on_closed()
        self._drop_ahead()
        if self._live is not None:
            self._live.abandon()

    async def end_tasks(self) -> None:
        """End all tasks and close the updates; cancel them if that takes too long."""
        if self._history is not None and not self._is_over:
            self._history.num_running -= 1
        self._is_over = True
        await self._tasks.end()

    # The search

    async def _on_search_failed(self, error: BaseException) -> PipelineResult | None:
        raise error

    async def _on_stage(self, update: RetrievalUpdate, ended_s: float) -> PipelineResult | None:
        search_s = ended_s - self._began_s
        self._tally.num_stages += 1
        self._stage = update.stage
        ids, is_final = _ids(update.documents), update.is_final
        self._events.append(
            PipelineEvent("stage", update.stage, ids, update.scores, is_final, None, search_s, update.swaps)
        )
        if update.is_final:
            return await self._finish(update, self._in_prompt_order(update.documents), search_s)
        if update.documents:
            self._documents = self._in_prompt_order(update.documents)
            self._candidates.append((update.stage, self._documents, search_s))
            self._tally.num_candidates += 1
            is_fresh = self._load is not None and self._load.is_fresh
            self._perform(
                self._pipeline.on_stage(
                    self._documents,
                    is_final=False,
                    num_pending=self._num_pending() if is_fresh else self._pipeline.max_prefill_bs,
                    is_worthwhile=self._tally.cannot is None and self._is_promising(update.stage),
                )
            )
            if self._pipeline.is_deferred:
                if not is_fresh:
                    self._make_ahead()
                self._poll_load(at_once=not is_fresh)
        return None

    def _is_promising(self, stage: int) -> bool:
        """Return whether a start from a stage's candidates is worthwhile; for unknown stages in idle time only."""
        if self._history is None:
            return True
        if not self._history.is_known(stage):
            is_worthwhile, why_not = self._may_try(self._history), _NOT_ENOUGH_SAMPLES
        else:
            is_worthwhile, why_not = self._history.is_worthwhile(stage, is_idle=self._has_room), _LOW_HIT_RATE
        if not is_worthwhile:
            self._tally.unpromising.append(why_not)
        return is_worthwhile

    def _may_try(self, history: StageStabilityStats) -> bool:
        """Return whether an unknown stage may start a speculation: once while other searches of its source run.

        They say that the engine is in demand, and show what the stage is worth as well.
        """
        most_full = 0 if self._load is None else self._load.most_full
        if history.num_running > 1:
            return most_full == 0 and not self._any_speculation_sent
        return most_full < _BUSY_ANSWERS

    def _is_too_soon(self) -> bool:
        history = self._history
        return history is not None and not history.is_known(self._stage) and not self._may_try(history)

    def _in_prompt_order(self, documents: _Documents) -> _Documents:
        if self._arrange is None:
            return documents
        key = _ids(documents)  # finds them; their texts and metadata may have changed
        if key not in self._arranged or self._arranged[key][0] != documents:
            # kept: the cache that decides changes meanwhile, by our own speculation too
            self._arranged[key] = documents, tuple(self._arrange(documents))
        return self._arranged[key][1]

    async def _finish(self, update: RetrievalUpdate, documents: _Documents, search_s: float) -> PipelineResult:
        if self._history is not None:
            for stage, candidates, named_s in self._candidates:
                self._history.record(stage, _texts(candidates), _texts(documents), search_s - named_s)
        self._drop_ahead()
        if self._live is not None and _texts(self._live.documents) == _texts(documents):
            await self._settle(self._live)
        expected = documents
        if (live := self._live) is not None and _may_be_joined(live, documents):
            expected = live.documents
        actions = self._pipeline.on_stage(expected, is_final=True, num_pending=0)
        self._perform(actions)
        speculation = live.speculation if live is not None and isinstance(actions[-1], Confirm) else None
        unhidden_s, reported_s = search_s, 0.0 if speculation is None else None
        if speculation is not None and expected == documents:
            speculation.confirm()
            if speculation.started_s is not None:
                unhidden_s = non_overlapped_search_s(speculation, self._began_s, search_s)
                reported_s = None if speculation.can_be_adopted else search_s - unhidden_s
        if self._tally.num_started:
            kind: Literal["confirm", "miss"] = "miss" if speculation is None else "confirm"
            self._events.append(PipelineEvent(kind, self._stage, _ids(documents), (), True, reported_s, search_s))
        tally, load = self._tally, None if self._load is None else self._load.latest
        report = PipelineReport(
            search_s, unhidden_s, tally.num_stages, tally.num_started, tally.num_cancelled,
            is_confirmed=speculation is not None, skipped_because=tally.why_nothing_started(load), swaps=update.swaps,
        )  # fmt: skip
        return PipelineResult(update, documents, report, speculation, self._began_s)

    # The engine's load

    def _poll_load(self, *, at_once: bool = False) -> None:
        if self._load is not None and self._tally.cannot is None:
            self._load.ask(self._on_load, at_once=at_once)

    async def _on_load(self, load: EngineLoad | None, why_not: str) -> None:
        if load is None or load.max_prefill_bs == 0:
            self._tally.cannot = why_not
            self._drop_ahead()
            return
        assert self._load is not None
        self._load.note(load)
        self._pipeline.max_prefill_bs = load.max_prefill_bs
        if self._is_too_soon() and self._pipeline.is_deferred:
            self._tally.unpromising.append(_NOT_ENOUGH_SAMPLES)
            self._pipeline.on_skipped()
        self._perform(self._pipeline.on_load(self._num_pending()))
        if self._pipeline.is_deferred and load.reads_ahead:
            self._prefetch()
        self._drop_ahead()  # no thread waits to send
        if self._pipeline.is_deferred:
            self._poll_load()
            self._load.poll_less()

    @property
    def _has_room(self) -> bool:
        return self._load is not None and self._load.has_room

    def _num_pending(self) -> int:
        """Return the number of pending prefills, which decides a start."""
        return 0 if self._has_room else self._pipeline.max_prefill_bs

    # Speculations

    def _perform(self, actions: Sequence[Action[_Documents]]) -> None:
        for action in actions:
            match action:
                case Start(number):
                    assert self._starts is not None
                    self._any_speculation_sent = True
                    self._live = live = self._starts.take(self._documents)
                    live.send(number=number, stage=self._stage)
                    live.add_sent_callback(partial(self._tasks.post, partial(self._on_sent, live)))
                case Cancel():
                    self._cancel()
                case Confirm() | Generate():
                    pass  # the final stage's own business

    def _prefetch(self) -> None:
        """Read the candidates' blocks from disk into host memory while the engine cannot prefill them."""
        if self._prefetched != self._documents:
            self._prefetched = self._documents
            assert self._starts is not None
            self._starts.take(self._documents).prefetch()

    def _make_ahead(self) -> None:
        """Prepare a request before the engine reports admission, unless it last reported none."""
        is_unknown = self._load is None or self._load.latest is None
        if self._starts is not None and self._tally.cannot is None and (is_unknown or self._has_room):
            self._starts.make(self._documents)

    def _drop_ahead(self) -> None:
        if self._starts is not None:
            self._starts.drop()

    def _cancel(self) -> None:
        live = self._live
        assert live is not None
        self._announce(live)
        self._live = None
        live.abandon()
        if live.speculation is not None:
            self._count_cancelled(live)
        elif not live.is_sent:
            self._tally.fail("the documents changed before a speculation was sent")

    async def _settle(self, live: StartedSpeculation) -> None:
        """Wait briefly for a speculation that is being sent; mark it as failed if it was not sent then."""
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
            logger.warning(
                "RC-SPECULATION-FAILED: no request was sent before the search ended: %s: %s",
                type(error).__name__,
                error,
            )
            self._fail(started, f"the speculator raised {type(error).__name__}: {error}")
        elif (speculation := started.speculation) is not None:
            self._tally.num_started += 1
            self._queue_event("start", started)
            speculation.add_done_callback(lambda _: self._tasks.post(partial(self._on_done, started)))
            if started is not self._live:  # given up while a thread sent it
                self._count_cancelled(started)
        elif started is self._live:
            self._tally.fail("nothing could be sent ahead")

    async def _on_done(self, started: StartedSpeculation) -> None:
        if not started.is_alive:
            assert started.speculation is not None
            self._fail(started, f"the speculation failed: {started.speculation.error or 'it was cancelled'}")

    def _fail(self, started: StartedSpeculation, why: str) -> None:
        self._tally.fail(why)
        if started is self._live:
            self._live = None
            self._pipeline.on_failed(started.number)
            if self._pipeline.is_deferred:
                self._poll_load()

    def _count_cancelled(self, started: StartedSpeculation) -> None:
        self._tally.num_cancelled += 1
        self._queue_event("cancel", started)

    # What is told

    def _queue_event(self, kind: Literal["start", "cancel"], started: StartedSpeculation) -> None:
        self._events.append(PipelineEvent(kind, started.stage, _ids(started.documents), (), False, None, self._now_s()))

    async def _emit(self) -> None:
        events, self._events = self._events, []
        if self._trace is not None:
            for event in events:
                self._trace.record_event(event)
        if self._on_event is None:
            return
        for event in events:
            if (awaitable := self._on_event(event)) is not None:
                await awaitable

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def _ids(documents: _Documents) -> tuple[DocId, ...]:
    return tuple(document.doc_id for document in documents)


def _texts(documents: _Documents) -> tuple[tuple[DocId, str], ...]:
    return tuple((document.doc_id, document.text) for document in documents)


def _may_be_joined(live: StartedSpeculation, documents: _Documents) -> bool:
    """Return whether a request about ``documents`` may equal the speculative one, byte for byte.

    Their metadata may differ: only the request itself knows whether the prompt shows it. So the speculation is left
    there to be joined, and not confirmed before it is.
    """
    speculation = live.speculation
    return speculation is not None and speculation.can_be_adopted and _texts(live.documents) == _texts(documents)


async def run_pipeline(
    updates: AsyncIterator[RetrievalUpdate],
    client: SpeculationClient | None,
    speculator: Speculator | None,
    *,
    timeout_s: float | None = None,
    on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None = None,
    arrange: Callable[[Sequence[Document]], Sequence[Document]] | None = None,
    history: StageStabilityStats | None = None,
    k: int | None = None,
) -> PipelineResult:
    """Return the final documents of a search, with speculation on its candidates meanwhile.

    Neither the engine nor a slow or failing speculator delays the search, or loses its result. An error or cancellation
    cancels every speculation, closes ``updates`` and ends all tasks. A source has a second to clean up, for which the
    result waits.

    Args:
        updates: the search's stages. A document that appears twice counts once; nothing is read after the final stage.
        client: sends speculations to the engine, and reads its load; ``None`` for no speculation.
        speculator: makes speculative requests; ``None`` for no speculation.
        timeout_s: maximum seconds until the documents are final. With a source that blocks the event loop it only works
            between two stages; a single stage arrives late, with a warning.
        on_event: called with every event in order; its exceptions end the search.
        arrange: returns a stage's documents in prompt order; called once for the same documents.
        history: statistics of the source, which this search updates; without it every stage is trusted.
        k: number of documents; each stage is cut to the first ``k``.

    Raises:
        SearchTimeoutError: the documents were not final in time.
        SearchError: the search ended without final documents, or ``updates`` yields no stages.
        ConfigError: ``timeout_s`` is not above 0.
    """
    check_timeout(timeout_s)
    with search_span() as trace:
        run = SearchRun(client, speculator, on_event, arrange, history, k, trace)
        try:
            result = await run.result(updates, timeout_s)
            await run.end_tasks()
        except BaseException:
            run.abandon()
            await run.end_tasks()
            raise
        if trace is not None:
            trace.end(result)
    if timeout_s is not None and result.report.search_s > timeout_s + _LATE_S:  # else it had been timed out
        logger.warning(
            "RC-SEARCH-BLOCKED: a search took %.3g s, beyond its time-out of %g s, because something blocked the "
            "event loop: let a source await what it waits for, and run what blocks in a thread, `await "
            "asyncio.to_thread(...)`",
            result.report.search_s,
            timeout_s,
        )
    return result
