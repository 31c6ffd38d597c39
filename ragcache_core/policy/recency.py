"""Recency and frequency: least recently and least frequently used."""

from __future__ import annotations

from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class LRUPolicy(ReplacementPolicy):
    """Evicts the least recently accessed node first."""

    name = "lru"

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)


class LFUPolicy(ReplacementPolicy):
    """Evicts the least frequently accessed node first; of equal ones the least recently accessed."""

    name = "lfu"

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.frequency)
