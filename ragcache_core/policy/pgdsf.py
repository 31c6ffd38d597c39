"""Prefix-aware Greedy-Dual-Size-Frequency, RAGCache's policy."""

from __future__ import annotations

import math

from ragcache_core.errors import ConfigError
from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class PGDSFPolicy(ReplacementPolicy):
    """Priority = Clock + Frequency x Cost / Size (RAGCache §5.1, Eq. 1 to 3, Algorithm 1).

    Cost / Size is the mean, over the requests that had to compute the node, of their prefill seconds per new token:
    the cost of a document depends on what stood before it. ``frequency_exponent`` other than 1 is ours: 1.5 favours
    documents that come back often.
    """

    name = "pgdsf"
    uses_clock = True

    def __init__(self, frequency_exponent: float = 1.0) -> None:
        if not 0.0 < frequency_exponent <= 4.0:
            raise ConfigError(f"frequency_exponent is {frequency_exponent!r}; it must lie in (0, 4]")
        self._exponent = frequency_exponent

    def rank(self, stats: NodeStats, clock: float) -> float:
        return clock + stats.avg_cost_s * math.pow(stats.frequency, self._exponent)
