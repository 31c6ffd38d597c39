"""Generated traces have the statistics that were published, and are the same for the same seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.reuse import popularity_share, summarize
from ragcache_core.sim.traces.trace import Trace
from ragcache_core.sim.traces.workload import WORKLOADS, Workload, document_tokens, draw_retrievals, make_trace

LONG = 15_000
SEEDS = (11, 12, 13)
SMALL = Workload(num_documents=2_000, skew=1.3, shift=2.0)


def prompt_tokens(trace: Trace) -> np.ndarray[Any, Any]:
    return np.array([sum(request.doc_tokens) + request.question_tokens for request in trace])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_trace_and_another_seed_another(name: str) -> None:
    assert make_trace(WORKLOADS[name], 300, 3) == make_trace(WORKLOADS[name], 300, 3)
    assert make_trace(WORKLOADS[name], 300, 3) != make_trace(WORKLOADS[name], 300, 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_longer_trace_begins_with_the_shorter(name: str) -> None:
    assert make_trace(WORKLOADS[name], 40_000, 5).head(3_100) == make_trace(WORKLOADS[name], 3_100, 5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_primary_comes_first_three_times_in_four(name: str) -> None:
    shares = []
    for seed in SEEDS:
        drawn = draw_retrievals(WORKLOADS[name], LONG, seed)
        shares.append(float(np.mean(drawn.docs[:, 0] == drawn.primaries)))
    assert np.mean(shares) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("name", WORKLOADS)
def test_documents_have_the_published_lengths(name: str) -> None:
    workload = WORKLOADS[name]
    lengths = document_tokens(workload, 1)
    assert len(lengths) == workload.num_documents
    assert lengths.min() >= workload.least_tokens
    assert lengths.max() <= workload.most_tokens
    if name in ("mmlu", "nq", "drift"):
        assert lengths.mean() == pytest.approx(1_900, rel=0.03)
        assert np.log(lengths).std() == pytest.approx(0.7, rel=0.02)


def test_what_is_retrieved_has_the_lengths_of_the_documents() -> None:
    trace, lengths = make_trace(SMALL, 500, 1), document_tokens(SMALL, 1)
    for request in trace:
        assert request.doc_tokens == tuple(lengths[int(doc_id[1:])] for doc_id in request.doc_ids)


def test_popular_documents_of_mmlu_get_sixty_per_cent_of_the_retrievals() -> None:
    shares = [popularity_share(make_trace(WORKLOADS["mmlu"], LONG, seed), 0.03) for seed in SEEDS]
    assert np.mean(shares) == pytest.approx(0.6, abs=0.04)


def test_an_hour_of_mmlu_repeats_as_much_as_it_should() -> None:
    """Three fifths of an hour's retrievals are hits of an endless cache of prefixes."""
    shares = [summarize(make_trace(WORKLOADS["mmlu"], 2_880, seed)).repeated_prefix for seed in SEEDS]
    assert np.mean(shares) == pytest.approx(0.6, abs=0.04)


def test_a_production_systems_statistics() -> None:
    workload = WORKLOADS["sysx"]
    traces = [make_trace(workload, LONG, seed) for seed in range(8)]
    count = workload.num_documents
    assert np.mean([popularity_share(t, 0.05, count) for t in traces]) == pytest.approx(0.60, abs=0.04)
    assert np.mean([popularity_share(t, 0.135, count) for t in traces]) == pytest.approx(0.85, abs=0.03)
    prompts = np.concatenate([prompt_tokens(t) for t in traces])
    assert np.median(prompts) == pytest.approx(3_300, rel=0.05)
    assert prompts.min() >= 1_000
    assert prompts.max() <= 20_000
    assert {len(request.doc_ids) for request in traces[0]} == {5}
    assert prompts.mean() / np.mean([t.output_tokens.mean() for t in traces]) == pytest.approx(19.3, rel=0.1)


def test_a_request_retrieves_different_documents_that_lie_near_each_other() -> None:
    drawn = draw_retrievals(SMALL, 2_000, 0)
    apart = (drawn.docs - drawn.primaries[:, None]) % SMALL.num_documents
    assert np.minimum(apart, SMALL.num_documents - apart).max() == 4
    assert np.all(drawn.docs[:, 0] != drawn.docs[:, 1])


def hottest(primaries: np.ndarray[Any, Any]) -> set[int]:
    return {doc for doc, _ in Counter(primaries.tolist()).most_common(20)}


def test_drift_changes_what_is_popular_and_only_drift_does() -> None:
    still, drifting = (draw_retrievals(WORKLOADS[name], 30_000, 0).primaries for name in ("mmlu", "drift"))
    assert len(hottest(still[:1_500]) & hottest(still[-1_500:])) > 10
    assert len(hottest(drifting[:1_500]) & hottest(drifting[-1_500:])) < 5
    first, second = hottest(drifting[:1_500]), hottest(drifting[1_500:3_000])
    assert 8 < len(first & second) < 20  # a quarter of the popular has changed


@settings(max_examples=30, deadline=None)
@given(
    num_documents=st.integers(1, 60), k=st.integers(1, 30), count=st.integers(1, 40), seed=st.integers(0, 2**32),
    drift_every=st.integers(0, 10), repeat_share=st.floats(0, 1), skew=st.floats(0, 5), goal=st.floats(0, 1),
)  # fmt: skip
def test_any_workload_gives_a_trace_that_can_be(
    num_documents: int, k: int, count: int, seed: int, drift_every: int, repeat_share: float, skew: float, goal: float
) -> None:
    workload = Workload(
        num_documents=num_documents, skew=skew, shift=1.0, documents_per_request=min(k, num_documents),
        drift_every=drift_every, repeat_share=repeat_share, primary_first=goal,
    )  # fmt: skip
    trace = make_trace(workload, count, seed)
    assert Trace.from_requests(list(trace)) == trace  # which checks every request
    assert len(trace) == count
    assert all(len(set(request.doc_ids)) == workload.documents_per_request for request in trace)


@pytest.mark.parametrize(
    ("name", "value"),
    [(f.name, -2) for f in fields(Workload) if f.name != "length_correlation"]
    + [("num_documents", 1.5), ("skew", float("nan")), ("length_correlation", 1.01), ("primary_first", True)],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value}: it must be a"):
        replace(SMALL, **{name: value})
