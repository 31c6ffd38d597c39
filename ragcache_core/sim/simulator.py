"""Run a trace through one engine, or a fleet of them, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import PathChange, arrange, longest_cached
from ragcache_core.routing.choice import ReplicaState, choose_order, choose_replica
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import InFlightRequest, PromptInfo, ReplicaLoad
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.engine import NO_STATIC_PREFIX, Job, QueuedEngine, SimulatedCache
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.result import Recorder, SimulationResult
from ragcache_core.sim.testbeds import Testbed, load_testbed, read_searches
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.speculation import Action, Cancel, Confirm, SpeculativePipeline, Start


class Router:
    """Chooses the replica of each request, and the order of its documents.

    ``joint`` chooses both together, as a ``Fleet`` does. Otherwise a cache-aware order is the best for the replica that
    was chosen, better than one through a proxy could be. Turns of a conversation stay at one replica.
    """

    def __init__(self, caches: Sequence[SimulatedCache], options: SimulationOptions) -> None:
        self.replicas = []
        self._index = PathIndex()
        for i, cache in enumerate(caches):
            cache.mirror.set(PathChange(NO_STATIC_PREFIX, (), options.system_tokens))
            self.replicas.append(ReplicaState(f"replica-{i}", (cache.mirror,), ReplicaLoad()))
        for paths in itertools.chain(*(replica.caches for replica in self.replicas)):
            for _ in self._index.join(paths):
                pass
        self._options = options
        self._turns = itertools.cycle(self.replicas)
        self._home: dict[int, ReplicaState] = {}

    def route(self, request: TracedRequest) -> tuple[int, tuple[int, ...]]:
        """Return the replica that gets a request, and the order in which it shows its documents."""
        is_cache_aware = self._options.order == "cache_aware"
        order = arrange(request.doc_ids, self._options.order, None)
        replica = None if request.conversation is None else self._home.get(request.conversation)
        if is_cache_aware and replica is None and self._options.routing == "joint":
            best = choose_order(self._index, self.replicas, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)
            order = best or order
            replica = self.choose(self._prompt(request.in_order(order)))
        else:
            replica = replica or self.choose(self._prompt(request.in_order(order)))
            if is_cache_aware:
                found = longest_cached(replica.caches, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)
                order = found[1]
        if request.conversation is not None:
            self._home[request.conversation] = replica
        return self.replicas.index(replica), order

    def send(self, place: int, request: TracedRequest) -> InFlightRequest:
        """Count a request, with its documents in prompt order, as open on a replica."""
        replica, prompt = self.replicas[place], self._prompt(request)
        return replica.load.begin(prompt, replica.num_cached_tokens(prompt))

    def choose(self, prompt: PromptInfo) -> ReplicaState:
        """Return the replica that gets a prompt."""
        if self._options.routing == "round-robin":
            return next(self._turns)
        return choose_replica(self._index, self.replicas, prompt)

    def _prompt(self, request: TracedRequest) -> PromptInfo:
        """Return a client's view of a request's prompt."""
        num_static_tokens = self._options.system_tokens + request.history_tokens
        ends = [num_static_tokens]
        for num_tokens in request.doc_tokens:
            ends.append(ends[-1] + num_tokens)
        key = request.doc_ids[0] if request.doc_ids else ""
        num_tokens = ends[-1] + request.question_tokens
        return PromptInfo(request.doc_ids, tuple(ends[1:]), num_static_tokens, num_tokens, NO_STATIC_PREFIX, key)


PROGRESS_EVERY = 512


@dataclass(frozen=True, slots=True)
class Parts:
    """Replacements of parts by an experiment.

    Attributes:
        make_cache: returns the empty cache of a replica.
        make_router: returns what chooses among replicas with these caches.
    """

    make_cache: Callable[[Trace, SimulationOptions, Testbed], SimulatedCache]
    make_router: Callable[[Sequence[SimulatedCache], SimulationOptions], Router] = Router


def make_cache(trace: Trace, options: SimulationOptions, testbed: Testbed) -> BlockCache:
    """Return the empty cache of an engine.

    Raises:
        ConfigError: a prompt of the trace is longer than the GPU holds, as in the engine.
    """
    num_tokens = trace.history_tokens + trace.document_tokens() + trace.question_tokens + trace.output_tokens - 1
    longest = int(num_tokens.argmax())
    num_needed = options.system_tokens + int(num_tokens[longest])
    if num_needed > options.longest_prompt_tokens and options.policy != INFINITE:
        num_blocks = -(-num_needed // options.block_size) + 1
        raise ConfigError(
            f"request {longest} of the trace has {num_needed:,} tokens with its answer, the GPU holds "
            f"{options.longest_prompt_tokens:,}: set gpu_tokens to {num_blocks * options.block_size:,} or more"
        )
    return BlockCache(options, testbed.cost, trace=trace)


PARTS = Parts(make_cache)


def simulate(
    trace: Trace,
    options: SimulationOptions,
    *,
    progress: Callable[[int], object] | None = None,
    keeps_requests: bool = False,
    warmed: Iterable[tuple[TracedRequest, int]] = (),
    parts: Parts = PARTS,
) -> SimulationResult:
    """Return the simulated result of ``trace``.

    A request arrives, its documents are known ``retrieval_s`` later, and their order (and its replica) is chosen then,
    as a client does. It waits in the project's own queue until the engine admits it
    (:class:`~ragcache_core.sim.engine.EngineModel`), and the cache is matched and changed at that moment. Its TTFT
    counts from its arrival. What a replica has cached is known to the router when a request of it ends.

    With ``speculation`` a search has as many stages of equal length as there are ``settle_shares``. The project's own
    :class:`~ragcache_core.speculation.SpeculativePipeline` receives the candidates of each. Candidates that are not
    final differ from stage to stage and belong to no other request: they are computed as a whole and not cached. A
    speculative request starts while fewer than ``max_batch`` requests wait or run (``max_prefill_bs``), and is admitted
    while no real one waits. A misspeculation ends when it is known, at once where one request runs at a time, and with
    the iteration where there are more.

    Args:
        trace: requests, in the order of their arrival.
        options: of the run.
        progress: receives the number of requests that are done since its last call.
        keeps_requests: whether the result has a record for each request.
        warmed: prompts whose documents are stored before the first request, and how often each is expected.
        parts: another cache or router, for experiments.

    Raises:
        ConfigError: the testbed is unknown, the trace does not fit the options, a prompt is longer than the GPU holds,
            or several replicas are to be warmed.
    """
    testbed = load_testbed(options.cost_model)
    notes = check_trace(trace, options, testbed)
    recorder = Recorder(trace, options, keeps_requests=keeps_requests)
    simulation = _Simulation(trace, options, testbed, recorder, parts, progress)
    for request, expected_uses in warmed:
        simulation.warm(request, expected_uses)
    simulation.run()
    return simulation.result(notes)


def search_s(num_requests: int, options: SimulationOptions) -> np.ndarray:
    """Return each request's search time: a constant, or drawn from measured ones.

    Raises:
        ConfigError: the file of measured searches cannot be used.
    """
    if options.search is None:
        return np.full(num_requests, options.retrieval_s)
    measured = np.asarray(read_searches(Path(options.search)))
    return np.random.default_rng([options.seed, 1]).choice(measured, num_requests)


def check_trace(trace: Trace, options: SimulationOptions, testbed: Testbed) -> tuple[str, ...]:
    """Return the limits of a run's validity, one sentence each.

    Raises:
        ConfigError: nothing is left after the warm-up, or conversations meet chunk reuse.
    """
    if options.warm_up >= len(trace):
        raise ConfigError(f"warm_up is {options.warm_up:,}, the trace has {len(trace):,} requests: lower warm_up")
    if options.chunk_reuse is not None and (trace.conversation >= 0).any():
        raise ConfigError("chunk_reuse is simulated without histories, and the trace has conversations: leave it out")
    documents = trace.document_tokens() + trace.history_tokens
    num_new_tokens = int((documents + trace.question_tokens).max()) + options.system_tokens
    missing = testbed.lengths_beyond(options.system_tokens + int(documents.max()), num_new_tokens)
    notes = [] if missing is None else [f"{missing}: times are continued in straight lines"]
    if testbed.assumed and options.host_tokens:
        notes.append(f"{testbed.name} does not say how large KV is, or how fast: assumed {', '.join(testbed.assumed)}")
    return tuple(notes)


@dataclass(slots=True)
class _SimulatedSearch:
    """An unfinished search, whose candidates are final from stage ``settled`` on."""

    number: int
    request: TracedRequest
    settled: int
    pipeline: SpeculativePipeline[int]
    job: Job | None = None


@dataclass(slots=True, eq=False)
class _SimulatedReplica:
    """One engine of the fleet, and its statistics; ``busy_s`` are seconds of computing."""

    engine: QueuedEngine
    recorder: Recorder
    busy_s: float = 0.0
    sent: dict[Job, InFlightRequest] = field(default_factory=dict)


class _Simulation:
    """The event loop: ends of searches and iterations, in order of time."""

    def __init__(
        self,
        trace: Trace,
        options: SimulationOptions,
        testbed: Testbed,
        recorder: Recorder,
        parts: Parts,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._trace = trace
        self._options = options
        self._recorder = recorder
        self._progress = progress
        self._num_unreported = 0
        caches = [parts.make_cache(trace, options, testbed) for _ in range(options.replicas)]
        self._replicas = [
            _SimulatedReplica(QueuedEngine(cache, options, testbed), Recorder(trace, options, keeps_requests=False))
            for cache in caches
        ]
        self._engine = self._replicas[0].engine
        self._router = parts.make_router(caches, options) if options.replicas > 1 else None
        self._counts_from_s = float(trace.arrival_s[options.warm_up])
        self._searches: dict[int, _SimulatedSearch] = {}
        self._deferred: dict[int, _SimulatedSearch] = {}
        self._cancelled: set[Job] = set()
        self._num_stages = len(options.settle_shares) if options.speculation == "dynamic" else 1
        self._events = _stages(trace.arrival_s, search_s(len(trace), options), self._num_stages)
        self._settled = _settling(len(trace), options) if self._num_stages > 1 else repeat(0)

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        if self._router is not None:
            raise ConfigError(f"replicas is {len(self._replicas)} and only one engine is warmed: leave warming out")
        self._engine.cache.warm(request, expected_uses)

    def run(self) -> None:
        event = next(self._events, None)
        while True:
            ends_s = [end_s for replica in self._replicas if (end_s := replica.engine.end_s) is not None]
            now_s = min((*ends_s, math.inf if event is None else event[0]))
            if now_s == math.inf:
                break
            for replica in self._replicas:
                if replica.engine.end_s == now_s:
                    self._end_iteration(replica)
            while event is not None and event[0] <= now_s:
                self._on_stage(*event)
                event = next(self._events, None)
            for replica in self._replicas:
                if replica.engine.end_s is None:
                    self._begin_iteration(replica, now_s)
        if self._progress is not None:
            self._progress(self._num_unreported)
        self._recorder.max_overtaken = max(replica.engine.queue.max_overtaken for replica in self._replicas)

    def result(self, notes: tuple[str, ...]) -> SimulationResult:
        if self._router is None:
            return self._recorder.result(notes)
        seconds = self._recorder.counted_s
        return self._recorder.result(
            notes, tuple(replica.recorder.of_replica(replica.busy_s, seconds) for replica in self._replicas)
        )

    # Searches

    def _on_stage(self, now_s: float, number: int, stage: int) -> None:
        """Handle the end of a stage of a request's search."""
        is_final = stage == self._num_stages - 1
        if self._num_stages == 1:
            self._generate(number, self._trace[number], now_s)
            return
        if stage == 0:
            pipeline: SpeculativePipeline[int] = SpeculativePipeline(max_prefill_bs=self._options.max_batch)
            self._searches[number] = _SimulatedSearch(number, self._trace[number], next(self._settled), pipeline)
        search = self._searches[number]
        candidates = min(stage, search.settled)
        num_pending = self._engine.num_pending - (search.job is not None and search.job.done_s is None)
        actions = search.pipeline.on_stage(candidates, is_final=is_final, num_pending=num_pending)
        self._act(search, actions, now_s)
        if is_final:
            del self._searches[number]
            self._deferred.pop(number, None)
        elif search.pipeline.is_deferred:
            self._deferred[number] = search

    def _act(self, search: _SimulatedSearch, actions: Sequence[Action[int]], now_s: float) -> None:
        for action in actions:
            match action:
                case Start(candidates=stage):
                    self._deferred.pop(search.number, None)
                    search.job = self._job(search.number, search.request, is_wrong=stage != search.settled)
                    self._engine.speculative[search.number] = search.job
                case Cancel():
                    assert search.job is not None
                    self._cancel(search.job, now_s)
                    search.job = None
                case Confirm():
                    assert search.job is not None
                    self._confirm(search.job, now_s)
                case _:
                    self._generate(search.number, search.request, now_s)

    def _cancel(self, job: Job, now_s: float) -> None:
        if self._engine.speculative.pop(job.number, None) is not None or job.done_s is not None:
            return
        if self._options.max_batch == 1:
            self._engine.model.running.remove(job)
            self._engine.end_s = now_s
        else:
            self._cancelled.add(job)

    def _confirm(self, job: Job, now_s: float) -> None:
        job.ready_s = now_s
        if self._engine.speculative.pop(job.number, None) is not None:
            self._engine.enqueue(job)
        elif job.done_s is not None:
            job.done_s = now_s
            self._finish(job, self._replicas[0])

    def _start_deferred(self, now_s: float) -> None:
        """Start speculative requests that can be admitted now."""
        for search in list(self._deferred.values()):
            num_pending = self._engine.num_pending
            if num_pending >= self._options.max_batch:
                return
            self._act(search, search.pipeline.on_load(num_pending), now_s)

    # Waiting and running

    def _generate(self, number: int, request: TracedRequest, now_s: float) -> None:
        if self._router is None:
            replica, job = self._replicas[0], self._job(number, request)
        else:
            started_ns = perf_counter_ns()
            place, order = self._router.route(request)
            replica, job = self._replicas[place], Job(number, request.in_order(order), order)
            replica.sent[job] = self._router.send(place, job.request)
            job.decision_ns = perf_counter_ns() - started_ns
        job.ready_s = now_s
        replica.engine.enqueue(job)

    def _job(self, number: int, request: TracedRequest, *, is_wrong: bool = False) -> Job:
        """Return a request with its documents in prompt order."""
        started_ns = perf_counter_ns()
        if self._options.order == "cache_aware" and not is_wrong:
            order = self._engine.cache.best_order(request)
        else:
            order = arrange(request.doc_ids, "retrieval" if is_wrong else self._options.order, None)
        job = Job(number, request.in_order(order), order, is_wrong)
        job.decision_ns = perf_counter_ns() - started_ns
        return job

    def _begin_iteration(self, replica: _SimulatedReplica, now_s: float) -> None:
        if self._deferred:
            self._start_deferred(now_s)
        seconds = replica.engine.begin_iteration(now_s)
        if now_s >= self._counts_from_s:
            replica.busy_s += seconds

    def _end_iteration(self, replica: _SimulatedReplica) -> None:
        done = replica.engine.end_iteration()
        for job in (*replica.engine.model.running, *done) if self._router is not None else ():
            replica.sent[job].answered()
        for job in done:
            if self._router is not None:
                replica.sent.pop(job).end()
            if job.ready_s is not None:
                self._finish(job, replica)
        if done and self._router is not None:
            replica.engine.cache.update_mirror()
        if self._cancelled:
            replica.engine.model.running = [job for job in replica.engine.model.running if job not in self._cancelled]
            self._cancelled.clear()

    def _finish(self, job: Job, replica: _SimulatedReplica) -> None:
        self._recorder.add(job)
        if self._router is not None:
            replica.recorder.add(job)
        self._num_unreported += 1
        if self._progress is not None and self._num_unreported >= PROGRESS_EVERY:
            self._progress(self._num_unreported)
            self._num_unreported = 0


def _stages(arrival_s: np.ndarray, search_s: np.ndarray, num_stages: int) -> Iterator[tuple[float, int, int]]:
    """Yield (time, number of the request, stage) for each end of a stage, in order of time."""
    streams = []
    for stage in range(num_stages):
        ends_s = arrival_s + search_s * (stage + 1) / num_stages
        order = ends_s.argsort(kind="stable")
        streams.append(zip(ends_s[order].tolist(), order.tolist(), repeat(stage)))
    return heapq.merge(*streams)


def _settling(num_requests: int, options: SimulationOptions) -> Iterator[int]:
    """Return the stage of each search from which its candidates are final."""
    ends = np.cumsum(options.settle_shares[:-1])
    drawn = np.random.default_rng(options.seed).random(num_requests)
    return iter(np.searchsorted(ends, drawn, side="right").tolist())
