"""The scores of Cache-Craft: each against the paper's sums over random attention, and between the bounds it names."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk.scores import (
    adjusted_overlap,
    context_impact,
    fix_overhead,
    lost_context,
    neighbour_overlap,
    order_penalty,
    prefix_overlap,
)
from tests.unit.chunk.captures import behind, key, prompt, statistics, variants

NAMES = st.lists(st.integers(0, 9), max_size=6)


def keys(names: list[int]) -> list[bytes]:
    return [key(name) for name in names]


@pytest.mark.parametrize("seed", range(5))
def test_overlap_is_the_attention_to_chunks_that_are_there_again(seed: int) -> None:
    captured = prompt([5, 7, 3, 11], seed=seed)
    for present in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in range(4)):
        total = sum(captured.inter(3, j) for j in range(3))
        expected = sum(captured.inter(3, j) for j in present) / total
        found = prefix_overlap(captured.statistics(3), [key(9), *(key(j) for j in present)])
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_context_impact_is_the_papers_sum_layer_by_layer(seed: int) -> None:
    captured = prompt([5, 7, 11], seed=seed)
    first, second, own = captured.spans
    outer, inner = [], []
    for layer in captured.attention.mean(axis=1):
        rows = layer[own.start : own.end]
        outer.append(sum(rows[:, s.start : s.end].sum() / (own.num_tokens * s.num_tokens) for s in (first, second)))
        inner.append(np.tril(rows[:, own.start : own.end], k=-1).sum() / own.num_tokens**2)
    expected = 1.0 / (1.0 + math.exp(-np.mean(outer) / np.mean(inner)))
    assert context_impact(captured.statistics(2)) == pytest.approx(expected)


@given(NAMES.filter(lambda names: len(set(names)) == len(names)), st.data())
def test_order_penalty_counts_the_pairs_that_changed_places(old: list[int], data: st.DataObject) -> None:
    new = data.draw(st.permutations([*old, 20, 21]))
    pairs = list(itertools.combinations(old, 2))
    discordant = sum(new.index(a) > new.index(b) for a, b in pairs)
    expected = discordant / len(pairs) if pairs else 0.0
    assert order_penalty(keys(old), keys(new)) == pytest.approx(expected)


@given(variants(0, 3), NAMES, st.integers(0, 100))
def test_every_overlap_lies_between_nothing_and_all(variant, prefix: list[int], unseen: int) -> None:
    found = variant.statistics
    overlap = prefix_overlap(found, keys(prefix))
    adjusted = adjusted_overlap(found, keys(prefix))
    assert 0.0 <= adjusted_overlap(found, keys(prefix), unseen_tokens=unseen) <= adjusted <= overlap <= 1.0
    assert adjusted == pytest.approx(overlap * (1.0 - order_penalty(found.prefix, keys(prefix))))


def test_a_chunk_that_was_computed_alone_fits_only_where_it_stands_alone() -> None:
    assert adjusted_overlap(statistics(4), []) == 1.0
    assert adjusted_overlap(statistics(4), [key(1)]) == 0.0
    assert adjusted_overlap(statistics(4), [key(1)], unseen_tokens=5) == 0.0


def test_overhead_is_the_papers_product() -> None:
    captured = statistics(3, [(1, 5, 1.0)])
    lost = lost_context(captured, behind([2]), weight=0.8, overlap=0.25)
    assert fix_overhead(lost, 0.5) == pytest.approx(0.5 * 0.8 * 0.75)


def test_an_alpha_without_bound_recomputes_what_changed_and_no_more() -> None:
    assert fix_overhead(0.25, math.inf) == 1.0
    assert fix_overhead(0.0, math.inf) == 0.0


@given(variants(0, 3), NAMES, st.integers(0, 100))
def test_only_the_context_of_the_capture_loses_nothing(variant, names: list[int], unseen: int) -> None:
    found, prefix, context = replace(variant.statistics, inherited=0.0), keys(names), behind(names)
    is_the_same = tuple(prefix) == found.prefix
    assert (lost_context(found, context, weight=0.5, overlap=neighbour_overlap(found, prefix)) == 0.0) is is_the_same
    if not is_the_same:  # else no token of its prefix can be one that it had not seen
        overlap = adjusted_overlap(found, prefix, unseen_tokens=unseen)
        assert lost_context(found, context, weight=0.5, overlap=overlap) > 0.0


def test_other_text_between_the_same_chunks_is_another_context() -> None:
    captured = statistics(3, [(1, 5, 1.0), (2, 5, 1.0)])
    assert neighbour_overlap(captured, keys([1, 2])) == adjusted_overlap(captured, keys([1, 2])) == 1.0
    assert lost_context(captured, behind([1, 2]), weight=0.5, overlap=1.0) == 0.0
    lost = lost_context(captured, behind([1, 2], gap=1), weight=0.5, overlap=1.0)
    assert fix_overhead(lost, 1e9) == 1.0
    assert fix_overhead(lost, 2.0) == 0.0


def test_what_was_inherited_counts_where_it_is_more_than_what_was_lost() -> None:
    captured = statistics(3, [(1, 5, 1.0)])
    little, much = replace(captured, inherited=0.1), replace(captured, inherited=0.3)
    assert lost_context(little, behind([2]), weight=0.8, overlap=0.75) == pytest.approx(0.2)
    assert lost_context(much, behind([2]), weight=0.8, overlap=0.75) == 0.3
    assert lost_context(much, behind([1]), weight=0.8, overlap=1.0) == 0.3


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ([1, 2], 1.0),
        ([9, 2], 0.75),
        ([2], 0.75),
        ([1, 2, 9], 0.0),
        ([1], 0.0),
        ([2, 1], 0.0),
        ([9, 1, 2], 1.0),
        ([], 0.0),
    ],
)
def test_a_neighbour_counts_as_long_as_nothing_new_stands_between(now: list[int], kept: float) -> None:
    captured = statistics(8, [(1, 5, 1.0), (2, 5, 3.0)])
    assert neighbour_overlap(captured, keys(now)) == pytest.approx(kept)
