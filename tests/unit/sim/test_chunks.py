"""Chunks in the simulator: what is reused anywhere, what that costs, and that exact prefixes stay exact."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.policy import POLICIES
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.testbeds import TESTBEDS
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.tree import check_invariants

TESTBED = TESTBEDS["a10g-mistral-7b"]
T = TESTBED.cost.estimate_s
BLOCK = 4
LENGTHS = {"a": 8, "b": 11, "c": 3, "d": 1, "e": 17, "f": 24}
REUSE = SimulationOptions(
    policy="lru", retrieval_s=0.0, block_size=10, gpu_tokens=10_000, host_tokens=20_000, chunk_reuse=0.3
)


def traced(arrival_s: float, documents: str, *, tokens: int = 1_000, question: int = 10) -> TracedRequest:
    return TracedRequest(arrival_s, tuple(documents), (tokens,) * len(documents), question, 1)


def run(requests: list[TracedRequest], options: SimulationOptions = REUSE) -> SimulationResult:
    return simulate(Trace.from_requests(requests), options, keeps_requests=True)


def served_documents(result: SimulationResult) -> list[tuple[str, ...]]:
    assert result.requests is not None
    return [record.documents for record in result.requests]


def last_ttft_s(requests: list[TracedRequest], options: SimulationOptions = REUSE) -> float:
    records = run(requests, options).requests
    assert records is not None
    return records[-1].ttft_s


def test_documents_in_another_order_are_a_partial_prefill() -> None:
    requests = [traced(0.0, "ab"), traced(9.0, "ba")]
    assert last_ttft_s(requests) == pytest.approx(T(1_400, 610))
    assert last_ttft_s(requests, replace(REUSE, chunk_reuse=None)) == pytest.approx(T(0, 2_010))
    result = run(requests)
    assert served_documents(result) == [("miss", "miss"), ("chunk", "chunk")]
    assert result.summary.chunk_reused_tokens == 1_400
    assert result.summary.chunk_recomputed_tokens == 600
    assert result.summary.computed_tokens == 2_010 + 610


def test_documents_that_are_not_stored_are_computed_between_those_that_are() -> None:
    requests = [traced(0.0, "ab"), traced(9.0, "cbd")]
    assert last_ttft_s(requests) == pytest.approx(T(700, 2_310))
    assert served_documents(run(requests))[1] == ("miss", "chunk", "miss")


def test_what_was_computed_behind_a_reused_document_is_stored_too() -> None:
    requests = [traced(0.0, "a"), traced(9.0, "xab"), traced(18.0, "cb")]
    assert served_documents(run(requests))[1:] == [("miss", "chunk", "miss"), ("miss", "chunk")]


def test_an_exact_prefix_goes_before_chunks() -> None:
    requests = [traced(0.0, "ab"), traced(9.0, "ac"), traced(18.0, "acb")]
    assert served_documents(run(requests)) == [("miss", "miss"), ("gpu", "miss"), ("gpu", "gpu", "chunk")]
    assert last_ttft_s(requests) == pytest.approx(T(2_700, 310))


def test_a_slow_link_is_waited_for() -> None:
    requests = [traced(0.0, "ab", tokens=4_000), traced(9.0, "ba", tokens=4_000)]
    options = replace(REUSE, chunk_reuse=0.01, cost_model="a10g-llama2-7b")
    transfer_s = 2 * 3_960 / 2_048 / 11.5
    assert transfer_s > T(2 * 3_960, 90)
    assert last_ttft_s(requests, options) == pytest.approx(transfer_s)
    assert last_ttft_s(requests, replace(options, overlaps_transfers=False)) == pytest.approx(
        transfer_s + T(2 * 3_960, 90)
    )


def test_a_chunk_that_left_the_host_comes_from_the_disk() -> None:
    options = replace(REUSE, host_tokens=2_000, disk_tokens=8_000, overlaps_transfers=False)
    transfer_s = 700 / 8_192 / 11.5 + 700 / 8_192 / 2.0
    requests = [traced(0.0, "a"), traced(9.0, "b"), traced(18.0, "ca")]
    assert last_ttft_s(requests, options) == pytest.approx(T(700, 1_310) + transfer_s)
    assert served_documents(run(requests, replace(options, disk_tokens=0)))[2] == ("miss", "miss")


def test_a_document_of_another_length_is_another_chunk() -> None:
    requests = [traced(0.0, "a"), traced(9.0, "ca", tokens=900)]
    assert served_documents(run(requests))[1] == ("miss", "miss")


def test_computing_everything_again_is_no_reuse() -> None:
    trace = make_trace(WORKLOADS["sysx"], 60, seed=1)
    everything = SimulationOptions(chunk_reuse=1.0, chunk_share=0.25, host_tokens=80_000)
    without = SimulationOptions(host_tokens=60_000)
    found = simulate(trace, everything, keeps_requests=True)
    assert found.requests == simulate(trace, without, keeps_requests=True).requests
    assert found.summary.chunk_reused_tokens == found.summary.chunk_recomputed_tokens == 0


def test_documents_that_recur_with_other_neighbours_are_computed_less_often() -> None:
    trace = make_trace(WORKLOADS["sysx"], 80, seed=2)
    exact = SimulationOptions(host_tokens=262_144)
    few = [simulate(trace, replace(exact, chunk_reuse=fraction)).summary for fraction in (0.0, 0.15, 0.3)]
    computed = [summary.computed_tokens for summary in few]
    assert computed == sorted(computed)
    assert computed[-1] < simulate(trace, exact).summary.computed_tokens
    assert few[-1].mean_ttft_s < simulate(trace, exact).summary.mean_ttft_s


def asked(documents: str, question_tokens: int, output_tokens: int) -> TracedRequest:
    return TracedRequest(
        0.0, tuple(documents), tuple(LENGTHS[name] for name in documents), question_tokens, output_tokens
    )


def tokens_of(request: TracedRequest, number: int, system_tokens: int) -> list[Hashable]:
    """Return one thing for each token of a prompt, the same where the tokens are the same."""
    tokens: list[Hashable] = [("system", i) for i in range(system_tokens)]
    for name, length in zip(request.doc_ids, request.doc_tokens, strict=True):
        tokens += [(name, i) for i in range(length)]
    return tokens + [(number, i) for i in range(request.question_tokens)]


def num_common(one: list[Hashable], other: list[Hashable]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            asked,
            st.lists(st.sampled_from("abcdef"), max_size=4).map("".join),
            st.integers(0, 9),
            st.integers(1, 14),
        ),
        max_size=25,
    ),
    policy=st.sampled_from((*POLICIES, INFINITE)),
    fraction=st.sampled_from((0.0, 0.1, 0.3, 1.0)),
    system_tokens=st.sampled_from((0, 3, 10)),
    host=st.integers(2, 30),
    disk=st.sampled_from((0, 40)),
)
def test_every_token_is_cached_or_reused_or_computed_and_only_exact_ones_are_cached(
    requests: list[TracedRequest],
    policy: str,
    fraction: float,
    system_tokens: int,
    host: int,
    disk: int,
) -> None:
    options = SimulationOptions(
        policy=policy,
        block_size=BLOCK,
        gpu_tokens=40 * BLOCK,
        host_tokens=host * BLOCK,
        disk_tokens=disk * BLOCK,
        system_tokens=system_tokens,
        chunk_reuse=fraction,
    )
    cache = BlockCache(options, TESTBED.cost)
    exact: list[list[Hashable]] = [tokens_of(asked("", 0, 1), 0, system_tokens)]
    for number, request in enumerate(requests):
        tokens = tokens_of(request, number, system_tokens)
        longest = max(num_common(tokens, known) for known in exact)
        served = cache.serve(request, number)
        reuse = served.reuse
        assert served.num_cached_tokens + reuse.num_tokens + served.num_new_tokens == len(tokens)
        assert served.num_cached_tokens <= longest, "approximate KV was found as if it were exact"
        assert served.num_new_tokens >= reuse.num_recomputed_tokens + request.question_tokens * (
            served.num_cached_tokens < len(tokens) - request.question_tokens
        )
        if reuse.documents:
            lengths = [request.doc_tokens[place] for place in reuse.documents]
            assert reuse.num_tokens + reuse.num_recomputed_tokens <= sum(lengths)
            assert reuse.num_recomputed_tokens >= fraction * (reuse.num_tokens + reuse.num_recomputed_tokens) - 1e-6
            assert reuse.num_recomputed_tokens <= sum(math.ceil(fraction * length) for length in lengths)
        assert (reuse.num_tokens > 0) == (reuse.first_token is not None) == bool(reuse.documents)
        assert fraction < 1.0 or not reuse.documents
        exact.append(tokens[: reuse.first_token])
        check_invariants(cache.tree, is_connected=False)


def test_what_is_reused_reports_where_it_was() -> None:
    trace = make_trace(WORKLOADS["nq-small"], 60, seed=3)
    options = replace(REUSE, policy="mixture", gpu_tokens=16_384, host_tokens=32_768, disk_tokens=65_536)
    summary = simulate(trace, options).summary
    prompts = int(trace.doc_tokens.sum()) + int(trace.question_tokens.sum())
    cached = sum(summary.hit_tokens_by_tier.values())
    assert cached + summary.chunk_reused_tokens + summary.computed_tokens == prompts
    assert summary.chunk_reused_tokens > 0
    assert summary.chunk_recomputed_tokens >= 0.3 / 0.7 * summary.chunk_reused_tokens
