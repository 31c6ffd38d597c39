"""What the knowledge tree costs: time for each request's decisions, memory for each node.

A request is what the engine makes of it: two documents and a question of its own, some blocks of which are resident::

    insert, retain, protect | match, unprotect | hold what is there | evict for what is not | count the access | add |
    let go, release

Two readers of the tree's changes take them, as the queue and the publisher of cached prefixes do in the engine;
what those make of them is not in it.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ragcache_core.memory import collect_rarely
from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.sim.traces.workload import Workload, draw_retrievals
from ragcache_core.tree import KnowledgeTree, NodeChanges, PathSegment, TreeNode, by_node
from ragcache_core.types import Tier
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms

_BLOCK_TOKENS = 16
_DEFAULT_POLICY = "tournament"
_NUM_RUNS = 5
"""Of each case, one after another: on a shared machine the 99th percentiles of two differ by half and more."""


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Times of single requests, by the clock and of the processor.

    A decision waits for nothing, so the first is longer only where others want the processor too. ``num_nodes`` were
    resident, ``hit_share`` of the blocks that were asked for were found.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    num_nodes: int
    hit_share: float


class DecisionLoad:
    """A full GPU tier of ``num_nodes`` documents of ``blocks_per_node`` blocks, and requests for it."""

    def __init__(self, policy: str, *, num_nodes: int, blocks_per_node: int, seed: int) -> None:
        self._capacity_blocks = num_nodes * blocks_per_node
        self._blocks_per_node = blocks_per_node
        self._cost = PrefillCostModel.default()
        shadow_tokens = self._capacity_blocks * _BLOCK_TOKENS
        self.tree = KnowledgeTree(make_policy(policy, self._cost), shadow_tokens=shadow_tokens)
        self.tree.changes = NodeChanges()
        self._readers = [self.tree.changes.subscribe() for _ in range(2)]
        self._retrievals = _retrievals(Workload(num_documents=4 * num_nodes, skew=0.6, shift=5.0), seed)
        self._number = 0

    def fill(self) -> None:
        """Run requests until the tier has been full for a while."""
        while not self.tree.tiers[Tier.GPU].num_evicted_units:
            self._ask(self._next_request())
        for _ in range(2_000):
            self._ask(self._next_request())

    def measure(self, num_requests: int) -> DecisionTimes:
        """Return the time that each of ``num_requests`` takes."""
        requests = [self._next_request() for _ in range(num_requests)]
        num_hit_units = 0
        seconds: list[float] = []
        cpu_seconds: list[float] = []
        for segments in requests:
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            num_hit_units += self._ask(segments)
            cpu_seconds.append(time.thread_time() - started_cpu_s)
            seconds.append(time.perf_counter() - started_s)
        num_units = sum(len(segment.keys) for segments in requests for segment in segments)
        num_nodes = sum(1 for node in self.tree.nodes() if self.tree.resident_mask(node, Tier.GPU))
        return DecisionTimes(seconds, cpu_seconds, num_nodes, num_hit_units / num_units)

    def _next_request(self) -> list[PathSegment]:
        self._number += 1
        first, second = next(self._retrievals)
        return [
            self._segment(f"{first}", first),
            self._segment(f"{first}/{second}", second),
            PathSegment([f"question {self._number}".encode()], _BLOCK_TOKENS),
        ]

    def _segment(self, place: str, document: int) -> PathSegment:
        keys = [f"{place} {i}".encode() for i in range(self._blocks_per_node)]
        return PathSegment(keys, len(keys) * _BLOCK_TOKENS, f"document-{document}")

    def _ask(self, segments: Sequence[PathSegment]) -> int:
        """Decide one request from its arrival to its end, and return how many blocks were there."""
        tree = self.tree
        path = tree.insert(segments)
        last = path[-1].keys[-1]
        tree.retain(last)
        tree.protect(last)
        match = tree.match_prefix(segments)
        tree.unprotect(last)
        places = [place for s in segments for key in s.keys if (place := tree.locate(key)) is not None]
        for place in places[: match.num_units]:
            tree.hold(place.node, 1 << place.unit, Tier.GPU)
        num_free = self._capacity_blocks - tree.tiers[Tier.GPU].num_units
        num_missing = len(places) - match.num_units
        if num_missing > num_free:
            evicted = tree.evict(Tier.GPU, num_missing - num_free)
            assert evicted is not None, "the tier is far larger than a request"
        path = tree.retained_path(last) or tree.insert(segments)
        cost_s = tree.policy.cost_per_token_s(self._cost, match.num_tokens, num_missing * _BLOCK_TOKENS)
        tree.record_access(path, num_hit_units=match.num_units, cost_per_token_s=cost_s)
        for node, units in by_node(places[match.num_units :]):
            tree.hold(node, units, Tier.GPU)
            tree.add(node, units, Tier.GPU)
        for node, units in by_node(reversed(places)):
            tree.let_go(node, units, Tier.GPU)
        tree.release(last)
        for changed in self._readers:
            changed.clear()
        return match.num_units


def _retrievals(workload: Workload, seed: int) -> Iterator[list[int]]:
    """Yield what one request after another retrieves, without end."""
    num_yielded, num_drawn = 0, 1 << 15
    while True:  # a longer draw begins with the shorter
        yield from draw_retrievals(workload, num_drawn, seed).docs[num_yielded:].tolist()
        num_yielded, num_drawn = num_drawn, 2 * num_drawn


def bytes_per_node(num_nodes: int, *, blocks_per_node: int, tiers: Sequence[Tier], policy: str) -> float:
    """Return the bytes that a node takes whose blocks lie in ``tiers``: its keys, id and place in every heap included.

    The nodes are pairs of documents that were requested once each.
    """
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = KnowledgeTree(make_policy(policy), shadow_tokens=num_nodes * blocks_per_node * _BLOCK_TOKENS)
        for pair in range(num_nodes // 2):
            segments = [_segment_of(pair, place, blocks_per_node) for place in range(2)]
            path = tree.insert(segments)
            tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-3)
            for tier in tiers:
                _place(tree, path, tier)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return (after - before) / len(tree)
    finally:
        tracemalloc.stop()


def measure_decisions(plan: Plan) -> Part:
    """Time the decisions with 1,000 and 100,000 resident nodes, and weigh a node."""
    thresholds = gc.get_threshold()
    collect_rarely()  # as in the engine
    gc.collect()
    gc.freeze()  # as vLLM does when its engine has started; collections go on for what comes after
    try:
        return _measure_decisions(plan)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _measure_decisions(plan: Plan) -> Part:
    num_requests = plan.sized(20_000, 300)
    cases = [(p, n, 8) for n in (1_000, 100_000) for p in (_DEFAULT_POLICY, "pgdsf")]
    cases += [(_DEFAULT_POLICY, 1_000, 1), (_DEFAULT_POLICY, 1_000, 64)]
    if plan.is_quick:
        cases = [(p, min(n, 2_000), b) for p, n, b in cases if b == 8]
    rows = []
    for policy, num_nodes, blocks in cases:
        plan.report(f"decisions: {policy}, {num_nodes:,} nodes of {blocks} blocks")
        load = DecisionLoad(policy, num_nodes=num_nodes, blocks_per_node=blocks, seed=plan.seed)
        load.fill()
        runs = [load.measure(num_requests) for _ in range(plan.sized(_NUM_RUNS, 2))]
        of_runs = [percentiles_ms(times.cpu_seconds) for times in runs]
        rows.append(
            {
                "policy": policy,
                "goal_nodes": num_nodes,
                "blocks_per_node": blocks,
                "num_nodes": runs[-1].num_nodes,
                "hit_share": round(runs[-1].hit_share, 3),
                "p50_ms": median(p50 for p50, _ in of_runs),
                "p99_ms": median(p99 for _, p99 in of_runs),
                "p99_ms_of_runs": [p99 for _, p99 in of_runs],
                "clock_p99_ms": median(percentiles_ms(times.seconds)[1] for times in runs),
                "max_ms": round(max(max(times.cpu_seconds) for times in runs) * 1000, 3),
            }
        )
    figures = []
    for key, ours, other in (("1k", rows[0], rows[1]), ("100k", rows[2], rows[3])):
        note = f"{ours['num_nodes']:,} nodes of 8 blocks, tournament; pgdsf {other['p99_ms']} ms; "
        note += f"processor time, by the clock {ours['clock_p99_ms']} ms; "
        note += f"the median of {ours['p99_ms_of_runs']}"
        p50_ms, p99_ms = float(str(ours["p50_ms"])), float(str(ours["p99_ms"]))
        figures.append(Figure(f"decision_p99_ms_{key}", p99_ms, None, p50_ms, p99_ms, note))
    plan.report("decisions: memory of a node")
    count = plan.sized(100_000, 2_000)
    gpu = bytes_per_node(count, blocks_per_node=1, tiers=[Tier.GPU], policy=_DEFAULT_POLICY)
    weights = {
        "one block, GPU": gpu,
        "one block, GPU, pgdsf": bytes_per_node(count, blocks_per_node=1, tiers=[Tier.GPU], policy="pgdsf"),
        "one block, three tiers": bytes_per_node(count, blocks_per_node=1, tiers=[*Tier], policy=_DEFAULT_POLICY),
        "further block": (
            bytes_per_node(count, blocks_per_node=9, tiers=[Tier.GPU], policy=_DEFAULT_POLICY) - gpu
        ) / 8,
    }  # fmt: skip
    note = f"one block in GPU; three tiers {weights['one block, three tiers']:.0f}, a further block "
    figures.append(Figure("bytes_per_node", round(gpu, 1), note=note + f"{weights['further block']:.0f}"))
    details = {"decisions": rows, "bytes_per_node": {k: round(v, 1) for k, v in weights.items()}}
    return Part("the tier filled, then 2,000 requests", tuple(figures), details)


def _segment_of(pair: int, place: int, num_blocks: int) -> PathSegment:
    keys: list[Hashable] = [b"%019d %3d %3d     " % (pair, place, i) for i in range(num_blocks)]  # 32 bytes, as vLLM's
    return PathSegment(keys, num_blocks * _BLOCK_TOKENS, f"document-{pair}-{place}")


def _place(tree: KnowledgeTree, path: Sequence[TreeNode], tier: Tier) -> None:
    for node in path:
        tree.add(node, node.full_mask, tier)
