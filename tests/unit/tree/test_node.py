"""Masks of units."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.tree import runs_of


@given(st.sets(st.integers(0, 200)))
def test_runs_hold_every_unit_once_in_order_and_do_not_touch(units: set[int]) -> None:
    runs = list(runs_of(sum(1 << unit for unit in units)))
    assert [unit for first, length in runs for unit in range(first, first + length)] == sorted(units)
    assert all(first + length < second for (first, length), (second, _) in pairwise(runs))
