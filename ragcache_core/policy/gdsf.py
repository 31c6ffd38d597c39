"""Greedy-Dual-Size-Frequency, the classic that PGDSF extends."""

from __future__ import annotations

from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.prefill_cost import PrefillCost, PrefillCostModel


class GDSFPolicy(ReplacementPolicy):
    """Priority = Clock + Frequency x Cost / Size, where the cost is that of the document alone.

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
