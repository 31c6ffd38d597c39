"""The prefill cost model: exact where it was measured, sensible between and beyond, strict about its data."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.policy.prefill_cost import PrefillCostModel

MODEL = PrefillCostModel((0, 128, 512), (32, 64, 256), ((0.1, 0.2, 0.8), (0.2, 0.4, 1.0), (0.3, 0.8, 2.0)))


def axes(smallest: int) -> st.SearchStrategy[list[int]]:
    lengths = st.integers(smallest, 1 << 17)
    return st.lists(lengths, min_size=2, max_size=6, unique=True).map(sorted)


@st.composite
def models(draw: st.DrawFn, *, ascending: bool = False) -> PrefillCostModel:
    """A profile of any times, or of times that grow with both lengths."""
    cached, new = draw(axes(0)), draw(axes(1))
    times = st.floats(1e-4, 100.0)
    rows = [[draw(times) for _ in new] for _ in cached]
    if ascending:
        rows = [[sum(rows[k][m] for k in range(i + 1) for m in range(j + 1)) for j in range(len(new))]
                for i in range(len(cached))]  # fmt: skip
    return PrefillCostModel(tuple(cached), tuple(new), tuple(map(tuple, rows)))


def inside(data: st.DataObject, axis: tuple[int, ...]) -> int:
    return data.draw(st.integers(axis[0], axis[-1]))


@given(models(), st.data())
def test_inside_a_cell_it_is_between_the_corners(model: PrefillCostModel, data: st.DataObject) -> None:
    cached, new = inside(data, model.cached_tokens), inside(data, model.new_tokens)
    rows = [i for i, (low, high) in enumerate(pairwise(model.cached_tokens)) if low <= cached <= high]
    columns = [j for j, (low, high) in enumerate(pairwise(model.new_tokens)) if low <= new <= high]
    i, j = rows[0], columns[0]
    corners = [model.seconds[k][m] for k in (i, i + 1) for m in (j, j + 1)]
    assert min(corners) * (1 - 1e-12) <= model.estimate_s(cached, new) <= max(corners) * (1 + 1e-12)


@given(models(ascending=True), st.data())
def test_where_the_profile_grows_along_an_axis_the_estimate_does(model: PrefillCostModel, data: st.DataObject) -> None:
    cached, new = inside(data, model.cached_tokens), inside(data, model.new_tokens)
    more_cached = data.draw(st.integers(cached, 1 << 18))
    more_new = data.draw(st.integers(new, 1 << 18))
    estimate_s = model.estimate_s(cached, new)
    assert model.estimate_s(more_cached, new) >= estimate_s * (1 - 1e-9)
    assert model.estimate_s(cached, more_new) >= estimate_s * (1 - 1e-9)


@given(models(), st.data())
def test_it_is_continuous_over_the_borders_of_cells(model: PrefillCostModel, data: st.DataObject) -> None:
    border = data.draw(st.sampled_from(model.cached_tokens[1:-1] or model.cached_tokens))
    new = inside(data, model.new_tokens)
    highest = max(map(max, model.seconds))
    narrowest = min(high - low for low, high in pairwise(model.cached_tokens))
    for step in (-1, 1):
        difference = abs(model.estimate_s(border + step, new) - model.estimate_s(border, new))
        assert difference <= highest / narrowest * (1 + 1e-9)


def test_it_is_bilinear_between_and_straight_beyond() -> None:
    assert MODEL.estimate_s(64, 48) == pytest.approx((0.1 + 0.2 + 0.2 + 0.4) / 4)
    assert MODEL.estimate_s(128, 160) == pytest.approx((0.4 + 1.0) / 2)
    assert MODEL.estimate_s(0, 448) == pytest.approx(0.8 + 0.6)
    assert MODEL.estimate_s(896, 256) == pytest.approx(2.0 + 1.0)
    assert MODEL.estimate_s(896, 448) == pytest.approx(0.4 - 2 * 1.0 - 2 * 0.8 + 4 * 2.0)


def test_the_default_is_the_published_fit() -> None:
    model = PrefillCostModel.default()
    for cached in (0, 1, 777, 4_096, 100_000):
        for new in (1, 31, 500, 4_128, 20_000, 131_072):
            fit_s = 0.028 + 1.25e-5 * cached + 2.1e-4 * new + 1.2e-8 * new * (cached + new / 2)
            assert fit_s * (1 - 1e-12) <= model.estimate_s(cached, new) <= fit_s * 1.03
    assert model.estimate_s(0, 4_128) == pytest.approx(1.0, rel=0.01)


def test_what_was_not_measured_continues_what_was() -> None:
    def true_s(a: int, b: int) -> float:
        return 0.01 + 1e-4 * a + 1e-3 * b + 1e-6 * a * b

    points = [(a, b) for a in (0, 100, 200, 400) for b in (10, 100, 300, 401) if a + b <= 410]
    model = PrefillCostModel.from_measured({point: true_s(*point) for point in points})
    assert (model.cached_tokens, model.new_tokens) == ((0, 100, 200, 400), (10, 100, 300, 401))
    assert all(model.estimate_s(*point) == true_s(*point) for point in points)
    assert model.estimate_s(400, 100) == pytest.approx(true_s(400, 100))
    assert model.estimate_s(200, 300) == pytest.approx(true_s(200, 300))
    with_few_points = model.estimate_s(400, 401) - model.estimate_s(0, 401)
    assert with_few_points == pytest.approx(true_s(400, 300) - true_s(0, 300))


TIMES = ((0.1, 0.2), (0.3, 0.4))


@pytest.mark.parametrize(
    ("cached", "new", "seconds", "message"),
    [
        ((0,), (32, 64), TIMES, "cached_tokens is .0,.; it needs two"),
        ((0, 32), (), TIMES, "new_tokens is ..; it needs two"),
        ((-32, 32), (32, 64), TIMES, "cached_tokens holds -32"),
        ((0, 32), (0, 64), TIMES, "new_tokens holds 0; a length is a whole number of tokens, 1 or more"),
        ((0, 32.0), (32, 64), TIMES, "cached_tokens holds 32.0"),
        ((False, 32), (32, 64), TIMES, "cached_tokens holds False"),
        ((0, "32"), (32, 64), TIMES, "cached_tokens holds '32'"),
        ((0, 0), (32, 64), TIMES, "cached_tokens has 0 behind 0"),
        ((0, 32), (64, 32), TIMES, "new_tokens has 32 behind 64"),
        ((0, 32), (32, 64), TIMES[:1], "seconds has 1 rows"),
        ((0, 32), (32, 64), ((0.1, 0.2), (0.3,)), r"rows of \[1, 2\] times"),
        ((0, 32), (32, 64), ((0.1, 0.2), (0.3, 0.0)), "seconds for 32 cached and 64 new tokens is 0.0"),
        ((0, 32), (32, 64), ((0.1, -0.2), (0.3, 0.4)), "is -0.2; a time must be a positive"),
        ((0, 32), (32, 64), ((0.1, math.nan), (0.3, 0.4)), "is nan"),
        ((0, 32), (32, 64), ((0.1, math.inf), (0.3, 0.4)), "is inf"),
        ((0, 32), (32, 64), ((0.1, None), (0.3, 0.4)), "is None"),
        ((0, 32), (32, 64), ((0.1, True), (0.3, 0.4)), "is True"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_with_value_and_hint(
    cached: Any, new: Any, seconds: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefillCostModel(cached, new, seconds)
    with pytest.raises(ConfigError, match=message):
        PrefillCostModel.from_dict({"format": 1, "cached_tokens": cached, "new_tokens": new, "seconds": seconds})
