"""Run a staged search and the generation it leads to at the same time (RAGCache §5.3)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ragcache_core.client.pipeline.result import PipelineEvent, PipelineResult, unhidden_search_s
from ragcache_core.client.pipeline.stages import CANCELLED_BY_SOURCE, check_timeout, close_stages, read_stages
from ragcache_core.client.speculation.client import (
    EngineLoad,
    SpeculationClient,
    Speculator,
    StartedSpeculation,
    Starts,
)
from ragcache_core.client.tracing import SearchTrace, search_span
from ragcache_core.errors import SearchError, SearchTimeoutError
from ragcache_core.speculation import Action, Cancel, Confirm, Generate, SettlingHistory, SpeculativePipeline, Start
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document, RetrievalUpdate

_CLOSE_S, _CUT_OFF_S = 1.0, 0.05
"""How long a source may take to clean up, and then to see that it is cancelled: one that hangs is left behind."""

_Result = TypeVar("_Result")
_LOAD_FRESH_S = 0.05
"""What the engine said of its load longer ago starts nothing: it is asked again."""
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.16
"""How long an engine that cannot admit a speculation is not asked again: longer each time, since it is busy."""
_BUSY_ANSWERS = 2
"""An engine that has no room so often, one time after the other, is busy: it may just have answered."""
_NOT_WORTH_IT = "what stages of earlier searches named was seldom right in the end, or came too late to gain by it"
_TOO_SOON = "too few searches were seen to say which stages are right, and the engine is not idle"
_START_GRACE_S = 0.1
"""Final documents wait for a start that began no longer ago: the request would have to be made all the same."""

_Documents = tuple[Document, ...]
_LATE_S = 0.05
"""An event loop may be that late of itself."""

__all__ = ["PipelineEvent", "PipelineResult", "Speculator", "run_pipeline"]
_logger = logging.getLogger(__name__)


class SearchTasks(Generic[_Result]):
    """The inbox of a search, and the tasks that fill it. All but :meth:`post` happens in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Callable[[], Awaitable[_Result | None]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._is_closing = False  # the reader is on its way out
        self._time_out: asyncio.TimerHandle | None = None

    async def handle_next(self) -> _Result | None:
        """Wait for what is posted next, and return what comes of it."""
        handle = await self._inbox.get()
        return await handle()

    def put(self, handle: Callable[[], Awaitable[_Result | None]]) -> None:
        """Have ``handle`` called in its turn."""
        self._inbox.put_nowait(handle)

    def post(self, handle: Callable[[], Awaitable[_Result | None]]) -> None:
        """Do :meth:`put` from any thread."""
        with suppress(RuntimeError):  # the loop was closed: no caller waits any more
            self._loop.call_soon_threadsafe(self.put, handle)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` until it or the search ends."""
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
        """Leave no task, and the updates closed: as soon as they are, or cut off when that takes too long."""
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
            _logger.warning("closing a search took more than %g s and was cut off: see how its source ends", _CLOSE_S)
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


class SearchRun:
    """One search; all decisions are made in the caller's task."""

    def __init__(
        self,
        client: SpeculationClient | None,
        speculator: Speculator | None,
        on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None,
        arrange: Callable[[Sequence[Document]], Sequence[Document]] | None,
        history: SettlingHistory | None,
        k: int | None,
        trace: SearchTrace | None,
    ) -> None:
        self._began_s = time.perf_counter()
        self._tasks: SearchTasks[PipelineResult] = SearchTasks()
        self._client, self._on_event, self._arrange = client, on_event, arrange
        self._starts = None if speculator is None else Starts(speculator)
        self._pipeline: SpeculativePipeline[_Documents] = SpeculativePipeline(max_prefill_bs=0)  # until told
        self._history, self._trace = history, trace
        self._k = k
        self._candidates: list[tuple[int, _Documents, float]] = []  # what stages named, as prompts show it, and when
        self._load: EngineLoad | None = None
        self._load_told_s = 0.0
        self._num_full = self._most_full = 0  # so often it had no room, one time after the other
        self._has_tried = False  # anything was sent
        self._is_over = False
        self._is_asking = False
        self._poll_s = _FIRST_POLL_S
        self._live: StartedSpeculation | None = None
        self._documents: _Documents = ()  # of the last stage, in the order of the prompt
        self._prefetched: _Documents = ()
        self._arranged: dict[tuple[DocId, ...], tuple[_Documents, _Documents]] = {}
        self._events: list[PipelineEvent] = []
        self._num_stages = self._num_started = self._num_cancelled = 0
        self._unpromising: list[str] = []  # why candidates started nothing
        self._stage = 0
        self._cannot: str | None = None  # why nothing can be speculated in this search
        self._failure: str | None = None

    async def result(self, updates: AsyncIterator[RetrievalUpdate], timeout_s: float | None) -> PipelineResult:
        """Return the result of the search. The caller ends the tasks, and abandons a run that failed."""
        if self._history is not None:
            self._history.num_running += 1
        self._tasks.read(updates, timeout_s, self._on_stage, self._on_search_failed, k=self._k)
        if self._client is None or self._starts is None:
            self._cannot = "there is no engine to speculate on" if self._client is None else "speculation is off"
        elif self._history is not None and self._history.is_hopeless:
            self._cannot = _NOT_WORTH_IT
        else:
            self._ask_load(0.0)
        while True:
            result = await self._tasks.handle_next()
            await self._tell()
            if result is not None:
                return result

    def abandon(self) -> None:
        """Cancel what was asked ahead."""
        self._pipeline.on_closed()
        self._drop_ahead()
        if self._live is not None:
            self._live.abandon()

    async def end_tasks(self) -> None:
        """Leave no task, and the updates closed: as soon as they are, or cut off when that takes too long."""
        if self._history is not None and not self._is_over:
            self._history.num_running -= 1
        self._is_over = True
        await self._tasks.end()

    # The search

    async def _on_search_failed(self, error: BaseException) -> PipelineResult | None:
        raise error

    async def _on_stage(self, update: RetrievalUpdate, ended_s: float) -> PipelineResult | None:
        search_s = ended_s - self._began_s
        self._num_stages += 1
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
            is_fresh = time.perf_counter() - self._load_told_s < _LOAD_FRESH_S
            self._perform(
                self._pipeline.on_stage(
                    self._documents,
                    is_final=False,
                    num_pending=self._num_pending() if is_fresh else self._pipeline.max_prefill_bs,
                    is_promising=self._cannot is None and self._is_promising(update.stage),
                )
            )
            if self._pipeline.is_deferred:
                if not is_fresh:
                    self._make_ahead()
                self._ask_load(self._poll_s if is_fresh else 0.0)
        return None

    def _is_promising(self, stage: int) -> bool:
        """Return whether a stage's candidates are worth a start; of one that is not known, in idle time alone."""
        if self._history is None:
            return True
        if not self._history.is_known(stage):
            is_promising, why_not = self._may_try(self._history), _TOO_SOON
        else:
            is_idle = self._load is not None and self._load.has_room
            is_promising, why_not = self._history.is_promising(stage, is_idle=is_idle), _NOT_WORTH_IT
        if not is_promising:
            self._unpromising.append(why_not)
        return is_promising

    def _may_try(self, history: SettlingHistory) -> bool:
        """Return whether a stage that is not known may start something: once where other searches of its source run.

        They say that the engine is in demand, and show what the stage is worth as well.
        """
        if history.num_running > 1:
            return self._most_full == 0 and not self._has_tried
        return self._most_full < _BUSY_ANSWERS

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
        unhidden_s, told_s = search_s, 0.0 if speculation is None else None
        if speculation is not None and expected == documents:
            speculation.confirm()
            if speculation.started_s is not None:
                unhidden_s = unhidden_search_s(speculation, self._began_s, search_s)
                told_s = None if speculation.is_claimable else search_s - unhidden_s
        if self._num_started:
            kind: Literal["confirm", "miss"] = "miss" if speculation is None else "confirm"
            self._events.append(PipelineEvent(kind, self._stage, _ids(documents), (), True, told_s, search_s))
        report = PipelineReport(
            search_s, unhidden_s, self._num_stages, self._num_started, self._num_cancelled,
            is_confirmed=speculation is not None, skipped_because=self._why_nothing_started(), swaps=update.swaps,
        )  # fmt: skip
        return PipelineResult(update, documents, report, speculation, self._began_s)

    # The engine's load

    def _ask_load(self, delay_s: float) -> None:
        if not self._is_asking and self._cannot is None:
            self._is_asking = True
            self._tasks.spawn(self._read_load(delay_s))

    async def _read_load(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        assert self._client is not None
        load, why_not = None, "the engine takes no speculative requests"
        try:
            if await self._client.acan_speculate():
                load, why_not = await self._client.apending_prefills(), "the engine did not tell its load"
        except Exception as error:  # whatever it is: the answer does not depend on it
            why_not = f"the engine did not tell its load: {error}"
        self._tasks.put(partial(self._on_load, load, why_not))

    async def _on_load(self, load: EngineLoad | None, why_not: str) -> None:
        self._is_asking = False
        if load is None or load.max_prefill_bs == 0:
            self._cannot = why_not
            self._drop_ahead()
            return
        self._load, self._load_told_s = load, time.perf_counter()
        self._num_full = 0 if load.has_room else self._num_full + 1
        self._most_full = max(self._most_full, self._num_full)
        self._pipeline.max_prefill_bs = load.max_prefill_bs
        if self._is_too_soon() and self._pipeline.is_deferred:
            self._unpromising.append(_TOO_SOON)
            self._pipeline.on_unpromising()
        self._perform(self._pipeline.on_load(self._num_pending()))
        if self._pipeline.is_deferred and load.reads_ahead:
            self._prefetch()
        self._drop_ahead()  # no thread waits to send
        if self._pipeline.is_deferred:
            self._ask_load(self._poll_s)
            self._poll_s = min(2 * self._poll_s, _LAST_POLL_S)

    def _num_pending(self) -> int:
        """Return what decides a start: the scheduler knows better than a count whether it would admit one."""
        return 0 if self._load is not None and self._load.has_room else self._pipeline.max_prefill_bs

    # Speculations

    def _perform(self, actions: Sequence[Action[_Documents]]) -> None:
        for action in actions:
            match action:
                case Start(number):
                    assert self._starts is not None
                    self._has_tried = True
                    self._live = live = self._starts.take(self._documents)
                    live.send(number=number, stage=self._stage)
                    live.add_sent_callback(partial(self._tasks.post, partial(self._on_sent, live)))
                case Cancel():
                    self._cancel()
                case Confirm() | Generate():
                    pass  # the final stage's own business

    def _prefetch(self) -> None:
        """Have what the engine has on disk of the candidates read into host memory while it cannot compute them."""
        if self._prefetched != self._documents:
            self._prefetched = self._documents
            assert self._starts is not None
            self._starts.take(self._documents).prefetch()

    def _make_ahead(self) -> None:
        """Prepare a request before the engine has said whether it admits one, unless it did not when last asked."""
        if self._starts is not None and self._cannot is None and (self._load is None or self._load.has_room):
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
            self._failure = self._failure or "the documents changed before a speculation was sent"

    async def _settle(self, live: StartedSpeculation) -> None:
        """Wait a little for a speculation that is being sent; unless it was sent then, it has failed."""
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
            speculation.add_done_callback(lambda _: self._tasks.post(partial(self._on_done, started)))
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
        self._events.append(PipelineEvent(kind, started.stage, _ids(started.documents), (), False, None, self._now_s()))

    async def _tell(self) -> None:
        events, self._events = self._events, []
        if self._trace is not None:
            for event in events:
                self._trace.tell(event)
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
        why_none = self._unpromising[-1] if len(self._unpromising) >= len(self._candidates) else None
        if why_none == _NOT_WORTH_IT:
            return why_none
        if self._load is None:
            return "the documents were final before the engine had told its load"
        if self._load.has_room and why_none is not None:
            return why_none
        if self._load.has_room:
            return "the documents were final before the engine had told its load again"
        if pending := self._load.num_pending_prefills:
            return f"the engine had no room: real requests that wait for their first token: {pending}"
        return (
            "the engine had no room: it answers real requests, which on a CPU leave none, or it has as many "
            f"speculative ones as max_prefill_bs allows, {self._load.max_prefill_bs}"
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def _ids(documents: _Documents) -> tuple[DocId, ...]:
    return tuple(document.doc_id for document in documents)


def _texts(documents: _Documents) -> tuple[tuple[DocId, str], ...]:
    return tuple((document.doc_id, document.text) for document in documents)


def _may_be_joined(live: StartedSpeculation, documents: _Documents) -> bool:
    """Return whether a request about ``documents`` may turn out to be the one that was sent ahead, byte for byte.

    Their metadata may differ: only the request itself knows whether the prompt shows it. So the speculation is left
    there to be joined, and not confirmed before it is.
    """
    speculation = live.speculation
    return speculation is not None and speculation.is_claimable and _texts(live.documents) == _texts(documents)


async def run_pipeline(
    updates: AsyncIterator[RetrievalUpdate],
    client: SpeculationClient | None,
    speculator: Speculator | None,
    *,
    timeout_s: float | None = None,
    on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None = None,
    arrange: Callable[[Sequence[Document]], Sequence[Document]] | None = None,
    history: SettlingHistory | None = None,
    k: int | None = None,
) -> PipelineResult:
    """Return the final documents of a search, during which the engine worked ahead from its candidates.

    The search is never held up, and its result never lost: not by the engine, nor by a speculator that is slow or
    raises. Whatever ends this early, an error or a cancellation, cancels every speculation, closes ``updates`` and
    leaves no task. A source has a second to clean up, for which the result waits; it is cut off then.

    Args:
        updates: the search's stages. A document that appears twice counts once; nothing is read after the final stage.
        client: sends the engine speculations and asks for its load; ``None``: nothing is speculated.
        speculator: sends what can be sent ahead; ``None``: nothing is speculated.
        timeout_s: how long the search may take until its documents are final. A source that blocks the event loop
            is timed out between two stages only: a single one comes, late, and with a warning that says so.
        on_event: told of every stage and speculation, in order; what it raises ends the search.
        arrange: puts a stage's documents into the order of the prompt; asked once for the same documents.
        history: of the searches of this source, to which this one is added; without it every stage is trusted.
        k: how many documents were asked for: a source that finds more is cut to the first ones of each stage.

    Raises:
        SearchTimeoutError: the documents were not final in time.
        SearchError: the search ended without final documents, or ``updates`` yields no stages.
        ConfigError: the time-out is not above 0.
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
        _logger.warning(
            "A search took %.3g s, beyond its time-out of %g s, because something blocked the event loop: let a source "
            "await what it waits for, and run what blocks in a thread, `await asyncio.to_thread(...)`",
            result.report.search_s,
            timeout_s,
        )
    return result
