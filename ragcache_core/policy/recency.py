"""Recency and frequency: least recently and least frequently used."""

from __future__ import annotations

from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class LRUPolicy(ReplacementPolicy):
    """The node whose last retrieval is longest ago goes first."""

    name = "lru"

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)


class LFUPolicy(ReplacementPolicy):
    """The node with the fewest retrievals goes first; among equals the least recently retrieved."""

    name = "lfu"

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.frequency)
