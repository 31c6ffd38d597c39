"""The bound that knows the future, and the cache that gives up nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ragcache_core.sim.bound import in_canonical_order, next_uses
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.trace import Trace, TracedRequest
from ragcache_core.sim.workload import WORKLOADS, make_trace

MMLU = make_trace(WORKLOADS["mmlu"], 600, seed=21)


def naive_next_uses(trace: Trace) -> list[float]:
    paths = [[r.doc_ids[:end] + r.doc_tokens[:end] for end in range(1, len(r.doc_ids) + 1)] for r in trace]
    found: list[float] = []
    for number, path in enumerate(paths):
        for key in path:
            found.append(next((float(i) for i in range(number + 1, len(paths)) if key in paths[i]), math.inf))
    return found


@pytest.mark.parametrize("documents", [1, 2, 5])
def test_next_uses_are_those_of_the_same_path(documents: int) -> None:
    trace = make_trace(replace(WORKLOADS["nq-small"], documents_per_request=documents), 150, seed=documents)
    assert next_uses(trace).tolist() == naive_next_uses(trace)


def test_next_uses_tell_requests_of_different_length_apart() -> None:
    shown = ["AB", "", "A", "ABC", "B", "AB"]
    trace = Trace.from_requests(TracedRequest(0.0, tuple(d), (5,) * len(d), 1, 1) for d in shown)
    assert next_uses(trace).tolist() == naive_next_uses(trace)


def test_the_canonical_order_is_that_of_ids() -> None:
    for request, arranged in zip(MMLU, in_canonical_order(MMLU), strict=True):
        pairs = sorted(zip(request.doc_ids, request.doc_tokens, strict=True))
        assert list(zip(arranged.doc_ids, arranged.doc_tokens, strict=True)) == pairs
        assert arranged.question_tokens == request.question_tokens


@pytest.mark.parametrize("order", ["retrieval", "canonical"])
def test_the_bound_grows_with_host_memory_and_lies_between_every_policy_and_endless_memory(order: str) -> None:
    def token_hit_rate(policy: str, host_tokens: int) -> float:
        options = SimulationOptions(policy=policy, order=order, host_tokens=host_tokens)  # type: ignore[arg-type]
        return simulate(MMLU, options).summary.token_hit_rate

    sizes = [0, 32_768, 65_536, 131_072, 262_144, 1_048_576]
    bound = [token_hit_rate("belady", size) for size in sizes]
    assert bound == sorted(bound)
    assert bound[-1] <= token_hit_rate("infinite", 0)
    for policy in ("pgdsf", "lru", "tournament"):
        for size, best in zip(sizes[:4], bound, strict=False):
            assert token_hit_rate(policy, size) < best


def test_endless_memory_misses_each_path_once_and_moves_nothing() -> None:
    summary = simulate(MMLU, SimulationOptions(policy="infinite", gpu_tokens=1)).summary
    paths = {request.doc_ids[:end] for request in MMLU for end in (1, 2)}
    assert sum(summary.hits_by_tier.values()) == 2 * len(MMLU) - len(paths)
    assert summary.swapped_out_tokens == summary.loaded_tokens == 0
