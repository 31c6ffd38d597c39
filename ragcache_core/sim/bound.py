"""What could be reached at best: a policy that knows when every order of documents comes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from ragcache_core.policy import NodeStats, ReplacementPolicy
from ragcache_core.sim.options import BELADY, INFINITE
from ragcache_core.sim.traces.trace import Trace

if TYPE_CHECKING:
    from ragcache_core.sim.sweep import FinishedRun

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


def above_belady(runs: Sequence[FinishedRun]) -> list[str]:
    """Return why a policy of ``runs`` came out better than belady with the same trace and capacities, where one did.

    A sentence for each way in which that can be, with the run where it shows most.
    """
    bounds = {(*_place(run), run.options["order"]): run for run in runs if run.options["policy"] == BELADY}
    hits, seconds, orders = [], [], []
    for run in runs:
        if run.options["policy"] in (BELADY, INFINITE):
            continue
        if (bound := bounds.get((*_place(run), run.options["order"]))) is not None:
            if (more := run.summary["token_hit_rate"] - bound.summary["token_hit_rate"]) > 0:
                hits.append((more, run, bound))
            elif (less_s := bound.summary["mean_ttft_s"] - run.summary["mean_ttft_s"]) > 0:
                seconds.append((less_s, run, bound))
        others = [bound for (*place, _), bound in bounds.items() if tuple(place) == _place(run)]
        best = max(others, key=lambda bound: float(bound.summary["token_hit_rate"]), default=None)
        if best is None or best.options["order"] == run.options["order"]:
            continue
        if (more := run.summary["token_hit_rate"] - best.summary["token_hit_rate"]) > 0:
            orders.append((more, run, best))
    reasons = (
        (
            hits,
            "token_hit_rate",
            "belady is no bound here: its rule, to evict what is farthest away times its size, hits most where all "
            "documents have one size and lie in one tier. With many sizes the best choice is NP-hard, a document stays "
            "as long as one behind it does, and what was just computed always enters the GPU",
        ),
        (
            seconds,
            "mean_ttft_s",
            "belady hits no fewer tokens and is slower: it looks at when documents come again, and not at what they "
            "cost to compute or to load, nor at who waits meanwhile",
        ),
        (
            orders,
            "token_hit_rate",
            "belady bounds nothing but its own order of documents: another order makes other prefixes, of which more "
            "come again",
        ),
    )
    found = []
    for above, key, why in reasons:
        if above:
            _, run, bound = max(above, key=lambda each: each[0])
            overtaken = run.options["queue"] != "fifo" and above is not orders
            found.append(
                f"{_named(run)} came out better than {_named(bound)} ({key} {run.summary[key]:.3f} against "
                f"{bound.summary[key]:.3f}; {Path(run.trace).name}, GPU {run.options['gpu_tokens']:,}, host "
                f"{run.options['host_tokens']:,}): {why}"
                + ("; and requests that overtake each other come in another order than it foresaw" if overtaken else "")
            )
    return found


def _place(run: FinishedRun) -> tuple[object, ...]:
    return run.trace, *(run.options[f"{tier}_tokens"] for tier in ("gpu", "host", "disk"))


def _named(run: FinishedRun) -> str:
    return f"{run.options['policy']} with order {run.options['order']}"


def in_canonical_order(trace: Trace) -> Trace:
    """Return the same requests with their documents sorted by id."""
    rank_of = np.empty(len(trace.doc_ids), np.int64)
    rank_of[np.argsort(np.array(trace.doc_ids, dtype=object), kind="stable")] = np.arange(len(trace.doc_ids))
    request_of = np.repeat(np.arange(len(trace)), np.diff(trace.first))
    order = np.lexsort((rank_of[trace.docs], request_of))
    return replace(trace, docs=trace.docs[order], doc_tokens=trace.doc_tokens[order])
