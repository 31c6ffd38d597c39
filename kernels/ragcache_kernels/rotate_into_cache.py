"""Insert stored chunks into a prompt: gather rows, rotate keys to their positions, scatter into a paged cache.

    rows of the store            positions, slots                   paged cache
    K not rotated, V
     row 4  [ k4 | v4 ]  ---.    position 17, slot 97
     row 5  [ k5 | v5 ]     |    position 18, slot -1 (recomputed anyway: not read, not written)
     row 6  [ k6 | v6 ]     '->  rotate(k4, 17) | v4  ------------>  block 6, offset 1

The floor is one read of each row that is kept and one write of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcache_kernels.arguments import check_cache, check_indices, check_rows
from ragcache_kernels.rotary import RotaryTable, move, move_rotated, padded, rotate

_HEADS_PER_PROGRAM = 16


def rotate_into_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    source_rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: RotaryTable,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Write row ``source_rows[t]`` to ``slots[t]`` of the cache, its keys rotated to ``positions[t]``, for each t.

    Cache-Craft §4: RoPE is applied at the position that a chunk has now, when its KV is put in. Rotated in float32,
    written in the cache's dtype. Tokens whose slot is negative are skipped: those that are recomputed anyway.

    Args:
        keys: float [num_rows, num_kv_heads, head_dim], not rotated, any strides but the last. On CUDA the rows may lie
            in pinned host memory.
        values: as ``keys``.
        source_rows: int [num_tokens].
        positions: int [num_tokens], each a row of the table.
        slots: int [num_tokens], block * block_size + offset, or negative; all distinct.
        table: the model's.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
        value_cache: as ``key_cache``.

    Raises:
        ValueError: a shape, a dtype or a stride is another.
    """
    num_tokens = _check(keys, values, source_rows, positions, slots, table, key_cache, value_cache)
    num_kv_heads, head_dim = keys.shape[1:]
    if not num_tokens:
        return
    _kernel[(triton.cdiv(num_tokens * num_kv_heads, _HEADS_PER_PROGRAM),)](
        keys,
        values,
        source_rows,
        positions,
        slots,
        table.cos_sin,
        key_cache,
        value_cache,
        num_tokens * num_kv_heads,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_DIM=head_dim,
        HEAD_PADDED=padded(head_dim),
        HALF=table.rotary_dim // 2,
        HALF_PADDED=padded(table.rotary_dim // 2),
        REST_PADDED=padded(head_dim - table.rotary_dim),
        IS_NEOX=table.is_neox,
        HEADS=_HEADS_PER_PROGRAM,
    )


def naive_rotate_into_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    source_rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: RotaryTable,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Compute :func:`rotate_into_cache` in PyTorch, on any device."""
    _check(keys, values, source_rows, positions, slots, table, key_cache, value_cache)
    is_kept = slots >= 0
    rows, kept = source_rows[is_kept], slots[is_kept]
    blocks, offsets = kept // key_cache.shape[1], kept % key_cache.shape[1]
    key_cache[blocks, offsets] = rotate(keys[rows], positions[is_kept], table).to(key_cache.dtype)
    value_cache[blocks, offsets] = values[rows].to(value_cache.dtype)


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    source_rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: RotaryTable,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> int:
    check_rows("rows", keys, values)
    check_cache(key_cache, value_cache)
    table.check_head(keys.shape[2])
    if keys.shape[1:] != key_cache.shape[2:]:
        raise ValueError(f"rows are {list(keys.shape)}, the cache {list(key_cache.shape)}: heads must be the same")
    num_tokens = slots.shape[0]
    for name, indices in (("source_rows", source_rows), ("positions", positions), ("slots", slots)):
        check_indices(name, indices, num_tokens)
    return num_tokens


@triton.jit(do_not_specialize=["num_heads_in_all"])
def _kernel(
    keys,
    values,
    source_rows,
    positions,
    slots,
    cos_sin,
    key_cache,
    value_cache,
    num_heads_in_all,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    key_block_stride,
    key_offset_stride,
    key_cache_head_stride,
    value_block_stride,
    value_offset_stride,
    value_cache_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HEADS: tl.constexpr,
):
    # A program moves HEADS heads, those of one token after those of another: [HEADS, 1].
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    token, head = number // NUM_KV_HEADS, number % NUM_KV_HEADS
    is_here = number < num_heads_in_all
    slot = tl.load(slots + token, mask=is_here, other=-1).to(tl.int64)
    is_moved = slot >= 0
    row = tl.load(source_rows + token, mask=is_moved, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=is_moved, other=0).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    source = keys + row * key_row_stride + head * key_head_stride
    target = key_cache + block * key_block_stride + offset * key_offset_stride + head * key_cache_head_stride
    move_rotated(source, target, cos_sin + position * (2 * HALF), is_moved, HALF, HALF_PADDED, IS_NEOX, False)
    if 2 * HALF < HEAD_DIM:
        move(source, target, is_moved, 2 * HALF, HEAD_DIM, REST_PADDED)

    source = values + row * value_row_stride + head * value_head_stride
    target = value_cache + block * value_block_stride + offset * value_offset_stride + head * value_cache_head_stride
    move(source, target, is_moved, 0, HEAD_DIM, HEAD_PADDED)
