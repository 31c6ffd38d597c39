"""Run a trace through several engines in one virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from time import perf_counter_ns

from ragcache_core.ordering import CachedPaths, PathChange
from ragcache_core.routing.load import OnItsWay
from ragcache_core.sim.documents import NO_STATIC_PREFIX
from ragcache_core.sim.engine import Job, QueuedEngine
from ragcache_core.sim.fleet.router import Router
from ragcache_core.sim.fleet.shared_tier import SharedPool, SharingCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.recording import Recorder
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.simulator import PROGRESS_EVERY, make_cache
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import Trace

_MOST_PATHS = 1 << 62


def simulate_fleet(
    trace: Trace,
    options: SimulationOptions,
    testbed: Testbed,
    notes: tuple[str, ...],
    *,
    progress: Callable[[int], object] | None,
    keeps_requests: bool,
) -> SimulationResult:
    """Return what several engines would have done with ``trace``; see :func:`~ragcache_core.sim.simulator.simulate`.

    A request's replica is chosen when its documents are known. What a replica has cached, and what it leaves in a
    shared tier, is known to others when a request of it ends.
    """
    fleet = _Fleet(trace, options, testbed, Recorder(trace, options, keeps_requests=keeps_requests), progress)
    fleet.run()
    return fleet.result(notes)


class _Replica:
    """One engine of the fleet: its mirror, and what it did."""

    def __init__(self, trace: Trace, options: SimulationOptions, testbed: Testbed, pool: SharedPool | None) -> None:
        self.mirror = CachedPaths(_MOST_PATHS)
        self.mirror.set(PathChange(NO_STATIC_PREFIX, (), options.system_tokens))
        self._changes: list[PathChange] = []
        own = make_cache(trace, options, testbed, self._changes.append)
        self.engine = QueuedEngine(own if pool is None else SharingCache(own, pool), options, testbed)
        self.recorder = Recorder(trace, options, keeps_requests=False)
        self.busy_s = 0.0
        self.sent: dict[Job, OnItsWay] = {}

    def tell(self) -> None:
        """Let the mirror know what has changed."""
        for change in self._changes:
            self.mirror.set(change)
        self._changes.clear()


class _Fleet:
    """The clock: what arrives, and the ends of all engines' iterations."""

    def __init__(
        self,
        trace: Trace,
        options: SimulationOptions,
        testbed: Testbed,
        recorder: Recorder,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._trace = trace
        self._options = options
        self._recorder = recorder
        self._progress = progress
        self._num_unreported = 0
        self._pool = SharedPool(options, testbed) if options.shared_tokens else None
        self._replicas = [_Replica(trace, options, testbed, self._pool) for _ in range(options.replicas)]
        self._router = Router([replica.mirror for replica in self._replicas], options)
        self._ends: list[tuple[float, int]] = []
        """When an iteration ends, and whose."""
        self._counts_from_s = float(trace.arrival_s[options.warm_up])

    def run(self) -> None:
        """Serve all requests."""
        for number, request in enumerate(self._trace):
            now_s = request.arrival_s + self._options.retrieval_s
            self._advance(now_s)
            started_ns = perf_counter_ns()
            chosen, order = self._router.route(request)
            place = self._router.replicas.index(chosen)
            replica = self._replicas[place]
            job = Job(number, request.in_order(order), order, ready_s=now_s)
            prompt = self._router.asked(job.request)
            replica.sent[job] = chosen.load.begin(prompt, chosen.num_cached_tokens(prompt))
            job.decision_ns = perf_counter_ns() - started_ns
            replica.engine.enqueue(job)
            if not replica.engine.model.running:
                self._begin_iteration(place, now_s)
        self._advance(math.inf)
        if self._progress is not None:
            self._progress(self._num_unreported)
        self._recorder.max_overtaken = max(replica.engine.queue.max_overtaken for replica in self._replicas)

    def result(self, notes: tuple[str, ...]) -> SimulationResult:
        """Return what came of it, once it has run."""
        seconds = self._recorder.counted_s
        replicas = [replica.recorder.of_replica(replica.busy_s, seconds) for replica in self._replicas]
        return self._recorder.result(notes, tuple(replicas))

    def _advance(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            end_s, place = heapq.heappop(self._ends)
            self._end_iteration(self._replicas[place], end_s)
            self._begin_iteration(place, end_s)

    def _begin_iteration(self, place: int, now_s: float) -> None:
        replica = self._replicas[place]
        admitted = replica.engine.admit()
        if not replica.engine.model.running:
            return
        seconds = replica.engine.model.iteration_s(admitted)
        if now_s >= self._counts_from_s:
            replica.busy_s += seconds
        heapq.heappush(self._ends, (now_s + seconds, place))

    def _end_iteration(self, replica: _Replica, now_s: float) -> None:
        done = replica.engine.model.end_iteration(now_s)
        for job in (*replica.engine.model.running, *done):
            replica.sent[job].answered()
        for job in done:
            replica.sent.pop(job).end()
            if self._pool is not None:
                self._pool.store(job.request, job.number)
            self._record(job, replica.recorder)
        if done:
            replica.tell()

    def _record(self, job: Job, recorder: Recorder) -> None:
        self._recorder.add(job)
        recorder.add(job)
        self._num_unreported += 1
        if self._progress is not None and self._num_unreported >= PROGRESS_EVERY:
            self._progress(self._num_unreported)
            self._num_unreported = 0
