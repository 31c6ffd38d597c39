"""Layout and size of a chunk's KV in memory and on disk.

A chunk's KV lies in pages of ``tokens_per_page`` tokens of all layers. The library, on the scheduler's side, gives out
the pages; every worker has the same pages for its own layers and heads.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_core.chunk.types import ChunkKey, ChunkStatistics
from ragcache_core.errors import ConfigError
from ragcache_core.types import DocId

STATISTICS_BYTES = 4096
"""Bytes of a piece of a chunk's statistics on disk."""

_SLOT_BYTES = 4096  # slots on disk are aligned to this
_KEY_BYTES = 32
_HEADER = struct.Struct("<IIIdd32s")  # format, number of tokens, length of the prefix, intra, inherited, context
_FORMAT = 3
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of a token in one layer of a worker: ``[num_kv_heads, head_dim]`` each."""

    num_kv_heads: int
    head_dim: int


def digest_of(doc_id: DocId) -> str:
    """Return a document's digest, short enough to store all of a prompt's with each chunk."""
    return hashlib.sha256(doc_id.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_CHARS]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as 32 bits each, little-endian."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def num_pages_of(num_tokens: int, tokens_per_page: int) -> int:
    """Return the number of pages of a chunk."""
    return -(-num_tokens // tokens_per_page)


def num_pages_within(capacity_bytes: int, page_bytes: int) -> int:
    """Return the number of pages (``page_bytes`` over all workers) that fit into host memory's share for chunks.

    Raises:
        ConfigError: not one.
    """
    num_pages = capacity_bytes // page_bytes
    if not num_pages:
        raise ConfigError(
            f"a page of chunks of this model takes {page_bytes} bytes, host memory's share for them is "
            f"{capacity_bytes}: raise host_bytes, or ChunkReuse.share"
        )
    return num_pages


def num_disk_pages_within(capacity_bytes: int, page_bytes: int, tokens_per_page: int) -> int:
    """Return the number of pages of all workers that fit on the disk, with their chunks' statistics."""
    return capacity_bytes // (aligned_bytes(page_bytes) + statistics_bytes_per_page(tokens_per_page))


def statistics_bytes_per_page(tokens_per_page: int) -> int:
    """Return the bytes reserved per page for a chunk's tokens and statistics.

    A token takes 12 bytes. The piece on top is for what a chunk of one page says of its prefix: 44 bytes for each of
    up to 80 chunks before it.
    """
    return (-(-12 * tokens_per_page // STATISTICS_BYTES) + 1) * STATISTICS_BYTES


def aligned_bytes(num_bytes: int) -> int:
    """Return the bytes of a page on disk."""
    return -(-num_bytes // _SLOT_BYTES) * _SLOT_BYTES


def part_key(key: ChunkKey, number: int, part: int) -> bytes:
    """Return the key on disk of a version's page, or of a piece of its statistics."""
    assert len(key) == _KEY_BYTES
    return key + number.to_bytes(8, "big") + part.to_bytes(4, "big")


def read_part_key(stored_key: bytes) -> tuple[ChunkKey, int, int] | None:
    """Return key, number and part of a key of :func:`part_key`; ``None`` for others."""
    if len(stored_key) != _KEY_BYTES + 12:
        return None
    number = int.from_bytes(stored_key[_KEY_BYTES : _KEY_BYTES + 8], "big")
    return stored_key[:_KEY_BYTES], number, int.from_bytes(stored_key[_KEY_BYTES + 8 :], "big")


def pack_statistics(statistics: ChunkStatistics, token_ids: bytes) -> list[bytes]:
    """Return a chunk's tokens and statistics in pieces of :data:`STATISTICS_BYTES`."""
    packed = b"".join(
        (
            _HEADER.pack(
                _FORMAT,
                len(statistics.token_inter),
                len(statistics.prefix),
                statistics.intra,
                statistics.inherited,
                statistics.context,
            ),
            token_ids,
            _floats(statistics.token_inter),
            *statistics.prefix,
            pack_token_ids(statistics.prefix_lengths),
            _floats(statistics.inter),
        )
    )
    return [
        packed[start : start + STATISTICS_BYTES].ljust(STATISTICS_BYTES, b"\0")
        for start in range(0, len(packed), STATISTICS_BYTES)
    ]


def num_statistics_pieces(first_piece: bytes) -> int:
    """Return the number of pieces of a chunk's statistics, from the first one; 0 if invalid."""
    format_, num_tokens, num_prefix, *_ = _HEADER.unpack_from(first_piece)
    num_bytes = _HEADER.size + 12 * num_tokens + (_KEY_BYTES + 12) * num_prefix
    return -(-num_bytes // STATISTICS_BYTES) if format_ == _FORMAT else 0


def unpack_statistics(pieces: Iterable[bytes]) -> tuple[ChunkStatistics, bytes]:
    """Return statistics and token ids packed by :func:`pack_statistics`.

    Raises:
        ValueError: the pieces are not such.
    """
    packed = b"".join(pieces)
    format_, num_tokens, num_prefix, intra, inherited, context = _HEADER.unpack_from(packed)
    sizes = (4 * num_tokens, 8 * num_tokens, _KEY_BYTES * num_prefix, 4 * num_prefix, 8 * num_prefix)
    if format_ != _FORMAT or len(packed) < _HEADER.size + sum(sizes):
        raise ValueError(f"statistics of format {format_} in {len(packed)} bytes: they were written as {_FORMAT}")
    parts, start = [], _HEADER.size
    for size in sizes:
        parts.append(packed[start : start + size])
        start += size
    token_ids, token_inter, prefix, packed_lengths, inter = parts
    keys = tuple(prefix[at : at + _KEY_BYTES] for at in range(0, len(prefix), _KEY_BYTES))
    lengths = tuple(np.frombuffer(packed_lengths, dtype="<u4").tolist())
    statistics = ChunkStatistics(keys, lengths, _tuple(inter), intra, _tuple(token_inter), inherited, context=context)
    return statistics, token_ids


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f8").tobytes()


def _tuple(packed: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(packed, dtype="<f8").tolist())
