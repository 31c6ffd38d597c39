"""Several memories for frequency, and the one that saves most at the moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

from ragcache_core.errors import ConfigError
from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.candidate import CandidatePolicy, DecayedFrequencyPolicy, SelfClockedGDSFPolicy
from ragcache_core.policy.prefill_cost import PrefillCost
from ragcache_core.policy.returning import NUM_KINDS, NextTurnModel

_LOAD_SPEEDUP: Final = 16.0
"""How many times faster a token's KV is loaded than computed. What counts is the order of magnitude: 16 and any more
gave the same in simulation."""
_QUESTION_TOKENS: Final = 32
"""Of a prompt that are computed in any case. Profiles measure no fewer; with formulas how many does not matter."""
_THINK_TIMES: Final = 2.0
"""In which a conversation's history counts half; 1 to 3 gave nearly the same on a production trace."""
_REMEMBERED: Final = 0.8
"""Of what was saved in earlier windows, with every window that follows. With less, noise decides where hits are few."""
_LEAST_SHARE: Final = 0.01
"""Of a prefill's time per token, what a token costs at least: measured times are noisy, and no document is for
nothing."""


class TournamentPolicy(ReplacementPolicy):
    """The candidate that would have saved most tokens lately decides.

    Popularity that stands still wants a long memory, popularity that drifts a short one, and no fixed choice is safe.
    The tree runs one shadow, metadata only, for each of the :attr:`candidates` (``tree/shadow.py``), and tells every
    ``window`` requests how many tokens each of them saved; the best one is adopted. A shadow must be better by
    ``margin`` to replace the one that rules, because a change of order costs time.

    The candidates of ``costless_half_lives`` do not weigh costs: where prompts are long, the costs of their last tokens
    outweigh that those seldom come back. An endless half-life is LFU. The last candidate is GDSF: large caches, which
    give up little, do best with its clock and its liking for short documents. It runs where ``prefill_cost`` is given.

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
        half_lives: Sequence[float] = (200.0, 800.0, 8000.0),
        costless_half_lives: Sequence[float] = (800.0, 1e9),
        window: int = 250,
        margin: float = 0.002,
        prefill_cost: PrefillCost | None = None,
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
        self.candidates: tuple[CandidatePolicy, ...] = (
            *(DecayedFrequencyPolicy(half_life) for half_life in half_lives),
            *(DecayedFrequencyPolicy(half_life, weighs_cost=False) for half_life in costless_half_lives),
            *([] if prefill_cost is None else [SelfClockedGDSFPolicy(prefill_cost)]),
        )
        self.ruling = len(half_lives) // 2
        self.returning = NextTurnModel()
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
        half_life = _THINK_TIMES * self.returning.think_requests
        fading = 2.0 ** (-(num_requests - stats.last_request) / half_life)
        uses = self.returning.expected_turns(stats.turn) * fading
        discount = stats.last_request - rank
        return self.candidates[self.ruling].worth(stats, uses, num_requests) - discount

    def adopt(self, saved_tokens: Sequence[int]) -> bool:
        """Record what each candidate saved in the last window, and return whether the active policy changes.

        Windows count less for every window that follows them.
        """
        self._savings = [_REMEMBERED * old + new for old, new in zip(self._savings, saved_tokens, strict=True)]
        best = max(range(len(self._savings)), key=self._savings.__getitem__)
        if self._savings[best] <= self._savings[self.ruling] * (1.0 + self._margin):
            return False
        self.ruling = best
        return True
