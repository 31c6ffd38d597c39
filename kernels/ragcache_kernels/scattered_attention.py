"""Attention of queries at any positions of their sequence, over a paged cache.

    positions of the queries   3   9  10  26       keys 0 .. 26, in blocks of the cache
                               |   |   |   |
                     key  0    x   x   x   x       x  attended to: the key stands at or before the query
                          3    x   x   x   x
                          4    .   x   x   x       .  masked
                         10    .   .   x   x
                         26    .   .   .   x

A tile of queries with the heads that share their keys is one matrix, [queries x group, head_dim], and reads each key
once for all of them: 1,500 scattered queries over 5,000 keys read them 47 times in tiles of 32, where stock kernels,
for which each run of neighbours is a sequence, read them as often as there are runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ragcache_kernels.arguments import check_cache, check_heads, check_indices, dot_dtype
from ragcache_kernels.rotary import padded

_LEAST_DOT = 16
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers of queries and keys per program, each a power of two."""

    num_queries: int = 32
    num_keys: int = 64
    num_warps: int = 8
    num_stages: int = 3

    @classmethod
    def for_heads(cls, group: int, head_dim: int, dtype: torch.dtype, *, num_keys: int = 32) -> Tiles:
        """Return tiles whose matrices fit into registers (compiled for sm_80, sm_89 and sm_90: at most 16 B spilled).

        With four query heads to one of keys they have 32 queries, 128 rows; with fewer heads at least 64 rows, which
        Hopper's products need. float32 has no tensor cores in full precision: 16 rows. ``num_keys`` is of tiles of 128
        rows: on an H100 attention over 32 keys at a time takes 3 to 18 % less time than over 64.
        """
        if dtype == torch.float32:
            return cls(max(1, 16 // padded(group)), 16, 4, 2)
        if head_dim > 128:
            return cls(max(1, 64 // padded(group)), 32, 4, 2)
        if group <= 2:
            return cls(64 // padded(group), 64, 4)
        return cls(max(1, 128 // padded(group)), num_keys)

    def num_rows(self, group: int) -> int:
        """Return the rows of a program's matrix: queries times heads, padded to powers of two."""
        return max(_LEAST_DOT, self.num_queries * padded(group))


def scattered_attention(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    query_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v for each query over all keys up to its position.

    Cache-Craft §4: partial prefill with scattered queries. The mask is the position alone, so each query's own key must
    be in the cache already. No window, no soft cap, no sinks.

    Args:
        query: float [num_tokens, num_heads, head_dim], rotated.
        positions: int [num_tokens]; ascending within a sequence, or tiles read more keys than they need.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
        value_cache: as ``key_cache``.
        block_table: int [num_sequences, num_blocks], or [num_blocks] of one sequence.
        scale: usually head_dim ** -0.5.
        query_starts: int [num_sequences + 1], where each sequence's queries begin, and their end; None: one sequence.
        out: where to write; None: a new tensor.
        tiles: see :class:`Tiles`; None: by the number of heads.

    Returns:
        As ``query``.

    Raises:
        ValueError: a shape, a dtype or a stride is another.
    """
    block_table, query_starts = _check(query, positions, key_cache, value_cache, block_table, query_starts)
    group = check_heads(query, key_cache)
    num_tokens, _, head_dim = query.shape
    out = torch.empty_like(query) if out is None else out
    if out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give {query.dtype} {list(query.shape)}")
    if not num_tokens:
        return out
    tiles = tiles or Tiles.for_heads(group, head_dim, query.dtype)
    num_rows = tiles.num_rows(group)
    grid = (triton.cdiv(num_tokens, num_rows // padded(group)), key_cache.shape[2], block_table.shape[0])
    _kernel[grid](
        query,
        positions,
        key_cache,
        value_cache,
        block_table,
        query_starts,
        out,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        GROUP_PADDED=padded(group),
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(_LEAST_DOT, padded(head_dim)),
        ROWS=num_rows,
        KEYS=max(_LEAST_DOT, tiles.num_keys),
        DOT=dot_dtype(query.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def naive_scattered_attention(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    query_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`scattered_attention` in PyTorch, in float32, with the whole score matrix."""
    block_table, query_starts = _check(query, positions, key_cache, value_cache, block_table, query_starts)
    group = check_heads(query, key_cache)
    out = torch.empty_like(query)
    for blocks, start, end in zip(block_table, query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        if start == end:
            continue
        probabilities = attention_probabilities(query[start:end], positions[start:end], key_cache, blocks, scale)
        values = value_cache[blocks.long()].flatten(0, 1)[: probabilities.shape[-1]].float()
        out[start:end] = torch.einsum("hqk,khd->qhd", probabilities, values.repeat_interleave(group, 1)).to(out.dtype)
    return out


def attention_probabilities(
    query: torch.Tensor, positions: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return float32 ``[num_heads, num_tokens, num_keys]``: each query's attention to the keys up to its position.

    ``num_keys`` is the last position plus 1.
    """
    group = check_heads(query, key_cache)
    num_keys = int(positions.max()) + 1
    keys = key_cache[block_table.long()].flatten(0, 1)[:num_keys].float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    is_later = torch.arange(num_keys, device=query.device)[None, :] > positions[:, None]
    return scores.masked_fill(is_later[None], float("-inf")).softmax(-1)


def _check(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cache(key_cache, value_cache)
    num_tokens = query.shape[0]
    check_indices("positions", positions, num_tokens)
    if query_starts is None:
        query_starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=query.device)
        block_table = block_table[None] if block_table.ndim == 1 else block_table
    if block_table.ndim != 2 or block_table.stride(1) != 1 or block_table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"the block table is {block_table.dtype} {list(block_table.shape)}: give int [num_sequences, num_blocks]"
        )
    check_indices("query_starts", query_starts, block_table.shape[0] + 1)
    return block_table, query_starts


@triton.jit(do_not_specialize=["table_stride"])
def _kernel(
    query,
    positions,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    out,
    scale_log2,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_offset_stride,
    key_head_stride,
    value_block_stride,
    value_offset_stride,
    value_head_stride,
    table_stride,
    out_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    # The last tiles have the most keys: they begin first.
    first = start + (tl.num_programs(0) - 1 - tl.program_id(0)) * (ROWS // GROUP_PADDED)
    if first >= end:
        return
    row = tl.arange(0, ROWS)
    token, member = first + row // GROUP_PADDED, row % GROUP_PADDED
    is_row = (token < end) & (member < GROUP)
    position = tl.load(positions + token, mask=is_row, other=-1)
    num_keys = tl.max(position, 0) + 1
    d = tl.arange(0, HEAD_PADDED)
    is_number = (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    where = token.to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride + d[None, :]
    q = tl.load(query + where, mask=is_row[:, None] & is_number, other=0.0).to(DOT)  # [ROWS, HEAD_PADDED]

    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    n = tl.arange(0, KEYS)
    for first_key in range(0, num_keys, KEYS):
        key = first_key + n
        is_key = key < num_keys
        block = tl.load(block_table + sequence * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = key % BLOCK_SIZE
        is_loaded = is_key[:, None] & is_number
        at = key_cache + block * key_block_stride + offset * key_offset_stride + kv_head * key_head_stride
        k = tl.load(at[:, None] + d[None, :], mask=is_loaded, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= position[:, None], scores, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(weights, 1)
        at = value_cache + block * value_block_stride + offset * value_offset_stride + kv_head * value_head_stride
        v = tl.load(at[:, None] + d[None, :], mask=is_loaded, other=0.0).to(DOT)
        sums = sums * fade[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        highest = new_highest
    where = token.to(tl.int64)[:, None] * out_stride + head[:, None] * out_head_stride + d[None, :]
    tl.store(out + where, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None] & is_number)
