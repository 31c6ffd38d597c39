"""What a load on engines with and without chunk reuse comes to, and what parts of Cache-Craft are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragcache_core.bench.compare.sessions import Run
from ragcache_core.bench.quality import AskedAnswer, Question, Way
from tests.benchmarks.chunks import answers, context_size
from tests.benchmarks.chunks.load import SHARES, load_figures, peers, responses_s
from tests.benchmarks.report import Plan


def _run(peer: str, rate: int, ttft_s: float, duration_s: float) -> Run:
    times = (ttft_s, ttft_s)
    return Run(peer, 0, 0, rate, SHARES[rate], duration_s, times, (0.1, 0.1), 100, 0, 2 * 16, 0, cpu_s=3.0)


def test_a_response_ends_with_its_last_token() -> None:
    assert responses_s(_run("vllm", 0, 1.0, 8.0)) == [pytest.approx(2.5)] * 2


def test_what_reuse_is_worth_is_said_of_the_highest_rate_against_prefix_caching() -> None:
    last = len(SHARES) - 1
    waits = {"no-cache": 9.0, "vllm": 4.5, "ragcache": 3.5, "ragcache-chunks": 0.5}
    assert list(waits) == [peer.name for peer in peers()]
    runs = [_run(peer, rate, wait if rate == last else 0.5, wait) for peer, wait in waits.items() for rate in (0, last)]
    figures = {figure.key: figure for figure in load_figures(runs)}
    assert figures["load_response_ratio"].value == pytest.approx(6.0 / 2.0)
    assert figures["load_throughput_ratio"].value == pytest.approx(9.0)
    slowest = figures[f"load_{SHARES[last]:g}_no-cache_ms"]
    assert (slowest.value, slowest.baseline) == (10_500.0, 6_000.0)
    assert "1.50 core seconds a request" in slowest.note


def test_chunk_reuse_is_measured_with_a_flat_budget() -> None:
    """A model of random weights looks nowhere in particular, which no budget by attention means anything for."""
    reuse = peers()[-1].chunk_reuse
    assert reuse is not None
    assert reuse.max_recompute == 0.3
    assert reuse.alpha is not None
    assert reuse.alpha >= 1e6


def test_ablations_are_told_apart_by_right_answers_at_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(
        _plan: Plan, _model: str, _questions: Sequence[Question], ways: Sequence[Way]
    ) -> Iterator[tuple[Way, list[AskedAnswer]]]:
        for way in ways:
            is_right = way.chunks is None or way.chunks.focus == 0
            num_computed = 200 if way.chunks else 800
            yield (
                way,
                [
                    AskedAnswer(kind, "x", is_right, 0.5, 1000, num_computed, jaccard=0.25)
                    for kind in ("single-hop", "continued")
                ],
            )

    monkeypatch.setattr(answers, "asked", asked)
    monkeypatch.setattr(answers, "read_questions", lambda *_, **__: [])
    part = answers.measure_ablations(Plan("a-model", Path(), 0, True, lambda _: None, None))
    found = {figure.key: figure for figure in part.figures}
    assert len(found) == len(answers.ABLATIONS) == 4
    assert (found["em_ablation_no_focus"].value, found["em_ablation_no_CCI"].value) == (1.0, 0.0)
    assert "computed 0.250 of prefix caching; continued 0.000; ROUGE-L 0.500, Jaccard 0.250" in (
        found["em_ablation_no_CCI"].note
    )


def test_questions_of_every_size_are_answered_by_one_engine_and_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def asked(
        _plan: Plan, _model: str, questions: Sequence[Question], ways: Sequence[Way]
    ) -> Iterator[tuple[Way, list[AskedAnswer]]]:
        shown.extend(questions)
        for way in ways:
            yield (
                way,
                [
                    AskedAnswer(question.kind, "x", len(question.documents) < 12 or not way.chunks, 0.5, 100, 50)
                    for question in questions
                ],
            )

    monkeypatch.setattr(context_size, "asked", asked)
    part = context_size.measure_context_size(Plan("a-model", Path(), 0, True, lambda _: None, None))
    assert {len(question.documents) for question in shown} == {3, 5, 8, 12}
    assert len({document.text for question in shown for document in question.documents}) > 100
    found = {figure.key: figure for figure in part.figures}
    assert len(found) == len(context_size.SETTINGS) * len(context_size.WAYS)
    assert found["em_8_documents_30_percent_no_focus"].value == 1.0
    assert found["em_12_documents_30_percent_no_focus"].value == 0.0
    assert "continued 0.000 of 1.000; ROUGE-L 0.500; prompts of 100 tokens" in found["em_12_documents_30_percent"].note
