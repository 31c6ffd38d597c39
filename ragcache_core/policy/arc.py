"""ARC: recency and frequency, each with as much of the cache as its ghosts say."""

from __future__ import annotations

from typing import Final

from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.token_queue import TokenQueue

_BEHIND: Final = 1e15
"""More than any number of requests: separates the scores of the list that is evicted first from the other's."""
_ONCE, _OFTEN = 0, 1


class ARCPolicy(ReplacementPolicy):
    """Adaptive Replacement Cache (Megiddo and Modha, FAST 2003, Figure 4).

    T1 has what was used once lately, T2 what was used again, both with the longest unused first; B1 and B2 are the
    ghosts of what left them. A use of a ghost of B1 raises p, the tokens that T1 may have, one of B2 lowers it.

    Adapted to a tree: sizes are tokens, the lists are those of all tiers together, only leaves go, and the capacity c
    is the most that was ever held.
    """

    name = "arc"

    def __init__(self) -> None:
        self._once, self._often = TokenQueue(), TokenQueue()
        self._once_ghosts, self._often_ghosts = TokenQueue(), TokenQueue()
        self._target_tokens = 0.0
        self._capacity_tokens = 0

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        if stats.frequency > 1 and (num_tokens := self._once.take(stats.id)) is not None:
            self._often.put(stats.id, num_tokens)
        elif stats.frequency == 1:  # of what was put here before anybody asked for it this is the first use
            self._once_ghosts.take(stats.id)
            self._often_ghosts.take(stats.id)

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        """Let what storage or a forecast knows of be as a ghost of T2: it was used again before."""
        if (num_tokens := self._once.take(stats.id)) is not None:
            self._often.put(stats.id, num_tokens)
        elif stats.id not in self._often:
            self._once_ghosts.take(stats.id)
            self._often_ghosts.put(stats.id, stats.num_tokens)

    def on_arrival(self, stats: NodeStats) -> None:
        num_tokens = stats.num_tokens
        num_once, num_often = max(self._once_ghosts.num_tokens, 1), max(self._often_ghosts.num_tokens, 1)
        if self._once_ghosts.take(stats.id) is not None:
            step = max(num_often / num_once, 1.0) * num_tokens
            self._target_tokens = min(self._target_tokens + step, float(self._capacity_tokens))
            self._often.put(stats.id, num_tokens)
        elif self._often_ghosts.take(stats.id) is not None:
            step = max(num_once / num_often, 1.0) * num_tokens
            self._target_tokens = max(self._target_tokens - step, 0.0)
            self._often.put(stats.id, num_tokens)
        else:
            self._once.put(stats.id, num_tokens)
        self._capacity_tokens = max(self._capacity_tokens, self._once.num_tokens + self._often.num_tokens)

    def on_departure(self, stats: NodeStats) -> None:
        if self._once.take(stats.id) is not None:
            self._once_ghosts.put(stats.id, stats.num_tokens)
        elif self._often.take(stats.id) is not None:
            self._often_ghosts.put(stats.id, stats.num_tokens)
        self._once_ghosts.shorten(self._capacity_tokens - self._once.num_tokens)
        num_held = self._once.num_tokens + self._often.num_tokens + self._once_ghosts.num_tokens
        self._often_ghosts.shorten(2 * self._capacity_tokens - num_held)

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        for queue in (self._once, self._often):
            if stats.id in queue:
                queue.put(stats.id, stats.num_tokens)
                queue.put(lower.id, lower.num_tokens)

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)

    def bucket(self, stats: NodeStats) -> int:
        return _OFTEN if stats.id in self._often else _ONCE

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        if stats.id in self._often:
            return rank + _BEHIND
        is_once_first = self._once.num_tokens >= self._target_tokens
        return rank if is_once_first else rank + 2 * _BEHIND
