"""Frequency and recency, weighed against each other."""

from __future__ import annotations

from ragcache_core.errors import ConfigError
from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class HybridPolicy(ReplacementPolicy):
    """score = alpha x frequency + (1 - alpha) x recency, both normalised (seed article 002, alpha 0.6).

    Frequency is divided by the highest one seen, recency is 1 / (1 + age). The article leaves the unit of the age
    open; ours is ``age_requests`` requests. Recency fades with time, so the order of two nodes of different frequency
    may change while they are not touched: a bucket holds the nodes of one frequency, and there the oldest is always
    first.

    Raises:
        ConfigError: alpha outside [0, 1], or an age that is not positive.
    """

    name = "hybrid"

    def __init__(self, alpha: float = 0.6, age_requests: float = 100.0) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha is {alpha!r}; it must lie in [0, 1]")
        if not age_requests > 0.0:
            raise ConfigError(f"age_requests is {age_requests!r}; it must be positive")
        self._alpha = alpha
        self._age_requests = age_requests
        self._max_frequency = 1

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        self._max_frequency = max(self._max_frequency, stats.frequency)

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)

    def bucket(self, stats: NodeStats) -> int:
        return stats.frequency

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        age = (num_requests - stats.last_request) / self._age_requests
        return self._alpha * stats.frequency / self._max_frequency + (1.0 - self._alpha) / (1.0 + age)
