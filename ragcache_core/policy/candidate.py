"""What a tournament chooses from: policies whose ranks are logarithms and need no tier's clock."""

from __future__ import annotations

import math
from abc import abstractmethod
from array import array
from functools import lru_cache
from typing import ClassVar, Final

from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.gdsf import GDSFPolicy
from ragcache_core.policy.prefill_cost import PrefillCost

_LEAST: Final = 1e-12
_IDS_AHEAD: Final = 64
_NUM_SIZES: Final = 4096
"""Of documents, for which the cost is remembered: estimating it takes longer than all else of a rank."""
_NO_USES: Final = math.log(_LEAST)


class CandidatePolicy(ReplacementPolicy):
    """A policy of a tournament, and of the shadow that judges it."""

    @abstractmethod
    def worth(self, stats: NodeStats, uses: float, num_requests: int) -> float:
        """Return the rank of a node that ``uses`` more requests are expected to retrieve."""

    def on_shadow_evicted(self, rank: float) -> None:
        """Record the rank of a node that the candidate's own shadow cache evicted."""


class DecayedFrequencyPolicy(CandidatePolicy):
    """Cost / Size x a frequency that halves every ``half_life`` requests: Eq. 1 of RAGCache with decay for a clock.

    All frequencies fade at the same pace, so in logarithms an access is worth more by log(2) / half_life for every
    request that it is younger: the rank stands until the next access, and no clock is needed.

    Without ``weighs_cost`` all tokens cost the same: of long prompts the last ones cost the most to compute, and come
    back the least.
    """

    name = "decayed"

    def __init__(self, half_life: float, *, weighs_cost: bool = True) -> None:
        self._weighs_cost = weighs_cost
        self._decay = math.log(2.0) / half_life
        self._weights = array("d")

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        self.on_access(stats, num_requests)
        self._weights[stats.id] = float(stats.frequency)

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        weights = self._weights
        self._make_room(stats.id)
        age = num_requests - stats.last_request
        weights[stats.id] = 1.0 if stats.frequency == 1 else weights[stats.id] * math.exp(-age * self._decay) + 1.0

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        self._make_room(lower.id)
        self._weights[lower.id] = self._weights[stats.id] if stats.id < len(self._weights) else 0.0

    def rank(self, stats: NodeStats, clock: float) -> float:
        weight = self._weights[stats.id] if stats.id < len(self._weights) else 0.0
        return math.log((weight if weight > _LEAST else _LEAST) * self._cost(stats)) + stats.last_request * self._decay

    def worth(self, stats: NodeStats, uses: float, num_requests: int) -> float:
        return math.log(max(uses, _LEAST) * self._cost(stats)) + num_requests * self._decay

    def _cost(self, stats: NodeStats) -> float:
        """Return what a token counts for in a rank: seconds, or 1."""
        if not self._weighs_cost:
            return 1.0
        cost_s = stats.total_cost_s / stats.num_computed if stats.num_computed else 0.0  # avg_cost_s, without the call
        return cost_s if cost_s > _LEAST else _LEAST

    def _make_room(self, node_id: int) -> None:
        num_missing = node_id + 1 - len(self._weights)
        if num_missing > 0:
            self._weights.extend([0.0] * (num_missing + _IDS_AHEAD))


class SelfClockedGDSFPolicy(GDSFPolicy, CandidatePolicy):
    """GDSF with its shadow cache's clock for all tiers: a rank holds until the next access, under any active policy."""

    name = "self-clocked-gdsf"
    uses_clock: ClassVar[bool] = False

    def __init__(self, prefill_cost: PrefillCost | None = None) -> None:
        super().__init__(prefill_cost)
        self._clock_s = 0.0
        self._ranks = array("d")
        self._cost_s = lru_cache(_NUM_SIZES)(self._cost_per_token_s)

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        self._set(stats.id, self.worth(stats, stats.frequency, num_requests))

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        self._set(lower.id, self.rank(stats, 0.0))

    def on_shadow_evicted(self, rank: float) -> None:
        self._clock_s = max(self._clock_s, math.exp(rank))

    def rank(self, stats: NodeStats, clock: float) -> float:
        return self._ranks[stats.id] if stats.frequency else _NO_USES

    def worth(self, stats: NodeStats, uses: float, num_requests: int) -> float:
        return math.log(max(self._clock_s + uses * self._cost_s(stats.num_tokens), _LEAST))

    def _set(self, node_id: int, rank: float) -> None:
        num_missing = node_id + 1 - len(self._ranks)
        if num_missing > 0:
            self._ranks.extend([0.0] * (num_missing + _IDS_AHEAD))
        self._ranks[node_id] = rank
