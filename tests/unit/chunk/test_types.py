"""Keys of chunks: content, behind the same static prefix, and nothing else; contexts: all that stands before."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import ChunkSpan, chunk_key, chunk_spans

IDS = st.lists(st.integers(0, 1 << 32), max_size=8)


@given(IDS, IDS)
def test_equal_tokens_have_one_key_and_others_another(one: list[int], other: list[int]) -> None:
    assert (chunk_key(one) == chunk_key(other)) == (one == other)
    assert (chunk_key([1], behind=chunk_key(one)) == chunk_key([1], behind=chunk_key(other))) == (one == other)


@given(IDS.filter(bool))
def test_a_chunk_behind_a_static_prefix_is_another_than_one_behind_none(token_ids: list[int]) -> None:
    assert chunk_key(token_ids) != chunk_key(token_ids, behind=chunk_key([]))


def test_a_key_is_the_same_on_every_machine() -> None:
    assert chunk_key([1, 258]) == hashlib.sha256(bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0])).digest()


PARTS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), max_size=2), st.lists(st.integers(1, 3), min_size=1, max_size=2))
)


def placed(parts: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[ChunkSpan]]:
    """Return a prompt of texts, each with the chunk behind it, and its chunks."""
    tokens: list[int] = []
    places = []
    for between, chunk in parts:
        tokens += between
        places.append((len(tokens), len(tokens) + len(chunk)))
        tokens += chunk
    return tokens, chunk_spans(tokens, places)


@given(PARTS, PARTS)
def test_chunks_are_known_by_their_tokens_and_stand_in_one_context_behind_the_same_tokens(one, other) -> None:
    (tokens, spans), (other_tokens, other_spans) = placed(one), placed(other)
    for number, (a, b) in enumerate(zip(spans, other_spans, strict=False)):
        is_static_the_same = one[0][0] == other[0][0]
        is_same = is_static_the_same and tokens[a.start : a.end] == other_tokens[b.start : b.end]
        assert (a.key == b.key) is is_same
        is_behind_the_same = one[:number] == other[:number] and one[number][0] == other[number][0]
        assert (a.context == b.context) is is_behind_the_same
