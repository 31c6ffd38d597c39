"""Least recently used, vLLM's own order."""

from __future__ import annotations

from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class LRUPolicy(ReplacementPolicy):
    """The node whose last retrieval is longest ago goes first."""

    name = "lru"

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)
