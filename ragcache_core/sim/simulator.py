"""Run a trace through one engine in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import PathChange, arrange
from ragcache_core.sim.bound import BeladyPolicy, in_canonical_order
from ragcache_core.sim.cache import SimulatedCache
from ragcache_core.sim.chunks import StoredChunks
from ragcache_core.sim.documents import DocumentCache
from ragcache_core.sim.engine import Job, QueuedEngine
from ragcache_core.sim.options import BELADY, SimulationOptions
from ragcache_core.sim.recording import Recorder
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.testbeds import Testbed, load_testbed
from ragcache_core.sim.traces.searches import read_searches
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.speculation import Action, Cancel, Confirm, SpeculativePipeline, Start

PROGRESS_EVERY = 512


def simulate(
    trace: Trace,
    options: SimulationOptions,
    *,
    progress: Callable[[int], object] | None = None,
    keeps_requests: bool = False,
    warmed: Iterable[tuple[TracedRequest, int]] = (),
) -> SimulationResult:
    """Return what one engine would have done with ``trace``.

    A request arrives, its documents are known ``retrieval_s`` later, and their order is chosen then, as a client does;
    it waits in the project's own queue until the engine admits it (:class:`~ragcache_core.sim.engine.EngineModel`),
    and the cache is asked and changed at that moment. Its TTFT counts from its arrival. With ``max_batched_tokens`` the
    engine is a :class:`~ragcache_core.sim.stepping.engine.StepEngine`, which does as vLLM does.

    With ``speculation`` its search has as many stages as there are ``settle_shares``, of equal length. The project's
    own :class:`~ragcache_core.speculation.SpeculativePipeline` is told of each. Candidates that are not final yet
    differ from stage to stage and are nobody else's documents: they are computed as a whole, and not cached. A
    speculation is admitted while no real request waits; a wrong one ends when that is known, at once where one request
    runs at a time, and with the iteration where there are more.

    Args:
        progress: told how many more requests are done.
        keeps_requests: whether the result holds a record for each request.
        warmed: prompts whose documents are placed before the first request, and how often each is expected.

    Raises:
        ConfigError: the testbed is unknown or does not cover the trace, nothing is left after the warm-up, or there is
            something to warm in a cache of blocks.
    """
    testbed = load_testbed(options.cost_model)
    notes = check_trace(trace, options, testbed)
    if options.is_fleet:
        from ragcache_core.sim.fleet.simulator import simulate_fleet

        if next(iter(warmed), None) is not None:
            raise ConfigError(f"replicas is {options.replicas} and only one engine is warmed: leave warming out")
        return simulate_fleet(trace, options, testbed, notes, progress=progress, keeps_requests=keeps_requests)
    recorder = Recorder(trace, options, keeps_requests=keeps_requests)
    if options.max_batched_tokens is not None:
        return _in_steps(trace, options, testbed, recorder, notes, progress)
    simulation = _Simulation(trace, options, testbed, recorder, progress)
    simulation.warm(warmed)
    simulation.run()
    return recorder.result(notes)


def _in_steps(
    trace: Trace,
    options: SimulationOptions,
    testbed: Testbed,
    recorder: Recorder,
    notes: tuple[str, ...],
    progress: Callable[[int], object] | None,
) -> SimulationResult:
    from ragcache_core.sim.blocks import BlockCache
    from ragcache_core.sim.stepping.simulation import StepSimulation

    num_done = 0

    def on_done(job: Job) -> None:
        nonlocal num_done
        recorder.add(job)
        num_done += 1
        if progress is not None and num_done % PROGRESS_EVERY == 0:
            progress(PROGRESS_EVERY)

    simulation = StepSimulation(BlockCache(options, testbed.cost), options, testbed)
    ready_s = trace.arrival_s + search_s(len(trace), options)
    order = ready_s.argsort(kind="stable")
    simulation.replay(((number, trace[number]) for number in order.tolist()), ready_s[order].tolist(), on_done)
    if progress is not None:
        progress(num_done % PROGRESS_EVERY)
    recorder.max_overtaken = simulation.max_overtaken
    return recorder.result(notes)


def search_s(num_requests: int, options: SimulationOptions) -> np.ndarray:
    """Return how long each request's search takes: the constant of the options, or drawn from measured ones.

    Raises:
        ConfigError: the file of measured searches cannot be used.
    """
    if options.search is None:
        return np.full(num_requests, options.retrieval_s)
    measured = np.asarray(read_searches(Path(options.search)))
    return np.random.default_rng([options.seed, 1]).choice(measured, num_requests)


def check_trace(trace: Trace, options: SimulationOptions, testbed: Testbed) -> tuple[str, ...]:
    """Return what a reader of the run should know, and refuse a trace that does not fit the options.

    Raises:
        ConfigError: nothing is left after the warm-up, or prompts are longer than the profile, and that was refused.
    """
    if options.warm_up >= len(trace):
        raise ConfigError(f"warm_up is {options.warm_up:,}, the trace has {len(trace):,} requests: lower warm_up")
    if (trace.conversation >= 0).any() and (options.granularity != "block" or options.chunk_reuse is not None):
        raise ConfigError(
            "the trace has conversations, whose histories only blocks of exact prefixes keep: choose granularity block "
            "and leave chunk_reuse out"
        )
    documents = trace.document_tokens() + trace.history_tokens
    num_new_tokens = int((documents + trace.question_tokens).max())
    if options.granularity == "block":  # nothing is there from the beginning
        num_new_tokens += options.system_tokens
    missing = testbed.lengths_beyond(options.system_tokens + int(documents.max()), num_new_tokens)
    if missing is not None and options.beyond == "refuse":
        raise ConfigError(f"{missing}: measure longer prompts (ragcache profile --max-tokens), or extrapolate")
    notes = [] if missing is None else [f"{missing}: times are continued in straight lines"]
    if testbed.assumed and options.host_tokens:
        notes.append(f"{testbed.name} does not say how large KV is, or how fast: assumed {', '.join(testbed.assumed)}")
    return tuple(notes)


def make_cache(
    trace: Trace,
    options: SimulationOptions,
    testbed: Testbed,
    on_change: Callable[[PathChange], object] | None = None,
) -> SimulatedCache:
    """Return the cache that the options ask for, which has seen nothing of the trace but, for the bound, its future.

    ``on_change`` is what a cache of documents is told of, see :class:`~ragcache_core.sim.documents.DocumentCache`.
    """
    exact, chunks = _share_out(options, testbed)
    if options.granularity == "block":
        from ragcache_core.sim.blocks import BlockCache

        return BlockCache(exact, testbed.cost, chunks=chunks)
    belady = None
    if options.policy == BELADY:
        belady = BeladyPolicy(in_canonical_order(trace) if options.order == "canonical" else trace)
    return DocumentCache(exact, testbed.cost, belady, chunks=chunks, on_change=on_change)


def _share_out(options: SimulationOptions, testbed: Testbed) -> tuple[SimulationOptions, StoredChunks | None]:
    """Return the options of what is kept for exact prefixes, and the chunks that get the rest of host and disk."""
    if options.chunk_reuse is None:
        return options, None
    num_host, num_disk = (int(num * options.chunk_share) for num in (options.host_tokens, options.disk_tokens))
    exact = replace(
        options,
        host_tokens=options.host_tokens - num_host,
        disk_tokens=options.disk_tokens - num_disk,
        chunk_reuse=None,
    )
    alone = replace(exact, order="retrieval", gpu_tokens=num_host, host_tokens=num_disk, disk_tokens=0, system_tokens=0)
    return exact, StoredChunks(
        DocumentCache(alone, testbed.cost),
        options.chunk_reuse,
        system_tokens=options.system_tokens,
        page_tokens=options.block_size if options.granularity == "block" else 1,
    )


@dataclass(slots=True)
class _Search:
    """A request whose documents are not all known yet; ``settled`` is the stage from which on they are the final."""

    number: int
    request: TracedRequest
    settled: int
    pipeline: SpeculativePipeline[int]
    job: Job | None = None


class _Simulation:
    """The loop over iterations of the engine, and what arrives between them."""

    def __init__(
        self,
        trace: Trace,
        options: SimulationOptions,
        testbed: Testbed,
        recorder: Recorder,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._options = options
        self._recorder = recorder
        self._progress = progress
        self._num_unreported = 0
        self._engine = QueuedEngine(make_cache(trace, options, testbed), options, testbed)
        self._speculative: dict[int, Job] = {}
        self._searches: dict[int, _Search] = {}
        self._deferred: dict[int, _Search] = {}
        self._cancelled: set[Job] = set()
        self._now_s = 0.0
        self._trace = trace
        self._num_stages = len(options.settle_shares) if options.speculation == "dynamic" else 1
        self._events = _stages(trace.arrival_s, search_s(len(trace), options), self._num_stages)
        self._settled = _settling(len(trace), options) if self._num_stages > 1 else repeat(0)

    def warm(self, prompts: Iterable[tuple[TracedRequest, int]]) -> None:
        for request, expected_uses in prompts:
            self._engine.cache.warm(request, expected_uses)

    def run(self) -> None:
        engine = self._engine.model
        event = next(self._events, None)
        while True:
            while event is not None and event[0] <= self._now_s:
                self._on_stage(*event)
                event = next(self._events, None)
            admitted = self._admit()
            if not engine.running:
                if event is None:
                    break
                self._now_s = event[0]
                continue
            end_s = self._now_s + engine.iteration_s(admitted)
            while event is not None and event[0] < end_s:
                self._on_stage(*event)
                if not engine.running:  # it was a speculation, and wrong
                    end_s = event[0]
                event = next(self._events, None)
            self._now_s = end_s
            self._end_iteration()
        if self._progress is not None:
            self._progress(self._num_unreported)
        self._recorder.max_overtaken = self._engine.queue.max_overtaken

    # Searches

    def _on_stage(self, now_s: float, number: int, stage: int) -> None:
        """Take note that a stage of a request's search ended."""
        is_final = stage == self._num_stages - 1
        if self._num_stages == 1:
            self._generate(number, self._trace[number], now_s)
            return
        if stage == 0:
            pipeline: SpeculativePipeline[int] = SpeculativePipeline(max_prefill_bs=self._options.max_prefill_bs)
            self._searches[number] = _Search(number, self._trace[number], next(self._settled), pipeline)
        search = self._searches[number]
        candidates = min(stage, search.settled)
        num_pending = self._num_pending() - (search.job is not None and search.job.done_s is None)
        actions = search.pipeline.on_stage(candidates, is_final=is_final, num_pending=num_pending)
        self._act(search, actions, now_s)
        if is_final:
            del self._searches[number]
            self._deferred.pop(number, None)
        elif search.pipeline.is_deferred:
            self._deferred[number] = search

    def _act(self, search: _Search, actions: Sequence[Action[int]], now_s: float) -> None:
        for action in actions:
            match action:
                case Start(candidates=stage):
                    self._deferred.pop(search.number, None)
                    search.job = self._job(search.number, search.request, is_wrong=stage != search.settled)
                    self._speculative[search.number] = search.job
                case Cancel():
                    assert search.job is not None
                    self._cancel(search.job)
                    search.job = None
                case Confirm():
                    assert search.job is not None
                    self._confirm(search.job, now_s)
                case _:
                    self._generate(search.number, search.request, now_s)

    def _cancel(self, job: Job) -> None:
        if self._speculative.pop(job.number, None) is not None or job.done_s is not None:
            return
        if self._options.max_batch == 1:
            self._engine.model.running.remove(job)
        else:
            self._cancelled.add(job)

    def _confirm(self, job: Job, now_s: float) -> None:
        job.ready_s = now_s
        if self._speculative.pop(job.number, None) is not None:
            self._engine.enqueue(job)
        elif job.done_s is not None:
            job.done_s = now_s
            self._finish(job)

    def _generate(self, number: int, request: TracedRequest, now_s: float) -> None:
        job = self._job(number, request)
        job.ready_s = now_s
        self._engine.enqueue(job)

    def _num_pending(self) -> int:
        return len(self._engine.queue) + len(self._speculative) + len(self._engine.model.running)

    def _start_deferred(self) -> None:
        """Start what could not be admitted, if it can be now."""
        for search in list(self._deferred.values()):
            num_pending = self._num_pending()
            if num_pending >= self._options.max_prefill_bs:
                return
            self._act(search, search.pipeline.on_load(num_pending), self._now_s)

    # Waiting and running

    def _job(self, number: int, request: TracedRequest, *, is_wrong: bool = False) -> Job:
        """Return a request with its documents in the order in which its prompt shows them."""
        started_ns = perf_counter_ns()
        if self._options.order == "cache_aware" and not is_wrong:
            order = self._engine.cache.best_order(request)
        else:
            order = arrange(request.doc_ids, "retrieval" if is_wrong else self._options.order, None)
        job = Job(number, request.in_order(order), order, is_wrong)
        job.decision_ns = perf_counter_ns() - started_ns
        return job

    def _admit(self) -> list[Job]:
        """Admit what waits while slots are free: real requests before speculative ones."""
        if self._deferred:
            self._start_deferred()
        admitted = self._engine.admit()
        while self._engine.model.has_room and self._speculative:
            job = self._speculative.pop(next(iter(self._speculative)))
            self._engine.start(job)
            admitted.append(job)
        return admitted

    def _end_iteration(self) -> None:
        for job in self._engine.model.end_iteration(self._now_s):
            if job.ready_s is not None:
                self._finish(job)
        if self._cancelled:
            self._engine.model.running = [job for job in self._engine.model.running if job not in self._cancelled]
            self._cancelled.clear()

    def _finish(self, job: Job) -> None:
        self._recorder.add(job)
        self._num_unreported += 1
        if self._progress is not None and self._num_unreported >= PROGRESS_EVERY:
            self._progress(self._num_unreported)
            self._num_unreported = 0


def _stages(arrival_s: np.ndarray, search_s: np.ndarray, num_stages: int) -> Iterator[tuple[float, int, int]]:
    """Yield (time, number of the request, stage) for each end of a stage of a search, in the order of time."""
    streams = []
    for stage in range(num_stages):
        ends_s = arrival_s + search_s * (stage + 1) / num_stages
        order = ends_s.argsort(kind="stable")
        streams.append(zip(ends_s[order].tolist(), order.tolist(), repeat(stage)))
    return heapq.merge(*streams)


def _settling(num_requests: int, options: SimulationOptions) -> Iterator[int]:
    """Return the stage of each search from which on its candidates are the final ones."""
    ends = np.cumsum(options.settle_shares[:-1])
    drawn = np.random.default_rng(options.seed).random(num_requests)
    return iter(np.searchsorted(ends, drawn, side="right").tolist())
