"""Other routers choose as their descriptions say, and serve whole traces."""

from __future__ import annotations

import pytest

from benchmarks.simulated.laboratory import LabOptions, simulate
from benchmarks.simulated.routers import PowerOfTwo, VllmRouter
from ragcache_core.routing.choice import ReplicaState
from ragcache_core.routing.load import PromptInfo, ReplicaLoad
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace


@pytest.mark.parametrize("routing", LabOptions.routings)
def test_every_request_is_served_once_whoever_chooses(routing: str) -> None:
    trace = make_trace(WORKLOADS["mmlu"], 300, seed=5).with_rate(4.0)
    result = simulate(trace, LabOptions(order="cache_aware", replicas=3, routing=routing))
    assert sum(one.num_requests for one in result.replicas) == result.summary.num_requests == 300


def test_hashing_sends_a_first_document_to_one_replica_however_busy() -> None:
    trace = Trace.from_requests(TracedRequest(0.01 * i, ("a",), (1_000,), 20, 1) for i in range(40))

    def numbers(routing: str) -> list[int]:
        return [one.num_requests for one in simulate(trace, LabOptions(replicas=4, routing=routing)).replicas]

    assert sorted(numbers("hash")) == [0, 0, 0, 40]
    assert max(numbers("bounded")) < 30


def test_vllm_router_sends_what_it_knows_where_it_was_sent_before_and_the_rest_to_the_idlest() -> None:
    replicas, router = [ReplicaState(str(i), (), ReplicaLoad()) for i in range(3)], VllmRouter()

    def choose(*documents: str) -> str:
        ends = tuple(100 * (n + 1) for n in range(len(documents)))
        return router.choose(replicas, PromptInfo(documents, ends, 0, 100 * len(documents) + 10, b"", "")).name

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
    replicas = [ReplicaState(str(i), (), ReplicaLoad(num_running=i)) for i in range(3)]
    drawn = [PowerOfTwo(seed).choose(replicas).name for seed in range(60)]
    assert set(drawn) == {"0", "1"}
    assert PowerOfTwo(0).choose(replicas[:1]) is replicas[0]
