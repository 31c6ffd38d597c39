"""Keys of chunks: content, behind the same static prefix, and nothing else."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import chunk_key

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
