"""Names of blocks that hold approximate KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.vllm_plugin.chunks.private_hashes import private_hashes

HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=6)


@given(HASHES, st.integers(0, 6))
def test_blocks_before_the_first_approximate_one_keep_their_names_and_no_other_request_has_the_rest(
    block_hashes: list[bytes], first_private: int
) -> None:
    one, other = private_hashes(block_hashes, first_private), private_hashes(block_hashes, first_private)
    assert one[:first_private] == other[:first_private] == block_hashes[:first_private]
    assert len(one) == len(other) == len(block_hashes)
    assert not set(one[first_private:]) & {*other, *block_hashes}
