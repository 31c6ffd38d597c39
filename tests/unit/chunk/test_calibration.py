"""Alpha for a wanted quality: the least work that reaches it, by what was measured and not by luck."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import AlphaPoint, choose_alpha
from ragcache_core.chunk.calibration import smoothed
from ragcache_core.errors import ConfigError

POINTS = st.lists(
    st.builds(
        AlphaPoint, alpha=st.floats(0.0, 3.0), quality=st.floats(0.0, 1.0),
        recomputed=st.floats(0.0, 1.0), num_questions=st.integers(1, 500),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


def test_the_smallest_work_that_is_good_enough_is_chosen() -> None:
    points = [AlphaPoint(alpha, quality, alpha / 2) for alpha, quality in ((0, 0.6), (0.4, 0.8), (0.8, 0.9), (2, 1.0))]
    assert choose_alpha(points, 0.85).alpha == 0.8
    assert choose_alpha(points, 0.8).alpha == 0.4
    assert choose_alpha(points, 1.0).alpha == 2


def test_a_lucky_draw_at_a_small_alpha_does_not_win() -> None:
    points = [AlphaPoint(0.1, 0.95, 0.1, 10), AlphaPoint(0.5, 0.8, 0.3, 200), AlphaPoint(1.0, 0.94, 0.6, 200)]
    assert choose_alpha(points, 0.9).alpha == 1.0


@given(POINTS, st.floats(0.0, 1.0))
def test_no_measured_point_that_is_good_enough_computes_less(points: list[AlphaPoint], wanted: float) -> None:
    curve = smoothed(points)
    good = [point for point, quality in curve if quality >= wanted - 1e-9]
    if not good:
        with pytest.raises(ConfigError, match=r"is wanted; the best measured is .* ask for less"):
            choose_alpha(points, wanted)
        return
    chosen = choose_alpha(points, wanted)
    assert chosen in good
    assert chosen.recomputed == min(point.recomputed for point in good)


@given(POINTS)
def test_the_curve_never_falls_and_keeps_the_mean(points: list[AlphaPoint]) -> None:
    curve = smoothed(points)
    qualities = [quality for _, quality in curve]
    assert [point.alpha for point, _ in curve] == sorted(point.alpha for point in points)
    assert all(after >= before - 1e-9 for before, after in pairwise(qualities))
    weighed = sum(point.num_questions * quality for point, quality in curve)
    assert weighed == pytest.approx(sum(point.num_questions * point.quality for point in points))
