"""Several engines in one virtual clock: what they come to together, beside one engine and beside one large cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.policy import PrefillCostModel
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.options import ROUTINGS, SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

TRACE = make_trace(WORKLOADS["mmlu"], 200, seed=5).with_rate(4.0)
OPTIONS = SimulationOptions(order="cache_aware", warm_up=50)


def run(trace: Trace = TRACE, **settings: Any) -> SimulationResult:
    return simulate(trace, replace(OPTIONS, **settings), keeps_requests=True)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_is_served_once_under_any_routing(routing: str) -> None:
    result = run(replicas=3, routing=routing)
    assert result.requests is not None
    assert len(result.requests) == len(TRACE)
    assert sum(one.num_requests for one in result.replicas) == result.summary.num_requests == 150
    hits = sum(one.token_hit_rate * one.num_requests for one in result.replicas) / 150
    assert hits == pytest.approx(result.summary.token_hit_rate, abs=0.03)
    assert result.summary.busiest_over_mean >= 1.0
    assert run(replicas=3, routing=routing).requests == result.requests, "the same trace gives the same run"


def test_choosing_order_and_replica_together_is_nearly_one_large_cache() -> None:
    found = {routing: run(replicas=4, routing=routing).summary for routing in ROUTINGS}
    larger = {"gpu_tokens": 4 * OPTIONS.gpu_tokens, "host_tokens": 4 * OPTIONS.host_tokens}
    pooled = run(TRACE.with_rate(0.001), **larger).summary.token_hit_rate
    assert found["joint"].token_hit_rate > 0.9 * pooled
    assert found["joint"].token_hit_rate > found["round-robin"].token_hit_rate
    assert found["joint"].mean_ttft_s < found["round-robin"].mean_ttft_s
    assert found["joint"].busiest_over_mean < 1.3


def test_each_replica_may_reuse_chunks() -> None:
    summary = run(replicas=2, order="retrieval", chunk_reuse=0.3).summary
    assert summary.chunk_reused_tokens > 0


REQUESTS = st.lists(st.permutations("abcdef").map(lambda order: order[:3]), max_size=30)


@given(shown=REQUESTS, gpu=st.integers(26, 40), host=st.sampled_from((0, 12)), policy=st.sampled_from(("lru", "lfu")))
@settings(max_examples=60, deadline=None)
def test_a_mirror_reports_what_is_cached_of_every_order(
    shown: list[list[str]], gpu: int, host: int, policy: str
) -> None:
    lengths = {"a": 8, "b": 11, "c": 5, "d": 6, "e": 17, "f": 24}
    options = SimulationOptions(
        policy=policy, block_size=4, gpu_tokens=4 * gpu, host_tokens=4 * host, replicas=2, system_tokens=3
    )
    cache = BlockCache(options, PrefillCostModel.default())

    def prompt(documents: Sequence[str]) -> TracedRequest:
        return TracedRequest(0.0, tuple(documents), tuple(lengths[d] for d in documents), 9, 3)

    for number, documents in enumerate(shown):
        cache.serve(prompt(documents), number)
        cache.update_mirror()
        for other in shown:
            assert cache.mirror.num_cached_tokens(b"", other) == cache.num_cached_tokens(prompt(other))
