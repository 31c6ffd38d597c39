"""Which tokens are recomputed: what every selection promises, and what each of them prefers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk import SELECTIONS, SelectableChunk, make_selection
from tests.unit.chunk.captures import prompt, variant, variants


@st.composite
def selectable(draw: st.DrawFn) -> list[SelectableChunk]:
    chunks = []
    for name in range(draw(st.integers(0, 4))):
        num_tokens = draw(st.integers(1, 12))
        chosen = draw(variants(name, num_tokens, number=name))
        chunks.append(SelectableChunk(chosen, draw(st.integers(0, num_tokens))))
    return chunks


@pytest.mark.parametrize("name", SELECTIONS)
@settings(deadline=None, max_examples=30)
@given(chunks=selectable())
def test_a_selection_spends_its_budget_within_the_chunks(name: str, chunks: list[SelectableChunk]) -> None:
    selected = make_selection(name).select(chunks)
    assert len(selected) == len(chunks)
    for chunk, offsets in zip(chunks, selected, strict=True):
        assert list(offsets) == sorted(set(offsets))
        assert set(offsets) <= set(range(chunk.variant.num_tokens))
        assert chunk.budget or not offsets
    assert sum(map(len, selected)) == sum(chunk.budget for chunk in chunks)


@pytest.mark.parametrize("seed", range(3))
def test_cache_craft_takes_the_tokens_that_looked_most_at_other_chunks(seed: int) -> None:
    captured = prompt([5, 7, 13], seed=seed)
    first, second, own = captured.spans
    outside = captured.averaged()[own.start : own.end, first.start : second.end].sum(axis=1)
    chosen = variant(2, 13)
    chosen = type(chosen)(chosen.key, 0, 13, captured.statistics(2))
    (offsets,) = make_selection("cache_craft").select([SelectableChunk(chosen, 4)])
    assert set(offsets) == set(outside.argsort()[-4:].tolist())


def test_whole_chunks_takes_all_that_it_may_of_each_chunk() -> None:
    chunks = [SelectableChunk(variant(0, 3), 0), SelectableChunk(variant(1, 4), 4)]
    assert make_selection("whole_chunks").select(chunks) == [(), (0, 1, 2, 3)]
