"""The bound that knows the future, and the cache that gives up nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ragcache_core.sim.bound import above_belady, in_canonical_order, next_uses
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.sweep import FinishedRun
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

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


@pytest.mark.slow
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


def finished(options: SimulationOptions, trace: Trace = MMLU) -> FinishedRun:
    result = simulate(trace, options)
    return FinishedRun("", "mmlu.jsonl", result.options.to_dict(), result.summary.to_dict(), (), 0.0)


def test_a_policy_that_comes_out_better_than_the_bound_is_explained() -> None:
    trace = make_trace(WORKLOADS["mmlu"], 3000, seed=3)
    small = SimulationOptions(gpu_tokens=16_384, host_tokens=8_192, warm_up=1000)
    bound, ours = (finished(replace(small, policy=policy), trace) for policy in ("belady", "tournament"))
    assert ours.summary["token_hit_rate"] > bound.summary["token_hit_rate"], "in a cache as small as a few prompts"
    (why,) = above_belady([ours, bound])
    assert why.startswith("tournament with order retrieval came out better than belady with order retrieval (token_hit")
    assert "GPU 16,384, host 8,192" in why
    assert "one size and lie in one tier" in why
    assert "overtake" not in why
    (faster,) = above_belady([replace(ours, summary={**ours.summary, "token_hit_rate": 0.0}), bound])
    assert "mean_ttft_s" in faster
    assert "what they cost to compute" in faster


def test_another_order_that_comes_out_better_than_the_bound_of_its_own_is_explained() -> None:
    large = SimulationOptions(host_tokens=1_048_576)
    runs = [finished(replace(large, policy="belady")), finished(replace(large, order="cache_aware"))]
    (why,) = above_belady(runs)
    assert "tournament with order cache_aware came out better than belady with order retrieval" in why
    assert "another order makes other prefixes" in why


def test_nothing_is_said_where_the_bound_is_one_and_of_endless_memory() -> None:
    policies = ("belady", "infinite", "lru", "tournament")
    assert above_belady([finished(SimulationOptions(policy=policy)) for policy in policies]) == []
