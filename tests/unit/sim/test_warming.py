"""What is picked to be warmed is within the budget, never without what stands before it, and what saves most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.sim.warming import LEAST_REQUESTS, WarmPath, forecast, forecast_later, pick_paths

COST = PrefillCostModel.default()


def trace_of(*prompts: str, num_tokens: int = 100) -> Trace:
    """Return a trace of prompts whose documents are single letters."""
    return Trace.from_requests(
        TracedRequest(10.0 * i, tuple(docs), (num_tokens,) * len(docs), 10, 1) for i, docs in enumerate(prompts)
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    lengths = draw(st.lists(st.integers(1, 900), min_size=6, max_size=6))
    prompts = draw(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), min_size=1, max_size=30))
    return Trace.from_requests(
        TracedRequest(float(i), tuple(f"d{d}" for d in docs), tuple(lengths[d] for d in docs), 5, 1)
        for i, docs in enumerate(prompts)
    )


@given(traces(), st.integers(0, 4_000), st.integers(0, 200), st.booleans())
def test_a_pick_is_never_over_the_budget_and_never_without_its_prefix(
    trace: Trace, budget: int, system_tokens: int, anywhere: bool
) -> None:
    paths = pick_paths(trace, budget, COST, system_tokens=system_tokens, anywhere=anywhere)
    assert not paths or system_tokens + sum(path.doc_tokens[-1] for path in paths) <= budget
    seen = {()}
    for path in paths:
        assert path.doc_ids not in seen, "each once"
        assert path.doc_ids[:-1] in seen
        assert 1 <= path.expected_uses <= 1000
        seen.add(path.doc_ids)
        assert len(path.doc_ids) == 1 or not anywhere
    if budget >= 4_000 + system_tokens and not anywhere:
        assert len(paths) > 0 or not any(request.doc_ids for request in trace)


def test_with_room_for_all_everything_that_was_retrieved_is_picked_with_its_share_of_requests() -> None:
    paths = pick_paths(trace_of("ab", "ab", "ac", "b"), 10_000, COST)
    uses = {"".join(path.doc_ids): path.expected_uses for path in paths}
    assert uses == {"a": 750, "ab": 500, "ac": 250, "b": 250}


def test_the_most_used_documents_that_fit_are_picked_without_those_after_a_misfit() -> None:
    trace = Trace.from_requests(
        TracedRequest(float(i), docs, tokens, 10, 1)
        for i, (docs, tokens) in enumerate(
            [(("long", "behind"), (5_000, 10))] * 9 + [(("a", "b"), (300, 300))] * 5 + [(("c",), (300,))] * 2
        )
    )
    assert ["".join(path.doc_ids) for path in pick_paths(trace, 700, COST)] == ["a", "ab"]
    assert ["".join(path.doc_ids) for path in pick_paths(trace, 950, COST)] == ["a", "ab", "c"]


def test_chunks_that_are_reused_anywhere_count_wherever_they_stood() -> None:
    paths = pick_paths(trace_of("ab", "cb", "db"), 100, COST, anywhere=True)
    assert [(path.doc_ids, path.expected_uses) for path in paths] == [(("b",), 1000)]


def test_nothing_fits_beside_a_prefix_that_is_longer_than_the_budget() -> None:
    assert pick_paths(trace_of("a"), 100, COST, system_tokens=50) == []


@pytest.mark.parametrize(("policy", "reuse"), [("mixture", None), ("pgdsf", 0.3)])
def test_a_warmed_start_is_forecast_to_be_faster_than_a_cold_one(policy: str, reuse: float | None) -> None:
    trace = make_trace(WORKLOADS["mmlu"], 100, seed=1)
    options = SimulationOptions(policy=policy, gpu_tokens=60_000, host_tokens=120_000, chunk_reuse=reuse)
    paths = pick_paths(trace, 40_000, COST, anywhere=reuse is not None)
    told: list[int] = []
    found = forecast(trace, options, paths, progress=told.append)
    assert found.num_requests == 100
    assert sum(told) == 200
    assert found.cold.mean_ttft_s == simulate(trace, options).summary.mean_ttft_s
    assert 1 > found.warm.cached_share > found.cold.cached_share > 0
    assert found.warm.mean_ttft_s < found.cold.mean_ttft_s


def test_a_forecast_replays_no_request_that_its_paths_were_picked_from() -> None:
    options = SimulationOptions(gpu_tokens=4_000, host_tokens=0, system_tokens=32)

    def pick(trace: Trace) -> list[WarmPath]:
        return pick_paths(trace, 2_000, COST, system_tokens=32)

    others = trace_of(*["ab"] * 20, *["cd"] * 20)
    (alone,) = forecast_later(others, options, pick)
    assert alone.num_requests == 20
    assert alone.num_tokens == 232, "of ab"
    assert alone.warm.cached_share - alone.cold.cached_share < 0.01, "the system tokens of the first request alone"
    same = trace_of(*["ab", "cd"] * 20)
    quarter, half, whole = forecast_later(same, options, pick, num_parts=3)
    assert [found.num_tokens for found in (quarter, half, whole)] == [0, 132, 432]
    assert quarter.cold == half.cold == whole.cold == quarter.warm
    assert quarter.warm.cached_share < half.warm.cached_share < whole.warm.cached_share


def test_a_forecast_starts_at_the_first_request_that_it_replays() -> None:
    trace = make_trace(WORKLOADS["mmlu"], 100, seed=1)
    options = SimulationOptions(gpu_tokens=60_000, host_tokens=120_000)
    (found,) = forecast_later(trace, options, lambda earlier: pick_paths(earlier, 40_000, COST))
    later = [replace(request, arrival_s=request.arrival_s - trace[50].arrival_s) for request in list(trace)[50:]]
    assert found == forecast(Trace.from_requests(later), options, pick_paths(trace.head(50), 40_000, COST))


def test_a_few_requests_give_no_forecast() -> None:
    few = trace_of(*["ab"] * (LEAST_REQUESTS - 1))
    options = SimulationOptions(gpu_tokens=4_000, host_tokens=0)
    assert forecast_later(few, options, lambda trace: pick_paths(trace, 2_000, COST)) == []


def test_what_is_too_long_for_the_gpu_is_left_out_of_a_forecast() -> None:
    trace = trace_of("a", "abcdef", "a", num_tokens=160)
    options = SimulationOptions(gpu_tokens=480, host_tokens=0)
    paths = pick_paths(trace, 10_000, COST)
    assert len(paths) == 6
    found = forecast(trace, options, paths)
    assert found.num_requests == 2
    assert found.warm.cached_share > found.cold.cached_share
    with pytest.raises(ConfigError, match="gpu_tokens"):
        forecast(trace, SimulationOptions(gpu_tokens=64, host_tokens=0), [])


def test_warmed_documents_are_hits_of_the_first_request_that_are_kept_by_their_expected_uses() -> None:
    trace = trace_of("x", "y", "a", num_tokens=160)
    warmed = [(TracedRequest(0.0, ("a",), (160,), 0, 1), 500)]
    options = SimulationOptions(policy="lfu", gpu_tokens=480, host_tokens=0, system_tokens=32)
    found = simulate(trace, options, keeps_requests=True, warmed=warmed)
    assert found.requests is not None
    assert [record.documents for record in found.requests] == [("miss",), ("miss",), ("gpu",)]
    assert [record.cached_tokens for record in found.requests] == [32, 32, 192]
    with pytest.raises(ConfigError, match="leave warming out"):
        simulate(trace, SimulationOptions(replicas=2), warmed=warmed)
