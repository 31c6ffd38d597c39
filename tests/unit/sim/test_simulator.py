"""The engine in virtual time: when first tokens come, who is next, and what is counted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DocumentOrder
from ragcache_core.sim.options import Queue, SimulationOptions, Speculation
from ragcache_core.sim.result import RequestRecord, SimulationResult
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.testbeds import TESTBEDS
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

TESTBED = TESTBEDS["a10g-mistral-7b"]
T = TESTBED.cost.estimate_s
NO_SEARCH = SimulationOptions(policy="lru", retrieval_s=0.0, block_size=10)


def traced(
    arrival_s: float, documents: str, *, tokens: int = 1_000, question: int = 10, output: int = 1
) -> TracedRequest:
    return TracedRequest(arrival_s, tuple(documents), (tokens,) * len(documents), question, output)


def ttfts(requests: list[TracedRequest], options: SimulationOptions) -> list[float]:
    return [record.ttft_s for record in records(requests, options)]


def records(requests: list[TracedRequest], options: SimulationOptions) -> tuple[RequestRecord, ...]:
    found = simulate(Trace.from_requests(requests), options, keeps_requests=True).requests
    assert found is not None
    return found


def test_a_request_waits_for_its_search_and_for_the_one_before_it() -> None:
    options = replace(NO_SEARCH, retrieval_s=0.5)
    prefill_s = T(0, 1_010)
    found = ttfts([traced(0.0, "A"), traced(0.1, "B"), traced(9.0, "C")], options)
    assert found == pytest.approx([0.5 + prefill_s, 0.5 + 2 * prefill_s - 0.1, 0.5 + prefill_s])


def test_alone_a_request_holds_the_engine_until_its_last_token() -> None:
    decode_s = TESTBED.decode_s(1_011) + TESTBED.decode_s(1_012)
    found = ttfts([traced(0.0, "A", output=3), traced(0.0, "B")], NO_SEARCH)
    assert found == pytest.approx([T(0, 1_010), 2 * T(0, 1_010) + decode_s])


def test_a_hit_on_the_host_is_loaded_beside_the_prefill_or_before_it() -> None:
    requests = [traced(0.0, "A", tokens=8_000), traced(10.0, "B", tokens=8_000), traced(20.0, "A", tokens=8_000)]
    options = replace(NO_SEARCH, gpu_tokens=8_020)
    transfer_s = 8_000 / 8_192 / 11.5
    assert transfer_s < T(8_000, 10)
    assert ttfts(requests, options)[2] == pytest.approx(T(8_000, 10))
    assert ttfts(requests, replace(options, overlaps_transfers=False))[2] == pytest.approx(T(8_000, 10) + transfer_s)
    slow_link = replace(options, cost_model="a10g-llama2-7b")
    assert 4 * transfer_s > T(8_000, 10)
    assert ttfts(requests, slow_link)[2] == pytest.approx(4 * transfer_s)


def test_a_batch_shares_what_an_iteration_costs_anyway() -> None:
    options = replace(NO_SEARCH, max_batch=2)
    both_s = 2 * T(0, 1_010) - TESTBED.base_s
    found = ttfts([traced(0.0, "A"), traced(0.0, "B"), traced(0.0, "C")], options)
    assert found == pytest.approx([both_s, both_s, both_s + T(0, 1_010)])


def test_a_request_joins_those_that_decode() -> None:
    first_s = T(0, 1_010)
    second_s = first_s + T(0, 1_010) + TESTBED.decode_s(1_011) - TESTBED.base_s
    requests = [traced(0.0, "A", output=5), traced(0.01, "B")]
    assert ttfts(requests, replace(NO_SEARCH, max_batch=2)) == pytest.approx([first_s, second_s - 0.01])


def test_the_queue_takes_cached_requests_first_within_the_starvation_bound() -> None:
    requests = [traced(0.0, "A"), *(traced(0.01 + 1e-4 * i, "B" if i == 0 else "A") for i in range(6))]
    aware_queue = replace(NO_SEARCH, queue="cache-aware")
    fifo, aware = ttfts(requests, NO_SEARCH), ttfts(requests, aware_queue)
    assert fifo[1] == min(fifo[1:])
    assert aware[1] == max(aware[1:])
    bounded = simulate(Trace.from_requests(requests), replace(aware_queue, window=2))
    assert bounded.summary.max_overtaken == 2


class TestOverload:
    trace = make_trace(replace(WORKLOADS["mmlu"], requests_per_s=2.0), 150, seed=5)

    @pytest.mark.parametrize("window", [0, 4, 16])
    def test_no_request_is_overtaken_more_often_than_the_window(self, window: int) -> None:
        options = SimulationOptions(queue="cache-aware", window=window)
        summary = simulate(self.trace, options).summary
        assert summary.max_overtaken == window
        if window == 0:
            assert summary.mean_ttft_s == simulate(self.trace, SimulationOptions()).summary.mean_ttft_s


def test_records_name_documents_as_the_trace_does_whatever_the_prompt_shows() -> None:
    requests = [traced(0.0, "A"), traced(10.0, "BA"), traced(20.0, "BA")]
    aware = records(requests, replace(NO_SEARCH, order="cache_aware"))
    assert aware[1].documents == ("miss", "gpu")
    canonical = simulate(Trace.from_requests(requests), replace(NO_SEARCH, order="canonical"))
    assert canonical.summary.reordered_share == pytest.approx(2 / 3)
    assert canonical.summary.hits_by_tier == {"gpu": 3, "host": 0, "disk": 0}
    kept = simulate(Trace.from_requests(requests), NO_SEARCH)
    assert kept.summary.reordered_share == 0.0
    assert kept.summary.hits_by_tier == {"gpu": 2, "host": 0, "disk": 0}


def test_the_warm_up_is_served_and_not_counted() -> None:
    requests = [traced(10.0 * i, "A") for i in range(4)]
    result = simulate(Trace.from_requests(requests), replace(NO_SEARCH, warm_up=1, system_tokens=90))
    assert result.summary.num_requests == 3
    assert result.summary.document_hit_rate == result.summary.token_hit_rate == 1.0
    assert result.summary.mean_ttft_s == pytest.approx(T(1_090, 10))
    with pytest.raises(ConfigError, match="lower warm_up"):
        simulate(Trace.from_requests(requests), replace(NO_SEARCH, warm_up=4))


def test_a_prompt_longer_than_the_gpu_is_refused_with_what_the_longest_needs() -> None:
    trace = Trace.from_requests([traced(0.0, "A"), traced(1.0, "ABC", output=6), traced(2.0, "AB")])
    options = replace(NO_SEARCH, gpu_tokens=1_100)
    with pytest.raises(ConfigError, match=r"^request 1 .* 3,015 tokens .* set gpu_tokens to 3,030 or more"):
        simulate(trace, options)
    assert simulate(trace, replace(options, gpu_tokens=3_030)).summary.num_requests == 3
    assert simulate(trace, replace(options, policy="infinite")).summary.num_requests == 3


def test_requests_without_documents_are_served() -> None:
    summary = simulate(Trace.from_requests([traced(0.0, ""), traced(1.0, "", question=0)]), NO_SEARCH).summary
    assert summary.document_hit_rate == summary.token_hit_rate == 0.0


def test_every_request_advances_the_progress_once() -> None:
    told: list[int] = []
    short = replace(WORKLOADS["nq-small"], mean_tokens=200.0, most_tokens=400)
    simulate(make_trace(short, 600, seed=1), SimulationOptions(), progress=told.append)
    assert sum(told) == 600
    assert len(told) > 1


TRACE = make_trace(WORKLOADS["nq-small"], 200, seed=11)
TRACE_WITH_ANSWERS = make_trace(replace(WORKLOADS["nq-small"], requests_per_s=2.0), 80, seed=12)


@pytest.mark.parametrize(
    ("order", "queue", "max_batch", "speculation"),
    [  # every pair of two settings
        ("retrieval", "fifo", 1, "none"),
        ("retrieval", "cache-aware", 4, "dynamic"),
        ("canonical", "fifo", 1, "dynamic"),
        ("canonical", "cache-aware", 4, "none"),
        ("cache_aware", "fifo", 4, "dynamic"),
        ("cache_aware", "cache-aware", 1, "none"),
    ],
)
def test_tokens_are_conserved_and_everyone_is_answered(
    order: DocumentOrder, queue: Queue, max_batch: int, speculation: Speculation
) -> None:
    options = SimulationOptions(
        order=order,
        queue=queue,
        max_batch=max_batch,
        speculation=speculation,
        disk_tokens=50_000,
        retrieval_s=0.4,
    )
    result = simulate(TRACE_WITH_ANSWERS, options, keeps_requests=True)
    summary = result.summary
    assert result.requests is not None
    assert len(result.requests) == summary.num_requests == len(TRACE_WITH_ANSWERS)
    for request, record in zip(TRACE_WITH_ANSWERS, result.requests, strict=True):
        assert record.ttft_s >= options.retrieval_s
        num_tokens = sum(request.doc_tokens) + request.question_tokens
        assert 0 <= record.cached_tokens < num_tokens
    assert sum(summary.hit_tokens_by_tier.values()) == sum(record.cached_tokens for record in result.requests)
    assert summary.token_hit_rate == pytest.approx(
        sum(summary.hit_tokens_by_tier.values()) / int(TRACE_WITH_ANSWERS.doc_tokens.sum())
    )
    assert summary.loaded_tokens == summary.hit_tokens_by_tier["host"] + summary.hit_tokens_by_tier["disk"]


# Speculation


def speculating(*shares: float, **changes: object) -> SimulationOptions:
    return replace(NO_SEARCH, retrieval_s=1.0, speculation="dynamic", settle_shares=shares, **changes)  # type: ignore[arg-type]


def test_candidates_that_stand_from_the_first_stage_on_are_computed_while_the_search_goes_on() -> None:
    requests, prefill_s = [traced(0.0, "AB")], T(0, 2_010)
    assert 0.25 < prefill_s < 0.75
    assert ttfts(requests, speculating(1.0, 0.0, 0.0, 0.0)) == pytest.approx([1.0])
    assert ttfts(requests, speculating(0.0, 0.0, 1.0, 0.0)) == pytest.approx([0.75 + prefill_s])
    assert ttfts(requests, speculating(0.0, 0.0, 0.0, 1.0)) == pytest.approx([1.0 + prefill_s])


def test_a_misspeculation_that_ends_at_once_delays_no_request() -> None:
    never_right = speculating(0.0, 0.0, 0.0, 1.0)
    requests = [traced(10.0 * i, "AB") for i in range(4)]
    assert ttfts(requests, never_right) == pytest.approx(ttfts(requests, replace(never_right, speculation="none")))


def test_real_requests_go_before_speculative_ones() -> None:
    first, second = traced(0.0, "A", tokens=8_000), traced(0.1, "B")
    found = ttfts([first, traced(0.05, "C"), second], replace(speculating(1.0, 0.0, max_batch=1), retrieval_s=0.2))
    assert found[1] < found[2]


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30),
    documents=st.lists(st.sampled_from(["A", "AB", "BC", "CA", "D"]), min_size=30, max_size=30),
    max_batch=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_whatever_is_speculated_every_request_ends_once(
    gaps: list[float], documents: list[str], max_batch: int, seed: int
) -> None:
    now_s, requests = 0.0, []
    for gap_s, shown in zip(gaps, documents):  # noqa: B905 (as many requests as gaps)
        now_s += gap_s
        requests.append(traced(now_s, shown, output=2))
    options = speculating(0.3, 0.3, 0.2, 0.2, max_batch=max_batch, seed=seed, queue="cache-aware", gpu_tokens=2_500)
    found = records(requests, options)
    assert len(found) == len(requests)
    assert all(record.ttft_s >= 1.0 - 1e-9 for record in found)


def test_a_run_is_the_same_again() -> None:
    options = SimulationOptions(speculation="dynamic", order="cache_aware", queue="cache-aware")

    def told(result: SimulationResult) -> object:
        return result.requests, replace(result.summary, p50_decision_s=0.0, p99_decision_s=0.0)

    first, second = (simulate(TRACE, options, keeps_requests=True) for _ in range(2))
    assert told(first) == told(second)


def test_an_overload_is_reported_and_a_load_that_can_be_served_is_not() -> None:
    trace = make_trace(WORKLOADS["nq-small"], 200, seed=1)
    slow, fast = (replace(trace, arrival_s=trace.arrival_s * factor) for factor in (100.0, 0.001))
    assert simulate(slow, SimulationOptions()).notes == ()
    (note,) = simulate(fast, SimulationOptions()).notes
    assert re.fullmatch(r"[\d.]+ requests a second arrive and [\d.]+ are served: the queue only grows, .*", note)
