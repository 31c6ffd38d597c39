"""What a question asks for, by its words: rare ones count, neighbours profit, and scales do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import lexical_relevance

IDS = st.lists(st.integers(0, 9), max_size=12)


@given(st.lists(IDS, max_size=4), IDS, st.integers(0, 5))
def test_every_token_has_a_relevance_between_none_and_most(
    chunks: list[list[int]], question: list[int], reach: int
) -> None:
    relevance = lexical_relevance(chunks, question, reach=reach)
    assert [len(scores) for scores in relevance] == [len(chunk) for chunk in chunks]
    flat = [score for scores in relevance for score in scores]
    assert all(0.0 <= score <= 1.0 for score in flat)
    is_asked = any(token in question for chunk in chunks for token in chunk)
    assert max(flat, default=0.0) == pytest.approx(1.0 if is_asked else 0.0)


def test_a_word_that_one_chunk_has_counts_more_than_one_that_all_have() -> None:
    (first, second) = lexical_relevance([[1, 9, 9, 9, 7], [1, 8, 8, 8, 8]], [1, 7], reach=0)
    assert first[4] == 1.0
    assert 0.0 < first[0] == second[0] < 1.0


def test_what_stands_beside_the_words_of_the_question_is_relevant_too() -> None:
    ((*scores,),) = lexical_relevance([[0, 0, 5, 0, 0, 0]], [5], reach=2)
    assert scores == pytest.approx([1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 0.0])


def test_a_question_that_shares_no_word_asks_for_nothing() -> None:
    assert lexical_relevance([[1, 2]], [3]) == [(0.0, 0.0)]
