"""Adaptive policies with queues for recency and frequency: S3-FIFO and ARC."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ragcache_core.policy.base import NodeStats, ReplacementPolicy


class TokenQueue:
    """A FIFO queue of node ids with sizes.

    Attributes:
        num_tokens: of all of them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._sizes

    def put(self, node_id: int, num_tokens: int) -> None:
        """Append a node; one in the queue keeps its place and gets the new size."""
        self.num_tokens += num_tokens - self._sizes.get(node_id, 0)
        self._sizes[node_id] = num_tokens

    def take(self, node_id: int) -> int | None:
        """Remove a node, and return its size; ``None`` if absent."""
        num_tokens = self._sizes.pop(node_id, None)
        self.num_tokens -= num_tokens or 0
        return num_tokens

    def shorten(self, num_tokens: int) -> None:
        """Remove the first nodes while there are more than ``num_tokens`` tokens."""
        while self._sizes and self.num_tokens > num_tokens:
            self.take(next(iter(self._sizes)))


_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3
_USES_TO_STAY: Final = 2
_BEHIND: Final = 1e15
"""More than any rank: separates the scores of the queue that is evicted first from the other's."""
_SMALL, _MAIN = 0, 1


class S3FIFOPolicy(ReplacementPolicy):
    """S3-FIFO: a small, a main and a ghost queue (Yang et al., SOSP 2023, §4.1, Algorithm 1).

    A node enters the small queue, which has a tenth of the cache, unless it left it not long ago: then the main one. Of
    the small queue the first goes, whatever its uses beyond one; used twice there, it moves to the main queue. Of that
    the first goes, too, but each of its uses, up to three, sends it round once more.

    Adapted to a tree: sizes are tokens, both queues are those of all tiers together, and only leaves go, so the first
    leaf of a queue instead of its first node. The paper moves a node when it comes up in its queue; here it is placed
    where that would bring it as soon as it is used: into the main queue, or a round further behind.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        self._small, self._main, self._ghosts = TokenQueue(), TokenQueue(), TokenQueue()
        self._places: dict[int, float] = {}
        self._uses: dict[int, int] = {}
        self._num_arrived = 0
        self._hand = 0.0
        self._capacity_tokens = 0

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        node_id = stats.id
        if stats.frequency == 1:
            self._ghosts.take(node_id)
        if node_id in self._main:
            round_tokens = self._main.num_tokens
            if self._places[node_id] - self._hand <= _MOST_USES * round_tokens:
                self._places[node_id] += round_tokens
        elif node_id in self._small and stats.frequency == 1:
            self._enter_small(node_id)  # a speculative prefill put it there
        elif node_id in self._small:
            self._uses[node_id] += 1
            if self._uses[node_id] >= _USES_TO_STAY:
                self._uses.pop(node_id)
                self._enter_main(node_id, self._small.take(node_id) or 0)

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        """Treat a node known from storage or a forecast as a ghost entry."""
        if stats.id in self._small:
            self._uses.pop(stats.id)
            self._enter_main(stats.id, self._small.take(stats.id) or 0)
        elif stats.id not in self._main:
            self._ghosts.put(stats.id, stats.num_tokens)

    def on_arrival(self, stats: NodeStats) -> None:
        if self._ghosts.take(stats.id) is not None:
            self._enter_main(stats.id, stats.num_tokens)
        else:
            self._small.put(stats.id, stats.num_tokens)
            if stats.frequency:
                self._enter_small(stats.id)
            else:
                self._uses[stats.id], self._places[stats.id] = 0, 0.0
        self._capacity_tokens = max(self._capacity_tokens, self._small.num_tokens + self._main.num_tokens)

    def on_departure(self, stats: NodeStats) -> None:
        place = self._places.pop(stats.id, 0.0)
        if self._main.take(stats.id) is not None:
            self._hand = max(self._hand, place)
        elif self._small.take(stats.id) is not None:
            del self._uses[stats.id]
            self._ghosts.put(stats.id, stats.num_tokens)
            self._ghosts.shorten(round((1 - _SMALL_SHARE) * self._capacity_tokens))

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        for queue in (self._small, self._main):
            if stats.id in queue:
                queue.put(stats.id, stats.num_tokens)
                queue.put(lower.id, lower.num_tokens)
                self._places[lower.id] = self._places[stats.id]
                if queue is self._small:
                    self._uses[lower.id] = self._uses[stats.id]

    def rank(self, stats: NodeStats, clock: float) -> float:
        return self._places.get(stats.id, 0.0)

    def bucket(self, stats: NodeStats) -> int:
        return _MAIN if stats.id in self._main else _SMALL

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        if stats.id in self._main:
            return rank + _BEHIND
        is_small_first = self._small.num_tokens >= _SMALL_SHARE * (self._small.num_tokens + self._main.num_tokens)
        return rank if is_small_first else rank + 2 * _BEHIND

    def _enter_small(self, node_id: int) -> None:
        self._num_arrived += 1
        self._uses[node_id], self._places[node_id] = 0, float(self._num_arrived)

    def _enter_main(self, node_id: int, num_tokens: int) -> None:
        self._main.put(node_id, num_tokens)
        self._places[node_id] = self._hand + self._main.num_tokens


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
        self._t1, self._t2 = TokenQueue(), TokenQueue()
        self._b1, self._b2 = TokenQueue(), TokenQueue()
        self._target_tokens = 0.0
        self._capacity_tokens = 0

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        if stats.frequency > 1 and (num_tokens := self._t1.take(stats.id)) is not None:
            self._t2.put(stats.id, num_tokens)
        elif stats.frequency == 1:  # the first use of what a speculative prefill put here
            self._b1.take(stats.id)
            self._b2.take(stats.id)

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        """Treat a node known from storage or a forecast as a ghost entry of T2."""
        if (num_tokens := self._t1.take(stats.id)) is not None:
            self._t2.put(stats.id, num_tokens)
        elif stats.id not in self._t2:
            self._b1.take(stats.id)
            self._b2.put(stats.id, stats.num_tokens)

    def on_arrival(self, stats: NodeStats) -> None:
        num_tokens = stats.num_tokens
        num_once, num_often = max(self._b1.num_tokens, 1), max(self._b2.num_tokens, 1)
        if self._b1.take(stats.id) is not None:
            step = max(num_often / num_once, 1.0) * num_tokens
            self._target_tokens = min(self._target_tokens + step, float(self._capacity_tokens))
            self._t2.put(stats.id, num_tokens)
        elif self._b2.take(stats.id) is not None:
            step = max(num_once / num_often, 1.0) * num_tokens
            self._target_tokens = max(self._target_tokens - step, 0.0)
            self._t2.put(stats.id, num_tokens)
        else:
            self._t1.put(stats.id, num_tokens)
        self._capacity_tokens = max(self._capacity_tokens, self._t1.num_tokens + self._t2.num_tokens)

    def on_departure(self, stats: NodeStats) -> None:
        if self._t1.take(stats.id) is not None:
            self._b1.put(stats.id, stats.num_tokens)
        elif self._t2.take(stats.id) is not None:
            self._b2.put(stats.id, stats.num_tokens)
        self._b1.shorten(self._capacity_tokens - self._t1.num_tokens)
        num_held = self._t1.num_tokens + self._t2.num_tokens + self._b1.num_tokens
        self._b2.shorten(2 * self._capacity_tokens - num_held)

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        for queue in (self._t1, self._t2):
            if stats.id in queue:
                queue.put(stats.id, stats.num_tokens)
                queue.put(lower.id, lower.num_tokens)

    def rank(self, stats: NodeStats, clock: float) -> float:
        return float(stats.last_request)

    def bucket(self, stats: NodeStats) -> int:
        return _OFTEN if stats.id in self._t2 else _ONCE

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        if stats.id in self._t2:
            return rank + _BEHIND
        is_once_first = self._t1.num_tokens >= self._target_tokens
        return rank if is_once_first else rank + 2 * _BEHIND
