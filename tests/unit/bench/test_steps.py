"""An engine in steps: what a step computes and how long it takes, who waits for what, and what never breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.simulated.laboratory import LabOptions, simulate
from benchmarks.simulated.steps import SteppedCache, StepSimulation
from ragcache_core.policy.step_times import StepTimes
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.engine import Job
from ragcache_core.sim.testbeds import PrefillFormula, Testbed, load_testbed
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier

BLOCK = 4
PER_TOKEN_S, STEP_S, SEQUENCE_S, REQUEST_S = 0.01, 0.1, 0.02, 0.5
TESTBED = Testbed(
    "test",
    PrefillFormula(REQUEST_S + STEP_S, 0.0, PER_TOKEN_S, 0.0),
    STEP_S,
    tokens_per_gib=100,
    host_gib_per_s=10.0,
    disk_gib_per_s=1.0,
    steps=StepTimes(REQUEST_S, STEP_S, SEQUENCE_S),
)


def engine(
    gpu: int = 100, host: int = 0, disk: int = 0, testbed: Testbed = TESTBED, **given: Any
) -> tuple[StepSimulation, SteppedCache]:
    """Return an engine of so many blocks in each tier."""
    sizes = {name: count * BLOCK for name, count in (("gpu_tokens", gpu), ("host_tokens", host), ("disk_tokens", disk))}
    defaults = {"policy": "lru", "block_size": BLOCK, "max_batch": 4, "max_batched_tokens": 40}
    options = LabOptions(**{**defaults, **sizes, **given})
    assert options.max_batched_tokens is not None
    cache = SteppedCache(options, testbed.cost, knows_documents=options.knows_documents)
    return StepSimulation(cache, options, testbed, options.max_batched_tokens), cache


def asked(doc_ids: str = "", question_tokens: int = 8, output_tokens: int = 1, doc_tokens: int = 8) -> TracedRequest:
    return TracedRequest(0.0, tuple(doc_ids), (doc_tokens,) * len(doc_ids), question_tokens, output_tokens)


def first_tokens(it: StepSimulation, requests: Sequence[TracedRequest], ready_s: Sequence[float]) -> list[float]:
    """Return when each request has its first token, by the clock."""
    jobs = it.replay(enumerate(requests), ready_s)
    return [job.first_token_s for job in jobs if job.first_token_s is not None]


def test_alone_a_request_takes_what_its_prefill_was_measured_to_take() -> None:
    it, _ = engine()
    assert first_tokens(it, [asked("a", 12)], [3.0]) == pytest.approx([3.0 + TESTBED.cost.estimate_s(0, 20)])


def test_prompts_that_fit_into_a_step_share_it_and_one_that_does_not_is_cut() -> None:
    it, _ = engine()
    requests = [asked(question_tokens=15), asked(question_tokens=15), asked(question_tokens=15)]
    step_s = STEP_S + 40 * PER_TOKEN_S  # the third has 10 of its tokens in the first step, and 5 in the next
    rest_s = STEP_S + 5 * PER_TOKEN_S
    expected = [step_s, step_s, step_s + rest_s]
    assert first_tokens(it, requests, [0.0, 0.0, 0.0]) == pytest.approx([at_s + REQUEST_S for at_s in expected])


def test_an_answer_goes_on_in_the_steps_that_compute_a_prompt() -> None:
    it, _ = engine()
    requests = [asked(question_tokens=8, output_tokens=3), asked(question_tokens=39)]
    first, second = it.replay(enumerate(requests), [0.0, 0.1])
    alone_s = STEP_S + 8 * PER_TOKEN_S
    together_s = STEP_S + SEQUENCE_S + 39 * PER_TOKEN_S
    assert second.first_token_s == pytest.approx(alone_s + together_s + REQUEST_S)
    assert first.done_s == pytest.approx(alone_s + together_s + STEP_S + SEQUENCE_S + REQUEST_S)


def test_a_request_that_arrives_in_a_step_waits_for_its_end() -> None:
    it, _ = engine()
    found = first_tokens(it, [asked(question_tokens=40), asked(question_tokens=10)], [0.0, 0.01])
    assert found[1] == pytest.approx(2 * STEP_S + 50 * PER_TOKEN_S + REQUEST_S)


def test_a_request_waits_until_its_whole_prompt_finds_free_blocks() -> None:
    it, _ = engine(gpu=12)  # one is vLLM's null block
    found = first_tokens(it, [asked(question_tokens=24, output_tokens=2), asked(question_tokens=24)], [0.0, 0.0])
    first_s = STEP_S + 24 * PER_TOKEN_S
    assert found[1] == pytest.approx(first_s + STEP_S + SEQUENCE_S + first_s + REQUEST_S)


@pytest.mark.parametrize("beside", [False, True])
def test_kv_of_the_host_is_loaded_before_the_step_that_computes_behind_it(beside: bool) -> None:
    it, _ = engine(gpu=12, host=50, overlaps_transfers=beside)
    it.run_through(enumerate([asked("a", 4, doc_tokens=24), asked("b", 4, doc_tokens=24)]), in_flight=1)
    (job,) = it.replay([(2, asked("a", 4, doc_tokens=24))], [0.0])
    assert job.served is not None
    num_host_tokens = job.served.num_cached_tokens_by_tier[Tier.HOST]
    assert num_host_tokens == 8
    copy_s = num_host_tokens / 100 / 10.0 + (0.0 if beside else 24 / 100 / 10.0)  # what the one before left is stored
    chunk_s = STEP_S + (28 - job.served.num_cached_tokens) * PER_TOKEN_S
    assert job.first_token_s == pytest.approx(copy_s + chunk_s + REQUEST_S)


def test_a_hit_in_host_memory_waits_for_the_step_that_runs_meanwhile() -> None:
    it, _ = engine(gpu=26, host=50, overlaps_transfers=True)
    it.run_through(enumerate([asked("a", 4), asked("x", 4, doc_tokens=96)]), in_flight=1)
    hit, other = it.replay([(2, asked("a", 4)), (3, asked(question_tokens=38))], [0.0, 0.0])
    assert hit.served is not None
    assert hit.served.num_cached_tokens_by_tier[Tier.HOST] == 8
    step_s = STEP_S + 38 * PER_TOKEN_S
    assert other.first_token_s == pytest.approx(step_s + REQUEST_S)
    assert hit.first_token_s == pytest.approx(step_s + STEP_S + 4 * PER_TOKEN_S + REQUEST_S)


def test_what_was_read_in_a_warm_up_is_not_waited_for_after_it() -> None:
    requests = [asked(doc, 4) for doc in "abcdefgh"]
    ttft_s = []
    for num_rounds in (2, 20):
        it, _ = engine(gpu=4, host=4, disk=50)
        it.run_through(enumerate(requests * num_rounds), in_flight=2)
        ttft_s.append(first_tokens(it, [asked("a", 4)], [0.0]))
    assert ttft_s[0] == pytest.approx(ttft_s[1])


def test_reads_from_disk_are_waited_for_one_after_another() -> None:
    it, _ = engine(gpu=100, host=7, disk=50)
    kept = [asked("a", 4, doc_tokens=24), asked("b", 4, doc_tokens=24)]
    it.run_through(enumerate(kept), in_flight=1)
    small, _ = engine(gpu=16, host=14, disk=50)
    small.run_through(enumerate([*kept, asked("x", 4, doc_tokens=48)]), in_flight=1)
    jobs = small.replay([(5, kept[0]), (6, kept[1])], [0.0, 0.0])
    read = [job.served.num_cached_tokens_by_tier[Tier.DISK] for job in jobs if job.served is not None]
    assert read == [24, 24]
    read_s = 24 / 100 / 1.0
    ttft_s = [job.first_token_s for job in jobs if job.first_token_s is not None]
    assert ttft_s[0] >= read_s + STEP_S
    assert ttft_s[1] >= 2 * read_s + STEP_S, "one disk"


def test_without_blocks_for_an_answer_the_last_request_is_preempted_and_answered_all_the_same() -> None:
    it, cache = engine(gpu=12, max_batched_tokens=60)
    requests = [asked(question_tokens=18, output_tokens=20), asked(question_tokens=18, output_tokens=20)]
    first, second = it.replay(enumerate(requests), [0.0, 0.0])
    assert first.done_s is not None
    assert second.done_s is not None
    assert second.done_s > first.done_s + 10 * STEP_S, "it had to wait for the other's blocks"
    assert (first.num_output_tokens, second.num_output_tokens) == (20, 20)
    assert not any(state.in_use for state in cache.tree.tiers)


REQUESTS = st.lists(
    st.builds(
        asked,
        st.permutations("abcdef").map(lambda order: "".join(order)[:2]),
        st.integers(1, 9),
        st.integers(1, 14),
        st.sampled_from((3, 8, 11, 24)),
    ),
    max_size=25,
)


@given(
    requests=REQUESTS,
    gaps=st.lists(st.floats(0.0, 1.0), min_size=25, max_size=25),
    policy=st.sampled_from(("lru", "mixture", "pgdsf", "arc")),
    gpu=st.integers(20, 40),  # the longest request takes 18 blocks
    tiers=st.sampled_from(((0, 0), (7, 0), (30, 0), (30, 45))),
    queue=st.sampled_from(("fifo", "cache-aware")),
    knows_documents=st.booleans(),
    beside=st.booleans(),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_whatever_overlaps_all_are_answered_and_everything_is_let_go(
    requests: list[TracedRequest],
    gaps: list[float],
    policy: str,
    gpu: int,
    tiers: tuple[int, int],
    queue: str,
    knows_documents: bool,
    beside: bool,
    in_flight: int,
) -> None:
    settings = {"queue": queue, "knows_documents": knows_documents, "overlaps_transfers": beside}
    it, cache = engine(gpu, *tiers, policy=policy, **settings)
    ready_s = [sum(gaps[: i + 1]) for i in range(len(requests))]
    jobs: list[Job] = it.replay(enumerate(requests), ready_s)
    it.run_through(enumerate(requests, len(requests)), in_flight=in_flight)
    assert [job.number for job in jobs] == list(range(len(requests)))
    for job, request in zip(jobs, requests, strict=True):
        assert job.served is not None
        num_prompt_tokens = sum(request.doc_tokens) + request.question_tokens
        assert job.served.num_cached_tokens + job.served.num_new_tokens == num_prompt_tokens
        assert job.num_output_tokens == request.output_tokens
        assert job.first_token_s is not None
        assert job.ready_s is not None
        assert job.done_s is not None
        assert job.ready_s < job.first_token_s <= job.done_s
    cache.settle()
    assert not any(state.in_use for state in cache.tree.tiers), "everything was let go"
    assert not cache.tree.protected
    for tier, capacity in zip(Tier, (gpu - 1, *tiers), strict=True):
        assert cache.tree.tiers[tier].num_units <= capacity
    check_invariants(cache.tree, is_connected=False)


def test_requests_far_apart_find_what_they_find_when_they_are_served_whole() -> None:
    trace = make_trace(WORKLOADS["mmlu"], 60, 3)
    options = LabOptions(block_size=64, gpu_tokens=20_000, host_tokens=30_000, max_batch=8, max_batched_tokens=2_048)
    apart = Trace.from_requests(replace(request, arrival_s=1000.0 * i) for i, request in enumerate(trace))
    found = simulate(apart, options, keeps_requests=True)
    whole = BlockCache(replace(options, max_batched_tokens=None), load_testbed(options.cost_model).cost)
    served = [whole.serve(request, number) for number, request in enumerate(apart)]
    assert found.requests is not None
    assert [record.cached_tokens for record in found.requests] == [one.num_cached_tokens for one in served]
    assert found.summary.swapped_out_tokens == sum(one.num_swapped_out_tokens for one in served) > 0
