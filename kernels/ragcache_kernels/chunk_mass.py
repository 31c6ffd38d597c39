"""Attention of each token to each chunk: softmax of scores, summed over a chunk's keys.

              keys:   system   | chunk 0      | chunk 1      | chunk 2 | itself
    a token of chunk 2:  .15   |   .20        |   .05        |  .50    |  .10     mass [num_tokens, num_chunks]
                               |   earlier    |   earlier    |  within |          .20  .05  .50, mean of heads
                                   inter          inter         intra

It is attention whose values say in which chunk a key lies: one product of queries and keys, an online softmax, nothing
of the size of the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcache_kernels.arguments import check_cache, check_heads, check_indices, dot_dtype
from ragcache_kernels.rotary import padded
from ragcache_kernels.scattered_attention import Tiles, attention_probabilities

_LEAST_DOT = 16
_MOST_CHUNKS = 64
_LOG2_E = 1.4426950408889634


def chunk_attention_mass(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_ends: torch.Tensor,
    scale: float,
    *,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return each query's attention to each chunk, averaged over heads.

    The sums of Cache-Craft Eq. 3 (a chunk's tokens, an earlier chunk), Eq. 4 (its own) and Eq. 14 (one token, all
    earlier chunks) are sums of these. Keys behind a query count nothing; keys in no chunk, and each token itself, count
    in the softmax alone.

    Args:
        query: float [num_tokens, num_heads, head_dim] of one sequence, rotated.
        positions: int [num_tokens]; ascending, or tiles read more keys than they need.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
        block_table: int [num_blocks], the sequence's.
        chunk_starts: int [num_chunks], positions; chunks may leave gaps.
        chunk_ends: int [num_chunks], exclusive.
        scale: usually head_dim ** -0.5.
        tiles: see :class:`Tiles`; None: by the number of heads.

    Returns:
        float32 [num_tokens, num_chunks].

    Raises:
        ValueError: a shape, a dtype or a stride is another.
    """
    group = _check(query, positions, key_cache, block_table, chunk_starts, chunk_ends)
    num_tokens, num_heads, head_dim = query.shape
    num_chunks, num_kv_heads = chunk_starts.shape[0], key_cache.shape[2]
    by_head = torch.zeros((num_tokens, num_kv_heads, num_chunks), dtype=torch.float32, device=query.device)
    if not num_tokens or not num_chunks:
        return by_head.sum(1)
    tiles = tiles or Tiles.for_heads(group, head_dim, query.dtype, num_keys=64)
    num_rows = tiles.num_rows(group)
    chunks = min(_MOST_CHUNKS, max(_LEAST_DOT, padded(num_chunks)))
    grid = (triton.cdiv(num_tokens, num_rows // padded(group)), num_kv_heads, triton.cdiv(num_chunks, chunks))
    _kernel[grid](
        query,
        positions,
        key_cache,
        block_table,
        chunk_starts,
        chunk_ends,
        by_head,
        scale * _LOG2_E,
        num_tokens,
        num_chunks,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        by_head.stride(0),
        by_head.stride(1),
        GROUP=group,
        GROUP_PADDED=padded(group),
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(_LEAST_DOT, padded(head_dim)),
        ROWS=num_rows,
        KEYS=max(_LEAST_DOT, tiles.num_keys),
        CHUNKS=chunks,
        DOT=dot_dtype(query.dtype),
        # Weights lie between 0 and 1: float16 has three bits more than bf16 there, and membership is exact in both.
        SUM=tl.float32 if query.dtype == torch.float32 else tl.float16,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return by_head.sum(1) / num_heads


def naive_chunk_attention_mass(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute :func:`chunk_attention_mass` in PyTorch, in float32, with the whole score matrix."""
    _check(query, positions, key_cache, block_table, chunk_starts, chunk_ends)
    mass = torch.zeros((query.shape[0], chunk_starts.shape[0]), dtype=torch.float32, device=query.device)
    if not query.shape[0]:
        return mass
    mean = attention_probabilities(query, positions, key_cache, block_table, scale).mean(0)
    mean.scatter_(1, positions.long()[:, None], 0.0)
    for chunk, (start, end) in enumerate(zip(chunk_starts.tolist(), chunk_ends.tolist(), strict=True)):
        mass[:, chunk] = mean[:, start:end].sum(-1)
    return mass


def _check(
    query: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_ends: torch.Tensor,
) -> int:
    check_cache(key_cache, key_cache)
    check_indices("positions", positions, query.shape[0])
    check_indices("block_table", block_table, block_table.numel())
    check_indices("chunk_starts", chunk_starts, chunk_starts.numel())
    check_indices("chunk_ends", chunk_ends, chunk_starts.numel())
    return check_heads(query, key_cache)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "mass_stride", "mass_head_stride"])
def _kernel(
    query,
    positions,
    key_cache,
    block_table,
    chunk_starts,
    chunk_ends,
    by_head,
    scale_log2,
    num_tokens,
    num_chunks,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_offset_stride,
    key_head_stride,
    mass_stride,
    mass_head_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
):
    kv_head = tl.program_id(1)
    QUERIES: tl.constexpr = ROWS // GROUP_PADDED
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the last tiles have the most keys
    row = tl.arange(0, ROWS)
    token, member = first + row // GROUP_PADDED, row % GROUP_PADDED
    is_row = (token < num_tokens) & (member < GROUP)
    position = tl.load(positions + token, mask=is_row, other=-1)
    num_keys = tl.max(position, 0) + 1
    d = tl.arange(0, HEAD_PADDED)
    is_number = (d < HEAD_DIM)[None, :]
    where = token.to(tl.int64)[:, None] * query_stride + (kv_head * GROUP + member)[:, None] * query_head_stride
    q = tl.load(query + where + d[None, :], mask=is_row[:, None] & is_number, other=0.0).to(DOT)
    chunk = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    chunk_start = tl.load(chunk_starts + chunk, mask=chunk < num_chunks, other=0)
    chunk_end = tl.load(chunk_ends + chunk, mask=chunk < num_chunks, other=0)

    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, CHUNKS], tl.float32)
    n = tl.arange(0, KEYS)
    for first_key in range(0, num_keys, KEYS):
        key = first_key + n
        is_key = key < num_keys
        block = tl.load(block_table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        at = key_cache + block * key_block_stride + (key % BLOCK_SIZE) * key_offset_stride + kv_head * key_head_stride
        k = tl.load(at[:, None] + d[None, :], mask=is_key[:, None] & is_number, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= position[:, None], scores, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(weights, 1)
        weights = tl.where(key[None, :] == position[:, None], 0.0, weights)  # itself: in the total, in no chunk
        is_member = (key[:, None] >= chunk_start[None, :]) & (key[:, None] < chunk_end[None, :])  # [KEYS, CHUNKS]
        sums = sums * fade[:, None] + tl.dot(weights.to(SUM), is_member.to(SUM), input_precision="ieee")
        highest = new_highest
    mass = tl.where(is_row[:, None], sums / total[:, None], 0.0)
    mass = tl.sum(tl.reshape(mass, (QUERIES, GROUP_PADDED, CHUNKS)), 1)  # [QUERIES, CHUNKS]
    token = (first + tl.arange(0, QUERIES)).to(tl.int64)
    where = token[:, None] * mass_stride + kv_head * mass_head_stride + chunk[None, :]
    tl.store(by_head + where, mass, mask=(token < num_tokens)[:, None] & (chunk < num_chunks)[None, :])
