"""The plan of a request: every token is read or computed, once, and as few are computed as the scores allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk import (
    SELECTIONS,
    ChunkSpan,
    ChunkVariant,
    ReusePlan,
    TokenSelection,
    make_selection,
    plan_reuse,
)
from ragcache_core.chunk.recompute import in_runs, losses
from ragcache_core.chunk.scores import adjusted_overlap, context_impact, lost_context
from ragcache_core.chunk.types import context_behind
from tests.unit.chunk.captures import key, prompt, spans, variant, variants

CACHE_CRAFT = make_selection("cache_craft")
WHOLE_CHUNKS = make_selection("whole_chunks")


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[ChunkSpan], dict[bytes, list[ChunkVariant]], int, int]:
    """Chunks with gaps between them, variants of some, and the part of the prompt to plan."""
    placed, stored, place = [], {}, draw(st.integers(0, 5))
    for name in draw(st.lists(st.integers(0, 9), max_size=5)):
        length = name + 1
        context = context_behind(placed[-1]) if placed else b""
        placed.append(ChunkSpan(place, place + length, key(name), context))
        place += length + draw(st.integers(0, 3))
        if draw(st.booleans()):
            stored[key(name)] = [draw(variants(name, length, number)) for number in range(draw(st.integers(1, 3)))]
    end = draw(st.integers(0, place + 5))
    return placed, stored, draw(st.integers(0, end)), end


def plan(placed, stored, start, end, **options) -> ReusePlan:
    settings = {"selection": CACHE_CRAFT, "alpha": 1.0, **options}
    return plan_reuse(placed, stored, start=start, end=end, **settings)


@settings(deadline=None)
@given(
    scene=scenes(),
    name=st.sampled_from([*SELECTIONS]),
    alpha=st.floats(0.0, 3.0),
    max_recompute=st.floats(0.0, 1.0),
    run_tokens=st.integers(1, 5),
    data=st.data(),
)
def test_every_token_of_the_range_is_either_read_once_or_computed(
    scene, name: str, alpha: float, max_recompute: float, run_tokens: int, data: st.DataObject
) -> None:
    placed, stored, start, end = scene
    made = plan(
        placed, stored, start, end, selection=make_selection(name), alpha=alpha, max_recompute=max_recompute,
        run_tokens=run_tokens,
    )  # fmt: skip
    assert (made.start, made.end) == (start, end)
    assert list(made.recomputed) == sorted(set(made.recomputed))
    read = [
        position
        for chunk in made.reused
        for position in range(max(start, chunk.span.start), min(end, chunk.span.end))
        if position not in chunk.recomputed
    ]
    assert sorted([*read, *made.recomputed]) == list(range(start, end))
    assert made.num_reused_tokens == len(read)
    for chunk in made.reused:
        assert chunk.span in placed
        assert chunk.variant in stored[chunk.span.key]
        assert set(chunk.recomputed) <= set(made.recomputed)
        assert set(chunk.recomputed) <= set(range(chunk.span.start, chunk.span.end))
        assert 0.0 <= chunk.overhead <= 1.0


@settings(deadline=None)
@given(
    scene=scenes(),
    alphas=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
    selection=st.sampled_from([CACHE_CRAFT, WHOLE_CHUNKS]),
)
def test_a_larger_alpha_computes_the_same_tokens_and_more(
    scene, alphas: tuple[float, float], selection: TokenSelection
) -> None:
    low, high = (set(plan(*scene, alpha=alpha, selection=selection).recomputed) for alpha in sorted(alphas))
    assert low <= high


@settings(deadline=None)
@given(scene=scenes())
def test_what_is_new_in_front_only_ever_adds_to_what_is_computed(scene) -> None:
    with_unseen, by_the_letter = (plan(*scene, counts_unseen=counts) for counts in (True, False))
    if all(len(found) == 1 for found in scene[1].values()):  # otherwise another variant may be chosen
        assert set(by_the_letter.recomputed) <= set(with_unseen.recomputed)


@settings(deadline=None)
@given(scene=scenes())
def test_the_variant_is_the_one_that_fits_best(scene) -> None:
    placed, stored, start, end = scene
    for chunk in plan(placed, stored, start, end, counts_unseen=False).reused:
        before = [span.key for span in placed if span.start < chunk.span.start]
        misfit = {
            found.number: lost_context(
                found.statistics,
                chunk.span.context,
                weight=context_impact(found.statistics),
                overlap=adjusted_overlap(found.statistics, before),
            )
            for found in stored[chunk.span.key]
        }
        assert misfit[chunk.variant.number] == min(misfit.values())


def test_the_plan_of_the_paper_is_found_by_hand() -> None:
    captured = prompt([6, 10, 20], seed=4)
    stored = {key(2): [ChunkVariant(key(2), 0, 20, captured.statistics(2))]}
    placed = spans((1, 10), (2, 20), start=8)
    made = plan(placed, stored, 8, 38, alpha=0.7, counts_unseen=False)
    inter = [captured.inter(2, 0), captured.inter(2, 1)]
    outer = (inter[0] / 6 + inter[1] / 10) / 20
    impact = 1.0 / (1.0 + math.exp(-outer / (captured.intra(2) / 400)))
    overhead = 0.7 * impact * (1.0 - inter[1] / sum(inter))
    own, first, second = captured.spans[2], *captured.spans[:2]
    rows = captured.averaged()[own.start : own.end]
    attention = rows[:, first.start : second.end].sum(axis=1)
    selected = sorted(attention.argsort()[-math.ceil(overhead * 20) :].tolist())
    (chunk,) = made.reused
    assert chunk.overhead == pytest.approx(overhead)
    assert chunk.recomputed == tuple(18 + offset for offset in selected)
    assert made.recomputed == (*range(8, 18), *chunk.recomputed)


@settings(deadline=None)
@given(scene=scenes(), alpha=st.floats(0.0, 3.0), max_recompute=st.floats(0.0, 1.0))
def test_a_selection_of_whole_chunks_splits_none_and_keeps_to_its_share(scene, alpha, max_recompute: float) -> None:
    made = plan(*scene, alpha=alpha, max_recompute=max_recompute, selection=WHOLE_CHUNKS)
    planned = [set(range(made.start, made.end)) & set(range(c.span.start, c.span.end)) for c in made.reused]
    computed = [chunk.span.num_tokens for chunk, part in zip(made.reused, planned, strict=True) if chunk.recomputed]
    assert all(set(c.recomputed) in (set(), part) for c, part in zip(made.reused, planned, strict=True))
    assert sum(computed) <= math.ceil(max_recompute * sum(chunk.span.num_tokens for chunk in made.reused))


def test_a_whole_chunk_with_outward_attention_and_a_lost_neighbour_is_computed() -> None:
    asks = variant(1, 8, [(0, 6, 4.0)], intra=2.0)  # three quarters of its attention leave it
    tells = variant(2, 8, [(0, 6, 4.0)], intra=6.0)  # one quarter
    stored = {key(1): [asks], key(2): [tells]}
    beside = plan(spans((9, 6), (1, 8), (2, 8)), stored, 6, 22, alpha=2.0, selection=WHOLE_CHUNKS)
    assert [bool(chunk.recomputed) for chunk in beside.reused] == [True, False]
    assert [chunk.overhead for chunk in beside.reused] == [1.0, 0.0]
    behind = plan(spans((0, 6), (1, 8)), stored, 6, 14, alpha=2.0, selection=WHOLE_CHUNKS)
    assert behind.recomputed == ()


def test_a_chunk_known_only_from_the_beginning_of_prompts_is_computed_once_where_it_moves_to() -> None:
    first = variant(1, 8, intra=8.0)
    moved = plan(spans((0, 6), (1, 8)), {key(1): [first]}, 6, 14, alpha=1.5, selection=WHOLE_CHUNKS)
    assert moved.reused[0].recomputed == tuple(range(6, 14))
    known = [first, variant(1, 8, [(0, 6, 1.0)], number=1, intra=6.0)]
    again = plan(spans((7, 6), (1, 8)), {key(1): known}, 6, 14, alpha=1.5, selection=WHOLE_CHUNKS)
    assert again.recomputed == ()


def test_where_not_all_may_be_computed_those_that_lost_most_are() -> None:
    stored = {key(n): [variant(n, 8, [(0, 6, 1.0)], intra=float(n))] for n in (1, 2, 3)}
    made = plan(spans((3, 8), (2, 8), (1, 8)), stored, 0, 24, alpha=9.0, max_recompute=0.5, selection=WHOLE_CHUNKS)
    assert [bool(chunk.recomputed) for chunk in made.reused] == [False, False, True]


def test_what_inherited_an_error_is_computed_where_alpha_asks_for_more_than_it_was_captured_under() -> None:
    placed = spans((6, 4), (1, 8))
    stored = {key(1): [variant(1, 8, [(6, 4, 4.0)], inherited=0.2)]}
    for selection in (CACHE_CRAFT, WHOLE_CHUNKS):
        (chunk,) = plan(placed, stored, 4, 12, alpha=4.0, selection=selection).reused
        assert chunk.lost == 0.2
        assert len(chunk.recomputed) == (7 if selection is CACHE_CRAFT else 0)  # of 8, 0.2 times 4
        assert plan(placed, stored, 4, 12, alpha=5.0, selection=selection).recomputed == tuple(range(4, 12))


@pytest.mark.parametrize("selection", [CACHE_CRAFT, WHOLE_CHUNKS])
def test_alpha_without_bound_reads_nothing_but_what_a_prefill_makes(selection: TokenSelection) -> None:
    captured_behind = [(6, 4, 4.0)]
    stored = {key(1): [variant(1, 8, captured_behind)]}
    for before, is_read in [((6,), True), ((7, 6), False), ((6, 6), False), ((), False)]:
        placed = spans(*((name, 4) for name in before), (1, 8))
        start, end = placed[-1].start, placed[-1].end
        found = plan(placed, stored, start, end, alpha=1e9, selection=selection)
        assert found.recomputed == (() if is_read else tuple(range(start, end)))


def test_later_chunks_inherit_at_most_the_loss_of_earlier_chunks() -> None:
    placed = spans((1, 4), (2, 4), (3, 4), (4, 4))
    stored = {key(2): [variant(2, 4, [(9, 4, 1.0)])]}
    found = plan(placed, stored, 4, 16, alpha=0.0)
    lost = found.reused[0].lost
    assert lost > 0.0
    assert losses(placed, [0.0] * 4, 4, found) == [0.0, lost, lost, lost]
    assert losses(placed, [0.0] * 4, 4, None) == [0.0] * 4
    wholly = plan(placed, stored, 4, 16, alpha=1e9)
    assert losses(placed, [0.0] * 4, 4, wholly) == [0.0] * 4


def test_what_a_request_has_lost_is_remembered_where_its_blocks_still_are() -> None:
    placed = spans((1, 4), (2, 4), (3, 4))
    assert losses(placed, [0.0, 0.3, 0.0], 8, None) == [0.0, 0.3, 0.3]
    assert losses(placed, [0.0, 0.3, 0.0], 4, None) == [0.0, 0.0, 0.0]
    assert losses(placed, [0.0, 0.3, 0.0], 6, None) == [0.0, 0.3, 0.3], "its first half is still there"


def test_of_a_chunk_that_is_cached_exactly_in_part_only_the_rest_is_planned() -> None:
    stored = {key(1): [variant(1, 8, [(5, 3, 1.0)])]}
    made = plan(spans((0, 4), (1, 8)), stored, 6, 12, selection=make_selection("cache_craft"), alpha=2.0)
    (chunk,) = made.reused
    assert chunk.overhead == 1.0
    assert made.recomputed == tuple(range(6, 12))
    few = plan(spans((0, 4), (1, 8)), stored, 6, 12, selection=make_selection("cache_craft"), max_recompute=0.5)
    (first,) = few.reused
    assert few.recomputed == tuple(at for at in first.recomputed if at >= 6)
    assert 0 < len(few.recomputed) < 6


@given(st.integers(1, 50), st.integers(1, 9), st.data())
def test_runs_are_aligned_and_hold_what_was_selected_most(num_tokens: int, run: int, data: st.DataObject) -> None:
    offsets = sorted(data.draw(st.sets(st.integers(0, num_tokens - 1))))
    rounded = in_runs(offsets, num_tokens, run)
    runs = {offset // run for offset in rounded}
    assert list(rounded) == [offset for offset in range(num_tokens) if offset // run in runs]
    assert len(runs) == math.ceil(len(offsets) / run)
    hits = {number: sum(offset // run == number for offset in offsets) for number in range(-(-num_tokens // run))}
    left_out = [count for number, count in hits.items() if number not in runs]
    assert min((hits[number] for number in runs), default=0) >= max(left_out, default=0) or not runs


def test_a_flat_fraction_is_an_alpha_without_bound_under_a_limit() -> None:
    stored = {key(n): [variant(n, 10)] for n in (1, 2)}
    made = plan(spans((0, 5), (1, 10), (2, 10)), stored, 5, 25, alpha=math.inf, max_recompute=0.3)
    assert [len(chunk.recomputed) for chunk in made.reused] == [3, 3]
    assert [chunk.overhead for chunk in made.reused] == [1.0, 1.0]
