"""Belady's rule: a bound for replacement policies, which knows the future."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import ClassVar, NamedTuple

from ragcache_core.policy import NodeStats, ReplacementPolicy


class Foreseen(NamedTuple):
    """The future uses of a request.

    Attributes:
        steps: the parts of its path from the root down, its answer last: what names each with all before it, and the
            tokens up to its end.
        marks: names of all prefixes that it uses, which steps of earlier requests may have.
    """

    steps: Sequence[tuple[Hashable, int]]
    marks: Collection[Hashable]


class BeladyPolicy(ReplacementPolicy):
    """Evicts the node with the latest next use, by the next request whose prompt begins with the node's prefix.

    With blocks of one size in one tier this is Belady's rule. It is a bound in practice, not in theory: a prefix stays
    as long as what depends on it, what was computed always enters the GPU, and blocks in two tiers take memory twice.
    Requests that overtake each other come in another order than was foreseen.
    """

    name = "belady"
    uses_clock: ClassVar[bool] = False

    def __init__(self, requests: Iterable[Foreseen]) -> None:
        """Take the future requests.

        Args:
            requests: in the order of the trace.
        """
        foreseen = list(requests)
        self._ends = [[end for _, end in request.steps] for request in foreseen]
        self._next_uses = next_uses(foreseen)
        self._number = 0
        self._step = self._end = 0
        self._next_of: list[float] = []

    def begin(self, number: int) -> None:
        """Record that request ``number`` of the trace is served; its prefix is accessed next, from the root down."""
        self._number = number
        self._step = self._end = 0

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        ends = self._ends[self._number]
        self._end += stats.num_tokens
        while ends[self._step] < self._end:  # a node is a step or a part of one
            self._step += 1
        self._set(stats, self._next_uses[self._number][self._step])

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        """Do nothing, as the future is known."""

    def on_arrival(self, stats: NodeStats) -> None:
        if not stats.frequency:  # a part of an answer
            self._set(stats, self._next_uses[self._number][-1])

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:
        self._set(lower, self.next_use(stats))

    def rank(self, stats: NodeStats, clock: float) -> float:
        return -self.next_use(stats)

    def next_use(self, stats: NodeStats) -> float:
        """Return the number of the next request that uses a node; infinite if there is none."""
        return self._next_of[stats.id] if stats.id < len(self._next_of) else math.inf

    def _set(self, stats: NodeStats, next_use: float) -> None:
        self._next_of.extend([math.inf] * (stats.id + 1 - len(self._next_of)))
        self._next_of[stats.id] = next_use


def next_uses(requests: Sequence[Foreseen]) -> list[list[float]]:
    """Return, for each step of each request, the number of its next user; infinite if there is none."""
    following: dict[Hashable, int] = {}
    found: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        found.append([following.get(key, math.inf) for key, _ in requests[number].steps])
        following.update(dict.fromkeys(requests[number].marks, number))
    return found[::-1]
