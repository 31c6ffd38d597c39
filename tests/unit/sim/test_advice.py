"""Advice is the simulator's own figures for one change at a time, and what each document costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ragcache_core.sim.advice import Advice, advise, changes
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.testbeds import load_testbed
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

NOW = SimulationOptions(gpu_tokens=4_000, host_tokens=8_000, block_size=10, warm_up=20)


def outcomes(advice: Advice) -> dict[str, float]:
    return {outcome.change.name: outcome.prefill_s for outcome in advice.outcomes}


def request(number: int, *docs: str) -> TracedRequest:
    return TracedRequest(float(10 * number), docs, (1_000,) * len(docs), question_tokens=10, output_tokens=1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(replace(WORKLOADS["mmlu"], mean_tokens=600.0, most_tokens=1_500), 60, seed=3)


@pytest.fixture(scope="module")
def advice(trace: Trace) -> Advice:
    return advise(trace, NOW, price_per_hour=2.0)


def test_each_line_is_the_simulation_that_its_options_describe(trace: Trace, advice: Advice) -> None:
    assert len(advice.outcomes) > 8
    for outcome in (advice.now, *advice.outcomes):
        if not outcome.change.num_fewer:
            summary = simulate(trace, outcome.change.options).summary
            assert outcome.mean_ttft_s == pytest.approx(summary.mean_ttft_s)
            assert outcome.token_hit_rate == summary.token_hit_rate
            assert outcome.prefill_s == 1000 * summary.prefill_s / summary.num_requests


def test_one_thing_differs_from_now_in_each_line(trace: Trace) -> None:
    for change in changes(NOW, trace):
        differing = [name for name, value in change.options.to_dict().items() if value != NOW.to_dict()[name]]
        assert len(differing) + (change.num_fewer > 0) == 1, change.name


@pytest.mark.parametrize(
    "now",
    [
        replace(NOW, host_tokens=0),
        replace(NOW, disk_tokens=50_000),
        replace(NOW, order="cache_aware", queue="cache-aware", speculation="dynamic", chunk_reuse=0.1),
    ],
)
def test_what_an_engine_has_is_not_advised_again(now: SimulationOptions, trace: Trace) -> None:
    names = [change.name for change in changes(now, trace)]
    assert len(names) == len(set(names))
    assert all(change.options != now or change.num_fewer for change in changes(now, trace))


def test_a_trace_of_conversations_is_advised_on_without_chunk_reuse() -> None:
    turns = [TracedRequest(float(i), ("a",), (100,), 10, 5, conversation=i % 3) for i in range(12)]
    advice = advise(Trace.from_requests(turns), replace(NOW, warm_up=0))
    assert "a second engine" in outcomes(advice)
    assert not [name for name in outcomes(advice) if "chunk" in name]


def test_a_price_is_that_of_the_gpu_time_that_is_saved(advice: Advice, trace: Trace) -> None:
    for outcome in advice.outcomes:
        assert outcome.saved == pytest.approx((advice.now.prefill_s - outcome.prefill_s) * 1000 / 3600 * 2.0)
    assert all(outcome.saved is None for outcome in advise(trace, NOW).outcomes)


def test_memory_that_holds_what_comes_again_saves_its_prefill_and_nothing_else_does() -> None:
    requests = [request(number, f"d{number % 14}") for number in range(100)]
    advice = advise(Trace.from_requests(requests), NOW)
    saved = {name for name, prefill_s in outcomes(advice).items() if prefill_s < 0.9 * advice.now.prefill_s}
    assert saved >= {"host memory x 2", "host memory x 4", "a disk of 8 x host memory"}
    assert "cache-aware queue" not in saved


def test_two_engines_hold_more_than_one_and_no_more_than_one_twice_as_large() -> None:
    requests = [request(number, f"d{number % 14}") for number in range(100)]
    advice = advise(Trace.from_requests(requests), NOW)
    second = next(outcome for outcome in advice.outcomes if outcome.change.options.replicas == 2)
    doubled = simulate(Trace.from_requests(requests), replace(NOW, gpu_tokens=8_000, host_tokens=16_000)).summary
    assert advice.now.token_hit_rate < second.token_hit_rate <= doubled.token_hit_rate


def test_a_prompt_loses_its_last_document_but_never_its_only_one() -> None:
    requests = [request(number, "a", f"new {number}") if number % 2 else request(number, "a") for number in range(100)]
    advice = advise(Trace.from_requests(requests), replace(NOW, warm_up=1))
    fewer = next(outcome for outcome in advice.outcomes if outcome.change.num_fewer)
    assert fewer.token_hit_rate == 1.0
    assert advice.now.token_hit_rate == pytest.approx(99 / 149)


def test_a_documents_cost_is_its_share_of_the_prefills_that_computed_it() -> None:
    requests = [request(0, "a"), request(1, "b", "c"), request(2, "b", "c"), request(3, "b", "d")]
    advice = advise(Trace.from_requests(requests), replace(NOW, warm_up=1))
    cost = load_testbed(NOW.cost_model).cost
    first_s, last_s = cost.estimate_s(0, 2_010), cost.estimate_s(1_000, 1_010)
    found: dict[str, Any] = {each.doc_id: (each.num_uses, each.num_misses, each.prefill_s) for each in advice.documents}
    assert found == {
        "b": (3, 1, pytest.approx(first_s * 1_000 / 2_010)),
        "c": (2, 1, pytest.approx(first_s * 1_000 / 2_010)),
        "d": (1, 1, pytest.approx(last_s * 1_000 / 1_010)),
    }
    assert [each.prefill_s for each in advice.documents] == sorted((f[2] for f in found.values()), reverse=True)
