"""Keeps approximate KV out of the exact prefix cache.

vLLM names a block by the hash of all tokens up to it, and takes what a connector brings for what the tokens say. So
from the first block with approximate KV on, a request gets hashes of its own, which no other request can have; later
blocks chain off them by themselves. Where the first approximate token lies in the prompt's last block, which is not
full and has no hash yet, there is none to replace: the pool caches no block of the request from that one on, and the
tiers below store none (``TreeBlockPool.cache_full_blocks``, ``offload.compat.keep_from_storing``).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence


def private_hashes(block_hashes: Sequence[bytes], first_private: int) -> list[bytes]:
    """Return a request's block hashes, from block ``first_private`` on such as no other request has."""
    nonce = secrets.token_bytes(32)
    private = (hashlib.sha256(nonce + block_hash).digest() for block_hash in block_hashes[first_private:])
    return [*block_hashes[:first_private], *private]
