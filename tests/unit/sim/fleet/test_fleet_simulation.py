"""Several engines in one virtual clock: what they come to together, beside one engine and beside one large cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.routing.choice import KnownReplica
from ragcache_core.routing.load import AskedPrompt, ReplicaLoad
from ragcache_core.sim.fleet.other_routers import PowerOfTwo, VllmRouter
from ragcache_core.sim.options import ROUTINGS, SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

TRACE = make_trace(WORKLOADS["mmlu"], 600, seed=5).with_rate(4.0)
OPTIONS = SimulationOptions(order="cache_aware", warm_up=100)


def run(trace: Trace = TRACE, **settings: Any) -> SimulationResult:
    return simulate(trace, replace(OPTIONS, **settings), keeps_requests=True)


def asking(*documents: str, at_s: float) -> TracedRequest:
    return TracedRequest(at_s, documents, (1_000,) * len(documents), 20, 1)


@pytest.mark.parametrize("order", ["retrieval", "canonical"])
@pytest.mark.parametrize("queue", ["fifo", "cache-aware"])
def test_a_fleet_of_one_is_one_engine(order: str, queue: str) -> None:
    alone = run(order=order, queue=queue)
    fleet = run(order=order, queue=queue, shared_tokens=1, link_gib_per_s=1.0)  # a tier that holds nothing
    assert fleet.requests == alone.requests
    assert fleet.summary.max_overtaken == alone.summary.max_overtaken


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_is_served_once_whoever_chooses(routing: str) -> None:
    result = run(replicas=3, routing=routing)
    assert result.requests is not None
    assert len(result.requests) == len(TRACE)
    assert sum(one.num_requests for one in result.replicas) == result.summary.num_requests == 500
    hits = sum(one.token_hit_rate * one.num_requests for one in result.replicas) / 500
    assert hits == pytest.approx(result.summary.token_hit_rate, abs=0.03)
    assert result.summary.busiest_over_mean >= 1.0
    assert run(replicas=3, routing=routing).requests == result.requests, "the same trace gives the same run"


def test_choosing_order_and_replica_together_is_nearly_one_large_cache() -> None:
    found = {routing: run(replicas=4, routing=routing).summary for routing in ROUTINGS}
    larger = {"gpu_tokens": 4 * OPTIONS.gpu_tokens, "host_tokens": 4 * OPTIONS.host_tokens}
    pooled = run(TRACE.with_rate(0.001), **larger).summary.token_hit_rate
    assert found["joint"].token_hit_rate > 0.9 * pooled
    assert found["joint"].token_hit_rate > found["mirror"].token_hit_rate > found["round-robin"].token_hit_rate
    assert found["joint"].mean_ttft_s < min(found[name].mean_ttft_s for name in ("round-robin", "hash", "bounded"))
    assert found["joint"].busiest_over_mean < 1.3


def test_round_robin_takes_turns() -> None:
    assert [one.num_requests for one in run(replicas=5, routing="round-robin").replicas] == [100] * 5


def test_hashing_sends_a_first_document_to_one_replica_however_busy() -> None:
    trace = Trace.from_requests(asking("a", at_s=0.01 * i) for i in range(40))
    result = run(trace, replicas=4, routing="hash", warm_up=0)
    assert sorted(one.num_requests for one in result.replicas) == [0, 0, 0, 40]
    assert max(one.num_requests for one in run(trace, replicas=4, routing="bounded", warm_up=0).replicas) < 30


def test_vllm_router_sends_what_it_knows_where_it_was_sent_before_and_the_rest_to_the_idlest() -> None:
    replicas, router = [KnownReplica(str(i), (), ReplicaLoad()) for i in range(3)], VllmRouter()

    def choose(*documents: str) -> str:
        ends = tuple(100 * (n + 1) for n in range(len(documents)))
        return router.choose(replicas, AskedPrompt(documents, ends, 0, 100 * len(documents) + 10, b"", "")).name

    assert choose("a", "b") == "0"
    replicas[0].load.num_running = 60
    assert choose("a", "c") == "0", "100 of 210 tokens are known"
    assert choose("a", "c", "d", "e", "f") == "0"
    assert choose("a", "x", "d", "e", "f") == "1", "a fifth of it is known"
    assert choose("a", "b") == "0"
    assert choose("a", "x") == "1", "what was sent last counts"
    replicas[0].load.num_running = 65
    assert choose("a", "b") == "2", "the busiest has too many more than the idlest, of whom this was sent nothing"
    replicas[0].load.num_running = 0
    assert choose("a", "b") == "2"


def test_two_choices_are_better_than_one() -> None:
    replicas = [KnownReplica(str(i), (), ReplicaLoad(num_running=i)) for i in range(3)]
    drawn = [PowerOfTwo(seed).choose(replicas).name for seed in range(60)]
    assert set(drawn) == {"0", "1"}
    assert PowerOfTwo(0).choose(replicas[:1]) is replicas[0]


def test_what_a_replica_computes_is_read_by_another_from_the_shared_tier() -> None:
    trace = Trace.from_requests([asking("a", at_s=0.0), asking("a", at_s=5.0)])
    settings = {"replicas": 2, "routing": "round-robin", "warm_up": 0, "order": "retrieval"}
    apart = run(trace, **settings)
    shared = run(trace, **settings, shared_tokens=10_000, link_gib_per_s=2.0)
    slow = run(trace, **settings, shared_tokens=10_000, link_gib_per_s=0.01)
    assert [one.shared_hit_rate for one in shared.replicas] == [0.0, 1.0]
    assert shared.summary.shared_hit_tokens == 1_000
    assert shared.summary.computed_tokens == apart.summary.computed_tokens - 1_000
    ttft = [(result.requests or ())[1].ttft_s for result in (apart, shared, slow)]
    assert ttft[1] < 0.6 * ttft[0]
    assert ttft[2] == ttft[0], "what the link brings later than computing is computed"


def test_the_shared_tier_knows_a_document_when_the_request_that_computed_it_is_over() -> None:
    trace = Trace.from_requests([asking("a", at_s=0.0), asking("a", at_s=0.001)])
    settings = {"replicas": 2, "routing": "round-robin", "warm_up": 0, "shared_tokens": 10_000, "link_gib_per_s": 2.0}
    assert run(trace, **settings).summary.shared_hit_tokens == 0


def test_a_system_prompt_that_all_have_decides_nothing() -> None:
    plain, longer = (run(replicas=3, system_tokens=num) for num in (0, 500))
    assert [one.num_requests for one in longer.replicas] == pytest.approx(
        [one.num_requests for one in plain.replicas], abs=60
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": 0}, ["replicas is 0", "1 or more"]),
        ({"replicas": 1_025}, ["1,025", "1,024", "lower"]),
        ({"routing": "magic"}, ["'magic'", "joint"]),
        ({"shared_tokens": 5}, ["shared_tokens is 5", "link_gib_per_s"]),
        ({"link_gib_per_s": 1.0}, ["link_gib_per_s is 1", "set shared_tokens"]),
        ({"link_gib_per_s": 0.0, "shared_tokens": 5}, ["0.0", "more than 0"]),
        ({"link_gib_per_s": float("nan"), "shared_tokens": 5}, ["nan", "more than 0"]),
        ({"replicas": 2, "granularity": "block"}, ["granularity is block", "choose document"]),
        ({"replicas": 2, "speculation": "dynamic"}, ["speculation is dynamic", "choose none"]),
        ({"replicas": 2, "chunk_reuse": 0.3}, ["chunk_reuse is 0.3", "leave it out"]),
        ({"replicas": 2, "policy": "belady", "order": "retrieval"}, ["belady", "another policy"]),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(OPTIONS, **settings)
    for word in words:
        assert word in str(refused.value)


def test_a_fleet_is_not_warmed() -> None:
    with pytest.raises(ConfigError, match="leave warming out"):
        simulate(TRACE, replace(OPTIONS, replicas=2), warmed=[(TRACE[0], 1)])
