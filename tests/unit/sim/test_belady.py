"""The bound that knows the future, and the cache that evicts nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.policy import NodeStats
from ragcache_core.sim.belady import BeladyPolicy, Foreseen, next_uses
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

MMLU = make_trace(WORKLOADS["mmlu"], 150, seed=21)
BLOCK = 4


def foreseen(shown: Sequence[str]) -> list[Foreseen]:
    paths = [[documents[:end] for end in range(1, len(documents) + 1)] for documents in shown]
    return [Foreseen([(key, 10 * len(key)) for key in path], path) for path in paths]


@given(st.lists(st.text("ABC", max_size=3), max_size=20))
def test_next_uses_are_those_of_the_same_path(shown: list[str]) -> None:
    for number, (documents, found) in enumerate(zip(shown, next_uses(foreseen(shown)), strict=True)):
        for end, next_use in enumerate(found, 1):
            later = (i for i in range(number + 1, len(shown)) if shown[i].startswith(documents[:end]))
            assert next_use == next(later, math.inf)


def test_a_part_of_a_document_is_used_when_the_document_is() -> None:
    policy = BeladyPolicy(foreseen(["AB", "C", "AB"]))
    policy.begin(0)
    nodes = [NodeStats(i, 5) for i in range(4)]  # two for each document
    for node in nodes:
        node.frequency = 1
        policy.on_access(node, 1)
    lower = NodeStats(9, 2)
    policy.on_split(nodes[0], lower)
    assert [policy.rank(node, 0.0) for node in (*nodes, lower)] == [-2.0] * 5


def hits(documents: str, policy: str, num_blocks: int) -> int:
    """Return how many of these documents are hits on a GPU of that many blocks, one a document."""
    trace = Trace.from_requests(TracedRequest(float(i), (d,), (BLOCK,), 1, 1) for i, d in enumerate(documents))
    options = SimulationOptions(policy=policy, block_size=BLOCK, gpu_tokens=(num_blocks + 2) * BLOCK, host_tokens=0)
    return simulate(trace, options).summary.hits_by_tier["gpu"]


@given(st.text("ABCDE", min_size=1, max_size=30), st.integers(1, 3))
def test_no_policy_hits_more_than_belady_with_equal_blocks(documents: str, num_blocks: int) -> None:
    best = hits(documents, "belady", num_blocks)
    for policy in ("lru", "lfu", "arc"):
        assert hits(documents, policy, num_blocks) <= best


def test_the_bound_lies_between_the_policies_and_endless_memory() -> None:
    def token_hit_rate(policy: str, gpu_tokens: int) -> float:
        options = SimulationOptions(policy=policy, gpu_tokens=gpu_tokens, host_tokens=0)
        return simulate(MMLU, options).summary.token_hit_rate

    sizes = [20_480, 81_920]
    bound = [token_hit_rate("belady", size) for size in sizes]
    assert bound == sorted(bound)
    assert bound[-1] <= token_hit_rate("infinite", 1)
    for policy in ("lru", "mixture"):
        for size, best in zip(sizes, bound, strict=True):
            assert token_hit_rate(policy, size) < best


def test_the_histories_of_conversations_are_foreseen() -> None:
    trace = make_trace(WORKLOADS["conversation"], 150, seed=1)
    options = SimulationOptions(block_size=128, system_tokens=870, gpu_tokens=262_144, host_tokens=0)
    found = {
        policy: simulate(trace, replace(options, policy=policy)).summary.token_hit_rate
        for policy in ("belady", "mixture", "infinite")
    }
    assert 2 * found["mixture"] < found["belady"] <= found["infinite"]


def test_endless_memory_misses_each_path_once_and_moves_nothing() -> None:
    summary = simulate(MMLU, SimulationOptions(policy="infinite", gpu_tokens=1)).summary
    paths = {request.doc_ids[:end] for request in MMLU for end in (1, 2)}
    assert sum(summary.hits_by_tier.values()) == 2 * len(MMLU) - len(paths)
    assert summary.swapped_out_tokens == summary.loaded_tokens == 0
