"""Which tokens are recomputed: what every selection promises, and what each of them prefers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk import SELECTIONS, SelectableChunk, make_selection
from ragcache_core.chunk.selection import RandomSelection
from ragcache_core.errors import ConfigError
from tests.unit.chunk.captures import prompt, token_scores, variant, variants


@st.composite
def selectable(draw: st.DrawFn) -> list[SelectableChunk]:
    chunks = []
    for name in range(draw(st.integers(0, 4))):
        num_tokens = draw(st.integers(1, 12))
        chosen = draw(variants(name, num_tokens, number=name))
        chunks.append(SelectableChunk(chosen, draw(st.integers(0, num_tokens)), draw(token_scores(num_tokens))))
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


@pytest.mark.parametrize("name", SELECTIONS)
@settings(deadline=None, max_examples=30)
@given(chunks=selectable())
def test_a_selection_chooses_the_same_tokens_again(name: str, chunks: list[SelectableChunk]) -> None:
    assert make_selection(name).select(chunks) == make_selection(name).select(chunks)


@pytest.mark.parametrize("seed", range(3))
def test_cache_craft_takes_the_tokens_that_looked_most_at_other_chunks(seed: int) -> None:
    captured = prompt([5, 7, 13], seed=seed)
    first, second, own = captured.spans
    outside = captured.averaged()[own.start : own.end, first.start : second.end].sum(axis=1)
    chosen = variant(2, 13)
    chosen = type(chosen)(chosen.key, 0, 13, captured.statistics(2))
    (offsets,) = make_selection("cache_craft").select([SelectableChunk(chosen, 4)])
    assert set(offsets) == set(outside.argsort()[-4:].tolist())


@pytest.mark.parametrize("seed", range(3))
def test_most_attended_takes_the_tokens_that_later_ones_of_the_chunk_looked_at_most(seed: int) -> None:
    captured = prompt([5, 13], seed=seed)
    own = captured.spans[1]
    received = [captured.averaged()[place + 1 : own.end, place].sum() for place in range(own.start, own.end)]
    chosen = replace(variant(1, 13), statistics=captured.statistics(1))
    (offsets,) = make_selection("most_attended").select([SelectableChunk(chosen, 4)])
    assert set(offsets) == set(np.argsort(received)[-4:].tolist())


def test_of_a_chunk_whose_tokens_nobody_watched_most_attended_takes_the_first() -> None:
    assert make_selection("most_attended").select([SelectableChunk(variant(0, 6), 2)]) == [(0, 1)]


def test_of_tokens_that_looked_alike_the_first_are_taken() -> None:
    alone = SelectableChunk(variant(0, 6), 2)  # computed alone: no token looked at anything
    assert make_selection("cache_craft").select([alone]) == [(0, 1)]


def test_first_tokens_are_the_first() -> None:
    assert make_selection("first_tokens").select([SelectableChunk(variant(0, 6), 3)]) == [(0, 1, 2)]


def test_whole_chunks_takes_all_that_it_may_of_each_chunk() -> None:
    chunks = [SelectableChunk(variant(0, 3), 0), SelectableChunk(variant(1, 4), 4)]
    assert make_selection("whole_chunks").select(chunks) == [(), (0, 1, 2, 3)]


def test_the_question_moves_the_budget_to_where_it_looks() -> None:
    dull = SelectableChunk(variant(0, 3), 2, [0.1, 0.2, 0.1])
    asked = SelectableChunk(variant(1, 4), 1, [0.0, 0.9, 0.8, 0.7])
    assert make_selection("question_driven").select([dull, asked]) == [(), (1, 2, 3)]


def test_the_question_takes_nothing_of_a_chunk_that_needs_no_fixing() -> None:
    fits = SelectableChunk(variant(0, 3), 0, [1.0, 1.0, 1.0])
    other = SelectableChunk(variant(1, 3), 1, [0.0, 0.1, 0.0])
    assert make_selection("question_driven").select([fits, other]) == [(), (1,)]


@pytest.mark.parametrize("relevance", [None, [0.5, 0.5]])
def test_without_a_question_there_is_no_choosing_by_it(relevance: list[float] | None) -> None:
    with pytest.raises(ValueError, match="relevance of each token; chunk 0 lacks it"):
        make_selection("question_driven").select([SelectableChunk(variant(0, 3), 1, relevance)])


def test_random_tokens_depend_on_the_seed_and_on_the_chunk() -> None:
    def draw(seed: int, name: int) -> tuple[int, ...]:
        return RandomSelection(seed).select([SelectableChunk(variant(name, 100), 30)])[0]

    assert draw(0, 0) != draw(1, 0)
    assert draw(0, 0) != draw(0, 1)


def test_random_tokens_are_the_same_in_another_process() -> None:
    code = (
        "from tests.unit.chunk.captures import variant\n"
        "from ragcache_core.chunk import SelectableChunk, make_selection\n"
        "print(make_selection('random').select([SelectableChunk(variant(0, 100), 10)]))"
    )
    there = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    here = make_selection("random").select([SelectableChunk(variant(0, 100), 10)])
    assert there.stdout.strip() == str(here), there.stderr


def test_an_unknown_selection_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="selection is 'best'; choose one of cache_craft, whole_chunks, first_tokens"):
        make_selection("best")
