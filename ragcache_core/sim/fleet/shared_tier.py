"""A tier that several simulated engines share: a pool of tokens, behind a link."""

from __future__ import annotations

from dataclasses import replace

from ragcache_core.sim.cache import Served, SimulatedCache
from ragcache_core.sim.documents import DocumentCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest


class SharedPool:
    """Keeps what engines have computed, document behind document; the least recently used goes first."""

    def __init__(self, options: SimulationOptions, testbed: Testbed) -> None:
        """Begin empty, for ``shared_tokens`` that come at ``link_gib_per_s``."""
        assert options.link_gib_per_s is not None
        alone = SimulationOptions(
            policy="lru", gpu_tokens=options.shared_tokens, host_tokens=0, system_tokens=options.system_tokens
        )
        self._cache = DocumentCache(alone, testbed.cost)
        self._cost = testbed.cost
        self._tokens_per_s = testbed.tokens_per_gib * options.link_gib_per_s

    def with_read(self, served: Served, request: TracedRequest) -> Served:
        """Return what a request finds here as well, unless computing it is faster than the link."""
        here, there = served.num_cached_tokens, self._cache.num_cached_tokens(request)
        num_tokens, num_new_tokens = there - here, served.num_new_tokens - (there - here)
        if num_tokens <= 0:
            return served
        computed_s = self._cost.estimate_s(here, served.num_new_tokens)
        if num_tokens / self._tokens_per_s >= computed_s - self._cost.estimate_s(there, num_new_tokens):
            return served
        return replace(served, num_new_tokens=num_new_tokens, num_shared_tokens=num_tokens)

    def store(self, request: TracedRequest, number: int) -> None:
        """Take in the documents of a request that is done."""
        self._cache.serve(request, number)


class SharingCache(SimulatedCache):
    """An engine's own cache, above the pool."""

    def __init__(self, own: SimulatedCache, pool: SharedPool) -> None:
        self._own = own
        self._pool = pool

    def num_cached_tokens(self, request: TracedRequest) -> int:
        return self._own.num_cached_tokens(request)

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        return self._own.best_order(request)

    def serve(self, request: TracedRequest, number: int) -> Served:
        return self._pool.with_read(self._own.serve(request, number), request)

    def changed_prefixes(self) -> set[tuple[str, ...]] | None:
        return self._own.changed_prefixes()
