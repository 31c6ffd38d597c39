"""Keeps approximate KV out of the exact prefix cache.

vLLM names a block by the hash of all tokens up to it, and takes what a connector brings for what the tokens say. So
from the first block with approximate KV on, a request has the hashes of a namespace: only requests that reuse chunks by
the very same settings have them, and find such blocks; later blocks chain off them by themselves. Where the first
approximate token lies in the prompt's last block, which is not full and has no hash yet, there is none to replace: the
pool caches no block of an answer behind approximate ones, and the tiers below store none of either
(``TreeBlockPool.cache_full_blocks``, ``CopyScheduler.keep_from_storing``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def private_hash(block_hash: bytes, first: int, namespace: bytes) -> bytes:
    """Return the hash of a block in ``namespace`` if approximate KV begins with block ``first`` of the prompt.

    So a block has one block alone before it.
    """
    return hashlib.sha256(namespace + first.to_bytes(8, "big") + block_hash).digest()


def private_hashes(block_hashes: Sequence[bytes], first: int, namespace: bytes) -> list[bytes]:
    """Return a request's block hashes, in ``namespace`` from block ``first`` on."""
    return [*block_hashes[:first], *(private_hash(each, first, namespace) for each in block_hashes[first:])]
