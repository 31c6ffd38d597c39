"""The default policy: the expected access rate of a node, learned from its accesses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import ClassVar, Final

from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.prefill_cost import PrefillCost
from ragcache_core.policy.returning import NextTurnModel
from ragcache_core.types import DocId

_HALF_LIVES: Final = (50.0, 800.0, math.inf)
"""Requests after which a use counts half, of each memory."""
_START: Final = (0.1, 0.1, 0.8)
"""The factors of the memories before any use was seen; their sum is 1."""
_START_TOKENS: Final = 10.0
"""The weight of these, in mean requests' tokens."""
_LEARNING_RATE: Final = 0.02
"""Share of the learned weights that each request replaces."""
_SHRINKAGE: Final = 40.0
"""The weight of the factors of all nodes in those of one class, in mean requests' tokens."""
_PRIOR_USES: Final = 3.0
"""The weight of a document's popularity on other prefixes, in uses, where each new path shows a known document."""
_KNOWN_RATE: Final = 0.001
_SIZE_RATE: Final = 0.01
_ONCE, _OFTEN, _UNSEEN = 0, 1, 2
_CLASSES: Final = (_ONCE, _OFTEN)
_RANK_AGES: Final = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Up to the age at which all memories but the longest have forgotten a use; bins of think times begin there."""
_FEWER_RANK_AGES: Final = _RANK_AGES[::2]
"""For traffic in which conversations are not likely to continue."""
_LOAD_SPEEDUP: Final = 16.0
"""How many times faster a token's KV is loaded than computed; 16 and more gave the same in simulation."""
_QUESTION_TOKENS: Final = 32
"""Tokens of a prompt that are computed in any case. Profiles measure no fewer."""
_LEAST_COST_SHARE: Final = 0.01
"""The least cost of a token, as a share of its prefill's time per token: measured times are noisy."""
_LEAST_RATE: Final = 1e-300
_IDS_AHEAD: Final = 64


class MixturePolicy(ReplacementPolicy):
    """Ranks a node by its expected accesses per request, a mixture of frequencies with different half-lives.

    ::

        rate(n)  = sum over memories i of  a[class of n][i] * w_i(n) / N_i
        w_i      : uses of n that halve every 50, 800 or infinitely many requests; N_i: the same sum over all requests
        a        : how far each memory is trusted; learned, one set for nodes used once and one for the others
        rank(n)  = log(rate * prior)
        prior    : (u + k q) (u_p / (u_p + k)) / u, with the uses u of n and u_p of its parent, and the share q of
                   requests with the document of n on any prefix; 1 for first documents

    Stationary popularity needs a long memory, drifting popularity a short one. The factors ``a`` are learned by online
    expectation maximisation of a Poisson rate: each use credits the memories by their part in the node's rate. The
    prior adds the popularity of the last document, for which a prefix alone is too rare. ``k`` decreases to 0 if new
    prefixes have new documents.

    Ranks are of ``rate * N_inf``: the order is the same, and a node that has just been used does not rank lower than an
    equal one that was ranked some requests ago.

    A conversation's history ranks by the highest rate at which its next turn is expected from now on
    (:class:`~ragcache_core.policy.returning.NextTurnModel`). A document that was used once may belong to a first turn,
    whose rate is added.

    A node that slower tiers hold as well ranks lower: it would be loaded and not computed. So two tiers hold different
    documents, and a full host tier takes in only nodes that rank above those that it would evict.
    """

    name = "mixture"
    is_selective: ClassVar[bool] = True
    copy_discount: ClassVar[float] = math.log(_LOAD_SPEEDUP)  # ranks are logarithms

    def __init__(self) -> None:
        self.returning = NextTurnModel()
        self._fadings = [math.log(2.0) / half_life for half_life in _HALF_LIVES]
        self._uses = [array("d") for _ in _HALF_LIVES]
        self._classes = bytearray()
        self._last = array("q")
        self._tokens = array("q")
        self._observed = [[_START_TOKENS * factor for factor in _START] for _ in _CLASSES]
        self._expected = [[_START_TOKENS] * len(_START) for _ in _CLASSES]
        self._mass = [[0.0] * len(_START) for _ in _CLASSES]
        self._norms = [1.0] * len(_START)
        self._weights = [list(_START) for _ in _CLASSES]
        self._now = 0
        self._num_earlier = 0
        self._request_tokens = 0
        self._mean_tokens = 10_000.0
        self._document_uses: dict[DocId, int] = {}
        self._known_share = 0.5

    @property
    def rank_ages(self) -> Sequence[int]:
        return _RANK_AGES if self.returning.is_likely(1) else _FEWER_RANK_AGES

    def cost_per_token_s(self, prefill_cost: PrefillCost, num_cached_tokens: int, num_new_tokens: int) -> float:
        """Return the seconds that each new token adds to the prefill of a short question.

        Eq. 3 charges documents with the fixed time of a step as well, and so the more the shorter the prompts are. A
        hit does not save that time.
        """
        if num_new_tokens <= 0:
            return 0.0
        whole_s = prefill_cost.estimate_s(num_cached_tokens, num_new_tokens + _QUESTION_TOKENS)
        saved_s = whole_s - prefill_cost.estimate_s(num_cached_tokens + num_new_tokens, _QUESTION_TOKENS)
        return max(saved_s, _LEAST_COST_SHARE * whole_s) / num_new_tokens

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        if num_requests != self._now:
            self._learn(num_requests)
        self._request_tokens += stats.num_tokens
        if (doc_id := stats.doc_id) is not None:
            uses = self._document_uses.get(doc_id, 0)
            self._document_uses[doc_id] = uses + 1
            if stats.frequency == 1:
                self._known_share += _KNOWN_RATE * ((uses > 0) - self._known_share)
        faded = self._take(stats)
        if stats.frequency > 1:
            self._credit(stats, faded)
        else:
            faded = [0.0] * len(faded)
        self._put(stats, [uses + 1.0 for uses in faded])

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        if num_requests > self._now:
            self._learn(num_requests)
        self._num_earlier = max(self._num_earlier, stats.frequency)  # there were at least as many requests
        uses = self._take(stats)
        self._put(stats, [*(max(each, 1.0) for each in uses[:-1]), float(stats.frequency)])

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        self._make_room(lower.id)
        if stats.id >= len(self._classes) or self._classes[stats.id] == _UNSEEN:
            self._classes[lower.id] = _UNSEEN
            return
        for uses in self._uses:
            uses[lower.id] = uses[stats.id]
        self._classes[lower.id], self._last[lower.id] = self._classes[stats.id], self._last[stats.id]
        if self._tokens[stats.id]:
            self._tokens[stats.id], self._tokens[lower.id] = stats.num_tokens, lower.num_tokens
        else:  # a conversation's history, which is in no class's mass
            self._tokens[lower.id] = 0

    def on_removed(self, stats: NodeStats) -> None:
        self._take(stats)
        self._classes[stats.id] = _UNSEEN

    def on_document_removed(self, doc_id: DocId) -> None:
        self._document_uses.pop(doc_id, None)

    def rank(self, stats: NodeStats, clock: float) -> float:
        node_id, uses = stats.id, stats.frequency
        if stats.turn:
            return float(stats.last_request)
        if not uses or node_id >= len(self._classes) or (kind := self._classes[node_id]) == _UNSEEN:
            return math.log(_LEAST_RATE)
        age = self._now - self._last[node_id]
        short, long, whole = self._uses
        fading_short, fading_long, _ = self._fadings
        of_short, of_long, of_whole = self._weights[kind]
        rate = (
            of_short * short[node_id] * math.exp(-age * fading_short)
            + of_long * long[node_id] * math.exp(-age * fading_long)
            + of_whole * whole[node_id]
        )
        parent = stats.parent
        if stats.doc_id is not None and parent is not None and parent.parent is not None:
            k, uses_above = _PRIOR_USES * self._known_share, parent.frequency
            share = self._document_uses.get(stats.doc_id, 0) / (self._now + self._num_earlier or 1)
            rate *= (uses + k * share) * uses_above / ((uses_above + k) * uses)
        if uses == 1 and stats.doc_id is not None:  # a first turn's, whose conversation may continue
            rate += self.returning.rate(stats.turn_kind or 1, age) * self._norms[-1]
        return math.log(rate if rate > _LEAST_RATE else _LEAST_RATE)

    def bucket(self, stats: NodeStats) -> int:
        return -stats.turn_kind if stats.turn else 0

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        """Return the rank; for a conversation's history, the highest expected rate of its next turn."""
        if not stats.turn:
            return rank
        rate = self.returning.rate(stats.turn_kind, num_requests - stats.last_request) * self._norms[-1]
        discount = stats.last_request - rank
        return math.log(max(rate, _LEAST_RATE)) - discount

    def _learn(self, num_requests: int) -> None:
        """Update the weights for a new request."""
        num_steps, self._now = num_requests - self._now, num_requests
        if self._request_tokens:
            self._mean_tokens += _SIZE_RATE * (self._request_tokens - self._mean_tokens)
            self._request_tokens = 0
        before = max(num_requests + self._num_earlier - 1, 1)
        self._norms = [
            max((1.0 - math.exp(-fading * before)) / fading, 1.0) if fading else float(before)
            for fading in self._fadings
        ]
        kept = (1.0 - _LEARNING_RATE) ** num_steps
        decays = [math.exp(-fading * num_steps) for fading in self._fadings]
        per_token = [1.0 / (norm * self._mean_tokens) for norm in self._norms]
        for observed, expected, mass in zip(self._observed, self._expected, self._mass, strict=True):
            for i in range(len(_START)):
                mass[i] *= decays[i]
                expected[i] = expected[i] * kept + mass[i] * per_token[i]
                observed[i] *= kept
        means = [
            (sum(observed[i] for observed in self._observed) + 0.1 * _START[i])
            / (sum(expected[i] for expected in self._expected) + 0.1)
            for i in range(len(_START))
        ]
        whole = self._norms[-1]
        self._weights = [
            [
                (observed[i] + _SHRINKAGE * means[i]) / (expected[i] + _SHRINKAGE) * whole / self._norms[i]
                for i in range(len(_START))
            ]
            for observed, expected in zip(self._observed, self._expected, strict=True)
        ]

    def _credit(self, stats: NodeStats, faded: list[float]) -> None:
        """Credit each half-life with its part of an accessed node's rate."""
        if (kind := self._classes[stats.id]) == _UNSEEN or stats.turn:
            return
        parts = [weight * uses for weight, uses in zip(self._weights[kind], faded, strict=True)]
        if (total := sum(parts)) > 0.0:
            credit, observed = stats.num_tokens / self._mean_tokens / total, self._observed[kind]
            for i, part in enumerate(parts):
                observed[i] += credit * part

    def _take(self, stats: NodeStats) -> list[float]:
        """Subtract a node from its class's mass, and return its decayed access counts."""
        node_id = stats.id
        self._make_room(node_id)
        if (kind := self._classes[node_id]) == _UNSEEN:
            return [0.0] * len(self._uses)
        age, tokens, mass = self._now - self._last[node_id], self._tokens[node_id], self._mass[kind]
        faded = [
            uses[node_id] * math.exp(-age * fading) for uses, fading in zip(self._uses, self._fadings, strict=True)
        ]
        for i, uses in enumerate(faded):
            mass[i] = max(mass[i] - tokens * uses, 0.0)
        return faded

    def _put(self, stats: NodeStats, faded: list[float]) -> None:
        """Set a node's decayed access counts, and add them to its class's mass."""
        node_id, tokens = stats.id, 0 if stats.turn else stats.num_tokens
        kind = self._classes[node_id] = _OFTEN if stats.frequency > 1 else _ONCE
        self._last[node_id], self._tokens[node_id] = self._now, tokens
        mass = self._mass[kind]
        for i, uses in enumerate(faded):
            self._uses[i][node_id] = uses
            mass[i] += tokens * uses

    def _make_room(self, node_id: int) -> None:
        num_missing = node_id + 1 - len(self._classes)
        if num_missing > 0:
            num_missing += _IDS_AHEAD
            self._classes.extend(bytes([_UNSEEN]) * num_missing)
            self._last.extend([0] * num_missing)
            self._tokens.extend([0] * num_missing)
            for uses in self._uses:
                uses.extend([0.0] * num_missing)
