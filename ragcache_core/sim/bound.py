"""What could be reached at best: a policy that knows when every order of documents comes again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ragcache_core.policy import NodeStats, ReplacementPolicy
from ragcache_core.sim.trace import Trace

_BUCKETS_PER_DOUBLING = 8


class BeladyPolicy(ReplacementPolicy):
    """Gives up what is farthest away, weighed by its size: distance x size, Belady's rule for documents of many sizes.

    A node's distance is that to the next request whose documents begin with its path, in requests of the trace; what
    never comes again goes first. That is a bound in practice and not in theory: with sizes the optimum is NP-hard, and
    what was just computed always enters the GPU, as Algorithm 1 has it. Requests that overtake each other come in
    another order than was foreseen.

    Within sizes that differ by less than 9 % the order is that of the distance alone, which time does not change.
    """

    name = "belady"
    uses_clock: ClassVar[bool] = False

    def __init__(self, trace: Trace) -> None:
        """Learn the future from ``trace``, whose documents stand in the order in which prompts show them."""
        self._first = trace.first
        self._next_uses = next_uses(trace)
        self._number = 0
        self._at = 0
        self._next_of: list[float] = []

    def begin(self, number: int) -> None:
        """Take note that request ``number`` of the trace is served; its path is accessed next, from the root down."""
        self._number = number
        self._at = int(self._first[number])

    def on_access(self, stats: NodeStats, num_requests: int) -> None:
        if stats.id >= len(self._next_of):
            self._next_of.extend([math.inf] * (stats.id + 1 - len(self._next_of)))
        self._next_of[stats.id] = float(self._next_uses[self._at])
        self._at += 1

    def rank(self, stats: NodeStats, clock: float) -> float:
        return -self._next_of[stats.id] if stats.id < len(self._next_of) else 0.0

    def bucket(self, stats: NodeStats) -> int:
        return round(math.log2(stats.num_tokens) * _BUCKETS_PER_DOUBLING) if stats.num_tokens else 0

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        return -max(self._next_of[stats.id] - self._number, 1.0) * stats.num_tokens


def next_uses(trace: Trace) -> npt.NDArray[np.float64]:
    """Return, for each retrieved document, the number of the next request that shows the same path up to it.

    Infinite where none does. Shape [documents retrieved], as ``trace.docs``; O(n log n).
    """
    counts = np.diff(trace.first)
    request_of = np.repeat(np.arange(len(trace)), counts)
    depth_of = np.arange(len(trace.docs)) - np.repeat(trace.first[:-1], counts)
    _, units = np.unique(np.stack([trace.docs, trace.doc_tokens]), axis=1, return_inverse=True)
    units = units.reshape(-1).astype(np.int64)
    result = np.full(len(trace.docs), np.inf)
    paths = np.zeros(len(trace), np.int64)  # of each request, up to the depth before
    for depth in range(int(counts.max(initial=0))):
        at = np.flatnonzero(depth_of == depth)
        requests = request_of[at]
        _, path = np.unique(paths[requests] * (int(units.max()) + 1) + units[at], return_inverse=True)
        paths[requests] = path
        order = np.argsort(path, kind="stable")
        is_same = path[order][1:] == path[order][:-1]
        result[at[order[:-1][is_same]]] = requests[order[1:][is_same]]
    return result


def in_canonical_order(trace: Trace) -> Trace:
    """Return the same requests with their documents sorted by id."""
    rank_of = np.empty(len(trace.doc_ids), np.int64)
    rank_of[np.argsort(np.array(trace.doc_ids, dtype=object), kind="stable")] = np.arange(len(trace.doc_ids))
    request_of = np.repeat(np.arange(len(trace)), np.diff(trace.first))
    order = np.lexsort((rank_of[trace.docs], request_of))
    return replace(trace, docs=trace.docs[order], doc_tokens=trace.doc_tokens[order])
