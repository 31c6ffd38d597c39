"""Greedy-Dual-Size-Frequency, and RAGCache's prefix-aware variant."""

from __future__ import annotations

import math

from ragcache_core.errors import ConfigError
from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.prefill_cost import PrefillCost, PrefillCostModel


class GDSFPolicy(ReplacementPolicy):
    """Priority = Clock + Frequency x Cost / Size, with the cost of the document alone.

    It knows no prefix: the cost is T(0, size), whatever the requests that computed the document had cached
    (RAGCache §7.3 compares with it).
    """

    name = "gdsf"
    uses_clock = True

    def __init__(self, prefill_cost: PrefillCost | None = None) -> None:
        self._prefill_cost = prefill_cost or PrefillCostModel.default()

    def rank(self, stats: NodeStats, clock: float) -> float:
        return clock + stats.frequency * self._cost_per_token_s(stats.num_tokens)

    def _cost_per_token_s(self, num_tokens: int) -> float:
        return self._prefill_cost.estimate_s(0, num_tokens) / num_tokens if num_tokens else 0.0


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
