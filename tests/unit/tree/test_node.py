"""Masks of units."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.tree import TreeNode, runs_of
from tests.unit.tree.scene import chain, new_tree, prompt

PROMPT = prompt("A", "B", "C", blocks=4)
KEYS = [key for segment in PROMPT for key in segment.keys]


@given(st.sets(st.integers(0, 200)))
def test_runs_hold_every_unit_once_in_order_and_do_not_touch(units: set[int]) -> None:
    runs = list(runs_of(sum(1 << unit for unit in units)))
    assert [unit for first, length in runs for unit in range(first, first + length)] == sorted(units)
    assert all(first + length < second for (first, length), (second, _) in pairwise(runs))


@given(st.lists(st.sampled_from([*KEYS, *chain("unknown", "keys")]), max_size=20))
def test_units_are_found_in_any_order_with_gaps_and_among_unknown_ones(keys: list[tuple[str, ...]]) -> None:
    tree = new_tree()
    tree.insert(PROMPT)
    expected: dict[TreeNode, int] = {}
    for place in map(tree.locate, keys):
        if place is not None:
            expected[place.node] = expected.get(place.node, 0) | 1 << place.unit
    assert tree.units_of(keys) == expected
    found = [key for at, _, length in tree.runs(keys) for key in keys[at : at + length]]
    assert found == [key for key in keys if key in KEYS], "runs leave something out, or are in another order"
