"""Focused chunks: Algorithm 1 of Cache-Craft, layer by layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import FocusedChunks
from ragcache_core.chunk.focus import gap_cut

MASSES = st.integers(0, 8)  # whole numbers add up to the same in any order
LAYERS = st.integers(1, 6).flatmap(
    lambda chunks: st.lists(st.lists(MASSES, min_size=chunks, max_size=chunks), min_size=1, max_size=8)
)


@given(layers=LAYERS, window=st.integers(1, 4))
def test_the_set_is_settled_once_it_stood_for_a_window_of_layers(layers: list[list[int]], window: int) -> None:
    num_chunks = len(layers[0])
    detector = FocusedChunks(num_chunks, window=window)
    sets: list[frozenset[int]] = []
    for number, layer in enumerate(layers, start=1):
        cumulated = [sum(masses) for masses in zip(*layers[:number], strict=True)]
        ranked = sorted(range(num_chunks), key=lambda chunk: -cumulated[chunk])
        sets.append(frozenset(ranked[: gap_cut([cumulated[chunk] for chunk in ranked])]))
        focused = detector.observe(layer)
        if number >= window and len({*sets[-window:]}) == 1:
            assert detector.is_settled
            assert detector.num_layers == number
            assert focused == detector.focused == sets[-1]
            assert detector.observe([0.0] * num_chunks) == sets[-1]
            assert detector.num_layers == number
            return
        assert not detector.is_settled
        assert focused == frozenset(range(num_chunks))


@given(scores=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8))
def test_a_cut_leaves_at_least_one_chunk(scores: list[float]) -> None:
    assert 1 <= gap_cut(sorted(scores, reverse=True)) <= len(scores)


def test_chunks_with_equal_attention_are_all_focused() -> None:
    assert gap_cut([2.0, 2.0, 2.0]) == 3


def test_the_sums_over_layers_decide_and_not_the_last_layer() -> None:
    detector = FocusedChunks(3, window=2)
    detector.observe([9.0, 1.0, 0.5])
    assert detector.observe([1.0, 3.0, 0.5]) == {0}


def test_a_set_that_never_settles_keeps_all_chunks() -> None:
    detector = FocusedChunks(2, window=2)
    for number in range(6):
        detector.observe([(-2.0) ** number + 64.0, 64.0])
    assert not detector.is_settled
    assert detector.focused == {0, 1}
