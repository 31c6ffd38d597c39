"""A seeded stream of retrievals with the published statistics of real ones: skewed, clustered, drifting if asked.

Documents lie on an axis of topics. A request is about one of them, its primary, drawn by popularity; what it retrieves
are documents near by, ordered as a noisy retriever would, so that the primary mostly comes first and the same pairs
come back::

    topics   ... d17  d4  d90  d2  d33 ...
                       ^ primary d90, retrieved (d90, d4)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_REACH = 4
_BETA, _SPACING, _HUB = 3.0, 0.2, 0.3
_SESSION = 40


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What requests ask for.

    Popularity is ``(rank + shift) ** -skew``. With ``drifts``, a quarter of the most popular documents swap their
    popularity every 1,500 requests, and a quarter of the requests repeat a topic of the last 40.
    """

    num_documents: int
    skew: float
    shift: float
    documents_per_request: int = 2
    mean_tokens: float = 1900.0
    sigma: float = 0.7
    least_tokens: int = 64
    most_tokens: int = 16_384
    drifts: bool = False
    drift_every: int = 1_500
    num_drifting: int = 3_000


class RetrievalTrace:
    """Document lengths, and an endless stream of what requests retrieve; the same for the same seed."""

    def __init__(self, options: TraceOptions, seed: int) -> None:
        self._options = options
        self._rng = np.random.default_rng(seed)
        count = options.num_documents
        mu = np.log(options.mean_tokens) - options.sigma**2 / 2
        lengths = self._rng.lognormal(mu, options.sigma, count)
        self.num_tokens: list[int] = np.clip(lengths, options.least_tokens, options.most_tokens).astype(int).tolist()
        weights = (np.arange(count) + 1 + options.shift) ** -options.skew
        self._by_rank = self._rng.permutation(count)  # [rank] -> document; documents lie on the axis by number
        self._popularity = np.empty(count)
        self._popularity[self._by_rank] = weights / weights.sum()
        self._cumulative = np.cumsum(self._popularity)
        self._recent: deque[int] = deque(maxlen=_SESSION)
        offsets = np.arange(-_REACH, _REACH + 1)
        self._offsets = offsets
        self._nearness = np.exp(-_BETA * _SPACING * np.abs(offsets))

    def requests(self) -> Iterator[tuple[int, ...]]:
        """Yield the documents of one request after another, best first."""
        number = 0
        while True:
            number += 1
            if self._options.drifts and number % self._options.drift_every == 0:
                self._drift()
            primary = self._primary()
            self._recent.append(primary)
            yield self._retrieved(primary)

    def _primary(self) -> int:
        if self._options.drifts and self._recent and self._rng.random() < 0.25:
            return self._recent[int(self._rng.integers(len(self._recent)))]
        drawn = np.searchsorted(self._cumulative, self._rng.random() * self._cumulative[-1], side="right")
        return min(int(drawn), self._options.num_documents - 1)

    def _retrieved(self, primary: int) -> tuple[int, ...]:
        """Draw an order of the neighbourhood (Plackett-Luce, by Gumbel's trick) and return its head."""
        near = (primary + self._offsets) % self._options.num_documents
        worth = self._nearness * (self._popularity[near] / self._popularity[primary]) ** _HUB
        keys = np.log(worth) + self._rng.gumbel(size=len(near))
        order = near[np.argsort(-keys)[: self._options.documents_per_request]]
        return tuple(order.tolist())

    def _drift(self) -> None:
        hot: np.ndarray[Any, Any] = self._by_rank[: self._options.num_drifting]
        chosen = self._rng.choice(len(hot), size=len(hot) // 4, replace=False)
        before = hot[chosen]
        after = self._rng.permutation(before)
        self._popularity[after] = self._popularity[before].copy()
        self._by_rank[chosen] = after
        self._cumulative = np.cumsum(self._popularity)
