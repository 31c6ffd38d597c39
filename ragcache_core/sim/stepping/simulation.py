"""Requests on an engine in steps: at the moments of their arrival, or always so many at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns

from ragcache_core.ordering import arrange
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.engine import Job
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.stepping.engine import StepEngine
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest


class StepSimulation:
    """An engine that keeps what it has cached from one load to the next."""

    def __init__(self, cache: BlockCache, options: SimulationOptions, testbed: Testbed) -> None:
        self._order = options.order
        self._engine = StepEngine(cache, options, testbed)

    @property
    def max_overtaken(self) -> int:
        """How often a request was overtaken at most."""
        return self._engine.queue.max_overtaken

    def replay(
        self,
        requests: Iterable[tuple[int, TracedRequest]],
        ready_s: Sequence[float],
        on_done: Callable[[Job], object] = lambda _: None,
    ) -> list[Job]:
        """Run requests whose documents are known at ``ready_s``, which ascend, and return their jobs in their order.

        The clock begins anew. ``on_done`` is told of each when it has its last token.
        """
        engine = self._engine
        engine.begin_anew()
        jobs: list[Job] = []
        left = zip(requests, ready_s, strict=True)
        following = next(left, None)
        while following is not None or not engine.is_idle:
            if engine.is_idle and following is not None:
                engine.now_s = max(engine.now_s, following[1])
            while following is not None and following[1] <= engine.now_s:
                jobs.append(self._ask(*following[0], following[1]))
                following = next(left, None)
            for job in engine.step():
                on_done(job)
        return jobs

    def run_through(self, requests: Iterable[tuple[int, TracedRequest]], *, in_flight: int) -> None:
        """Run requests, always ``in_flight`` of them at a time."""
        engine = self._engine
        left = iter(requests)
        free_s = [engine.now_s] * in_flight
        following = next(left, None)
        while following is not None or not engine.is_idle:
            if engine.is_idle and free_s:
                engine.now_s = max(engine.now_s, free_s[0])
            while following is not None and free_s and free_s[0] <= engine.now_s:
                self._ask(*following, heapq.heappop(free_s))
                following = next(left, None)
            for job in engine.step():
                assert job.done_s is not None
                heapq.heappush(free_s, job.done_s)

    def _ask(self, number: int, request: TracedRequest, now_s: float) -> Job:
        started_ns = perf_counter_ns()
        if self._order == "cache_aware":
            order = self._engine.cache.best_order(request)
        else:
            order = arrange(request.doc_ids, self._order, None)
        job = Job(number, request.in_order(order), order)
        job.decision_ns = perf_counter_ns() - started_ns
        job.ready_s = now_s
        self._engine.enqueue(job)
        return job
