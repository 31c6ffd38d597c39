"""Names of blocks that hold approximate KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.vllm_plugin.chunks.private_hashes import private_hashes

HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=6)


@given(HASHES, st.integers(0, 6))
def test_blocks_before_the_first_approximate_one_keep_their_names_and_only_one_namespace_has_the_rest(
    block_hashes: list[bytes], first: int
) -> None:
    one, same, other = (private_hashes(block_hashes, first, namespace) for namespace in (b"one", b"one", b"other"))
    assert one[:first] == other[:first] == block_hashes[:first]
    assert one == same
    assert len(one) == len(other) == len(block_hashes)
    assert not set(one[first:]) & {*other, *block_hashes}


@given(HASHES, st.integers(0, 5))
def test_an_approximate_block_has_one_block_alone_before_it(block_hashes: list[bytes], first: int) -> None:
    one, later = (private_hashes(block_hashes, at, b"one") for at in (first, first + 1))
    assert not set(one[first:]) & set(later)
