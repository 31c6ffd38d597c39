"""What is remembered of earlier searches: which stages are worth a start."""

from __future__ import annotations

import itertools

import pytest

from ragcache_core.speculation import SpeculativePipeline, StageStabilityStats, Start

RIGHT, WRONG = ("sun", "moon"), ("mars", "venus")


def after(
    history: StageStabilityStats, stage: int, candidates: tuple[str, ...], searches: int, *, left_s: float = 1.0
) -> StageStabilityStats:
    for _ in range(searches):
        history.record(stage, candidates, RIGHT, left_s)
    return history


def test_a_stage_that_is_not_known_yet_is_trusted_with_idle_time_alone() -> None:
    for right, searches in itertools.product((RIGHT, WRONG), range(3)):
        history = after(StageStabilityStats(), 0, right, searches)
        for stage in range(2):
            assert history.is_worthwhile(stage, is_idle=True)
            assert not history.is_worthwhile(stage, is_idle=False)
            assert not history.is_known(stage)
    history = after(StageStabilityStats(), 0, RIGHT, 3)
    assert history.is_known(0)
    assert history.is_worthwhile(0, is_idle=False)


def test_a_stage_that_is_wrong_again_and_again_is_tried_no_more() -> None:
    history = after(StageStabilityStats(), 0, WRONG, 20)
    assert not history.is_worthwhile(0, is_idle=True)
    assert history.is_worthwhile(1, is_idle=True)


def test_rarely_correct_speculations_use_idle_time_only() -> None:
    history = after(after(StageStabilityStats(), 0, RIGHT, 3), 0, WRONG, 5)
    assert history.is_worthwhile(0, is_idle=True)
    assert not history.is_worthwhile(0, is_idle=False)


def test_the_first_searches_have_equal_weight_and_later_ones_replace_them() -> None:
    history = after(after(StageStabilityStats(), 0, WRONG, 2), 0, RIGHT, 2)
    assert history.learnt == {0: (pytest.approx(0.5), 1.0, 4)}
    of_late = after(history, 0, WRONG, 3, left_s=0.0).learnt[0]
    assert (of_late.share, of_late.left_s) == pytest.approx((0.5 * 0.8**3, 0.8**3))


def test_what_was_learnt_is_where_another_history_begins() -> None:
    history = after(after(StageStabilityStats(), 0, WRONG, 9), 1, RIGHT, 9)
    again = StageStabilityStats(history.learnt)
    assert (again.is_worthwhile(0, is_idle=True), again.is_worthwhile(1, is_idle=False)) == (False, True)
    after(again, 0, RIGHT, 9)
    assert not history.is_worthwhile(0, is_idle=True), "each learns by itself"


def test_searches_with_only_wrong_stages_are_never_worthwhile_until_one_is_right() -> None:
    history = StageStabilityStats()
    assert not history.never_worthwhile
    for stage in range(3):
        after(history, stage, WRONG, 20)
    assert history.never_worthwhile
    history.record(1, RIGHT, RIGHT, 1.0)
    assert not history.never_worthwhile


def test_nothing_is_started_or_put_off_for_candidates_that_do_not_promise_anything() -> None:
    pipeline: SpeculativePipeline[str] = SpeculativePipeline(max_prefill_bs=4)
    assert pipeline.on_stage("a", is_final=False, num_pending=0, is_worthwhile=False) == []
    assert not pipeline.is_deferred
    assert pipeline.on_load(0) == []
    assert pipeline.on_stage("b", is_final=False, num_pending=9) == []
    assert pipeline.is_deferred
    assert pipeline.on_stage("c", is_final=False, num_pending=9, is_worthwhile=False) == []
    assert pipeline.on_load(0) == []
    assert pipeline.on_stage("d", is_final=False, num_pending=0) == [Start(0, "d")]
