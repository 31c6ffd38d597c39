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


@pytest.mark.parametrize("goal", [0.5, 0.6, 0.95])
def test_how_often_the_primary_comes_first_can_be_chosen(goal: float) -> None:
    workload = replace(WORKLOADS["mmlu"], primary_first=goal)
    drawn = draw_retrievals(workload, LONG, 1)
    assert np.mean(drawn.docs[:, 0] == drawn.primaries) == pytest.approx(goal, abs=0.03)


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


def test_natural_questions_are_flatter_and_the_small_corpus_is_flatter_still() -> None:
    mmlu, nq, small = (popularity_share(make_trace(WORKLOADS[w], LONG, 1), 0.03) for w in ("mmlu", "nq", "nq-small"))
    assert mmlu > 1.5 * nq > 3 * small


@pytest.mark.parametrize(("name", "count"), [("nq", 100_000), ("nq-small", 400)])
def test_requests_reach_the_whole_corpus_of_natural_questions(name: str, count: int) -> None:
    trace = make_trace(WORKLOADS[name], 200_000, 1)
    assert 0.6 * count < len(trace.doc_ids) <= count


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


def test_questions_have_a_median_of_32_tokens() -> None:
    questions = make_trace(WORKLOADS["mmlu"], LONG, 1).question_tokens
    assert np.median(questions) == pytest.approx(32, abs=1)
    assert questions.min() >= 1


def test_answers_are_one_token_or_mostly_few() -> None:
    assert set(make_trace(WORKLOADS["mmlu"], 500, 1).output_tokens.tolist()) == {1}
    answers = make_trace(WORKLOADS["nq"], 100_000, 1).output_tokens
    assert answers.mean() == pytest.approx(6, abs=0.2)
    assert np.mean(answers <= 32) == pytest.approx(0.99, abs=0.003)
    assert answers.min() >= 1


def test_arrivals_are_poissons_at_the_rate() -> None:
    gaps_s = np.diff(make_trace(replace(SMALL, requests_per_s=2.5), 100_000, 1).arrival_s)
    assert gaps_s.mean() == pytest.approx(0.4, rel=0.01)
    assert gaps_s.std() == pytest.approx(0.4, rel=0.02)
    assert np.mean(gaps_s > 0.4) == pytest.approx(np.exp(-1), abs=0.01)


def test_a_request_retrieves_different_documents_that_lie_near_each_other() -> None:
    drawn = draw_retrievals(SMALL, 2_000, 0)
    apart = (drawn.docs - drawn.primaries[:, None]) % SMALL.num_documents
    assert np.minimum(apart, SMALL.num_documents - apart).max() == 4
    assert np.all(drawn.docs[:, 0] != drawn.docs[:, 1])


def test_the_same_documents_come_back_together() -> None:
    pairs = Counter(frozenset(row) for row in draw_retrievals(SMALL, LONG, 0).docs.tolist())
    assert pairs.most_common(1)[0][1] > LONG / 100


def hottest(primaries: np.ndarray[Any, Any]) -> set[int]:
    return {doc for doc, _ in Counter(primaries.tolist()).most_common(20)}


def test_drift_changes_what_is_popular_and_only_drift_does() -> None:
    still, drifting = (draw_retrievals(WORKLOADS[name], 30_000, 0).primaries for name in ("mmlu", "drift"))
    assert len(hottest(still[:1_500]) & hottest(still[-1_500:])) > 10
    assert len(hottest(drifting[:1_500]) & hottest(drifting[-1_500:])) < 5
    first, second = hottest(drifting[:1_500]), hottest(drifting[1_500:3_000])
    assert 8 < len(first & second) < 20  # a quarter of the popular has changed


def repeats(primaries: np.ndarray[Any, Any]) -> float:
    """Return how many requests are about what one of the last 40 was about."""
    return sum(p in primaries[i - 40 : i] for i, p in enumerate(primaries[40:], 40)) / (len(primaries) - 40)


def test_a_quarter_of_the_requests_of_drift_come_back_to_a_topic() -> None:
    flat = Workload(num_documents=1_000_000, skew=0, shift=0, repeat_share=0.25)  # chance repeats nothing here
    assert repeats(draw_retrievals(flat, LONG, 1).primaries) == pytest.approx(0.25, abs=0.02)
    assert repeats(draw_retrievals(replace(flat, repeat_share=0.0), LONG, 1).primaries) < 0.001
    assert WORKLOADS["drift"].repeat_share == 0.25


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.6])
def test_popular_documents_are_long_or_short_if_asked(correlation: float) -> None:
    workload = replace(SMALL, skew=1.0, shift=0.0, length_correlation=correlation)
    counts = np.bincount(draw_retrievals(workload, 1_000_000, 1).primaries, minlength=workload.num_documents)
    logarithms = np.log(document_tokens(workload, 1))
    assert np.corrcoef(np.argsort(np.argsort(counts)), logarithms)[0, 1] == pytest.approx(correlation, abs=0.06)
    assert logarithms.std() == pytest.approx(0.7, rel=0.05)


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


def test_progress_counts_every_request() -> None:
    told: list[int] = []
    make_trace(WORKLOADS["drift"], 4_000, 1, progress=told.append)
    assert told == [1_500, 1_500, 1_000]


@pytest.mark.parametrize(
    ("name", "value"),
    [(f.name, -2) for f in fields(Workload) if f.name != "length_correlation"]
    + [("num_documents", 1.5), ("skew", float("nan")), ("length_correlation", 1.01), ("primary_first", True)],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value}: it must be a"):
        replace(SMALL, **{name: value})


def test_settings_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="retrieves 5 documents of 3"):
        replace(SMALL, num_documents=3, documents_per_request=5)
    with pytest.raises(ConfigError, match="cannot all have 64 to 100"):
        replace(SMALL, most_tokens=100)
    with pytest.raises(ConfigError, match="at least 1"):
        make_trace(SMALL, 0, 1)
    with pytest.raises(ConfigError, match="seed of 0 or more"):
        make_trace(SMALL, 1, -1)
