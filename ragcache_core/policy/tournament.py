"""Several memories for frequency, and the one that saves most at the moment."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import ClassVar, Final

from ragcache_core.errors import ConfigError
from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.prefill_cost import PrefillCost
from ragcache_core.policy.returning import NUM_KINDS, ReturningTurns

_LEAST: Final = 1e-12
_IDS_AHEAD: Final = 64
_LOAD_SPEEDUP: Final = 16.0
"""How many times faster a token's KV is loaded than computed. What counts is the order of magnitude: 16 and any more
gave the same in simulation."""
_QUESTION_TOKENS: Final = 32
"""Of a prompt that are computed in any case. Profiles measure no fewer; with formulas how many does not matter."""
_THINK_TIMES: Final = 2.0
"""In which a conversation's history counts half; 1 to 3 gave nearly the same on a production trace."""
_LEAST_SHARE: Final = 0.01
"""Of a prefill's time per token, what a token costs at least: measured times are noisy, and no document is for
nothing."""


class DecayedFrequencyPolicy(ReplacementPolicy):
    """Cost / Size x a frequency that halves every ``half_life`` requests: Eq. 1 of RAGCache with decay for a clock.

    All frequencies fade at the same pace, so in logarithms an access is worth more by log(2) / half_life for every
    request that it is younger: the rank stands until the next access, and no clock is needed.

    Without ``weighs_cost`` all tokens cost the same: of long prompts the last ones cost the most to compute, and come
    back the least.
    """

    name = "decayed"

    def __init__(self, half_life: float, *, weighs_cost: bool = True) -> None:
        self._weighs_cost = weighs_cost
        self.decay = math.log(2.0) / half_life
        self._weights = array("d")

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        self.on_access(stats, num_requests)
        self._weights[stats.id] = float(stats.frequency)

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        weights = self._weights
        self._make_room(stats.id)
        age = num_requests - stats.last_request
        weights[stats.id] = 1.0 if stats.frequency == 1 else weights[stats.id] * math.exp(-age * self.decay) + 1.0

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        self._make_room(lower.id)
        self._weights[lower.id] = self._weights[stats.id] if stats.id < len(self._weights) else 0.0

    def rank(self, stats: NodeStats, clock: float) -> float:
        weight = self._weights[stats.id] if stats.id < len(self._weights) else 0.0
        return math.log((weight if weight > _LEAST else _LEAST) * self.cost(stats)) + stats.last_request * self.decay

    def cost(self, stats: NodeStats) -> float:
        """Return what a token counts for in a rank: seconds, or 1."""
        if not self._weighs_cost:
            return 1.0
        cost_s = stats.total_cost_s / stats.num_computed if stats.num_computed else 0.0  # avg_cost_s, without the call
        return cost_s if cost_s > _LEAST else _LEAST

    def _make_room(self, node_id: int) -> None:
        num_missing = node_id + 1 - len(self._weights)
        if num_missing > 0:
            self._weights.extend([0.0] * (num_missing + _IDS_AHEAD))


class TournamentPolicy(ReplacementPolicy):
    """The candidate that would have saved most tokens lately decides.

    Popularity that stands still wants a long memory, popularity that drifts a short one, and no fixed choice is safe.
    The tree runs one shadow, metadata only, for each of the :attr:`candidates` (``tree/shadow.py``), and tells every
    ``window`` requests how many tokens each of them saved; the best one is adopted. A shadow must be better by
    ``margin`` to replace the one that rules, because a change of order costs time.

    The candidates of ``costless_half_lives`` do not weigh costs: where prompts are long, the costs of their last tokens
    outweigh that those seldom come back. An endless half-life is LFU.

    The cost is what a hit saves, which is less than Eq. 3's: :meth:`cost_per_token_s`.

    What lies in a slower tier as well goes first, unless it is worth far more: its copy would be loaded. So two tiers
    hold different documents rather than the same ones twice. And host memory is not given away to what is worth less
    than what it holds.

    Raises:
        ConfigError: fewer than two half-lives, or a setting that is not positive.
    """

    name = "tournament"
    is_selective: ClassVar[bool] = True
    copy_discount: ClassVar[float] = math.log(_LOAD_SPEEDUP)  # ranks are logarithms

    def __init__(
        self,
        half_lives: Sequence[float] = (60.0, 200.0, 800.0, 8000.0),
        costless_half_lives: Sequence[float] = (800.0, 1e9),
        window: int = 250,
        margin: float = 0.01,
    ) -> None:
        if len(half_lives) < 2 or not all(h > 0.0 for h in half_lives):
            raise ConfigError(
                f"half_lives are {tuple(half_lives)!r}; at least two positive numbers of requests are needed"
            )
        if window < 1 or not 0.0 <= margin < 1.0:
            raise ConfigError(
                f"window is {window!r} and margin {margin!r}; a window of requests and a share are needed"
            )
        self.window = window
        self.candidates = (
            *(DecayedFrequencyPolicy(half_life) for half_life in half_lives),
            *(DecayedFrequencyPolicy(half_life, weighs_cost=False) for half_life in costless_half_lives),
        )
        self.ruling = len(half_lives) // 2
        self.returning = ReturningTurns()
        self._margin = margin
        self._savings = [0.0] * len(self.candidates)

    def cost_per_token_s(self, prefill_cost: PrefillCost, num_cached_tokens: int, num_new_tokens: int) -> float:
        """Return what each new token adds to a prefill that computes a short question in any case.

        Eq. 3 charges documents with the time that a step takes whatever it computes, and so the more the shorter the
        prompts are and the less of one was missed. A hit does not save that time.
        """
        if num_new_tokens <= 0:
            return 0.0
        whole_s = prefill_cost.estimate_s(num_cached_tokens, num_new_tokens + _QUESTION_TOKENS)
        saved_s = whole_s - prefill_cost.estimate_s(num_cached_tokens + num_new_tokens, _QUESTION_TOKENS)
        return max(saved_s, _LEAST_SHARE * whole_s) / num_new_tokens

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        for candidate in self.candidates:
            candidate.on_access(stats, num_requests)

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        for candidate in self.candidates:
            candidate.on_restore(stats, num_requests)

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        for candidate in self.candidates:
            candidate.on_split(stats, lower)

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request) if stats.turn else self.candidates[self.ruling].rank(stats, clock)

    def bucket(self, stats: NodeStats) -> int:
        return min(stats.turn, NUM_KINDS)

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        """Return what an access so long ago is worth, in the ruling candidate's measure.

        Of a conversation it counts as often as turns are expected of it, and half in two think times.
        """
        if not stats.turn:
            return rank
        ruling = self.candidates[self.ruling]
        worth = max(self.returning.expected_turns(stats.turn), _LEAST) * ruling.cost(stats)
        half_life = _THINK_TIMES * self.returning.think_requests
        fading = (num_requests - stats.last_request) * math.log(2.0) / half_life
        discount = stats.last_request - rank
        return math.log(worth) - fading - discount + num_requests * ruling.decay

    def adopt(self, saved_tokens: Sequence[int]) -> bool:
        """Take note of what each candidate saved in the last window, and return whether another one rules now.

        Windows count half as much for every window that follows them.
        """
        self._savings = [0.5 * old + new for old, new in zip(self._savings, saved_tokens, strict=True)]
        best = max(range(len(self._savings)), key=self._savings.__getitem__)
        if self._savings[best] <= self._savings[self.ruling] * (1.0 + self._margin):
            return False
        self.ruling = best
        return True
