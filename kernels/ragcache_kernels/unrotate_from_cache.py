"""Extract a chunk from a prompt: gather from a paged cache, rotate keys back, store rows.

    paged cache            slots, positions             rows of the store
    K rotated, V
     block 6, offset 1     slot 97, position 17         K not rotated, V
        [ K17 | v17 ] -->  unrotate(K17, 17) | v17 -->  row 4  [ k4 | v4 ]

The floor is one read and one write of each token; where the rows lie in host memory, the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcache_kernels.arguments import check_cache, check_indices, check_rows
from ragcache_kernels.rotary import RotaryTable, move, move_rotated, padded, unrotate

_HEADS_PER_PROGRAM = 16


def unrotate_from_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: RotaryTable,
    keys: torch.Tensor,
    values: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Write the cache's KV at ``slots[t]`` to row ``target_rows[t]``, its keys rotated back, for each t.

    Cache-Craft §4: a chunk's K is kept without RoPE, for any later position. Keys are rotated back in float32 and
    divided by the square of the table's scale, pair by pair; written in the rows' dtype. Tokens whose slot is negative
    are skipped.

    Args:
        key_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
        value_cache: as ``key_cache``.
        slots: int [num_tokens], block * block_size + offset, or negative.
        positions: int [num_tokens], where the keys were rotated to.
        table: the model's.
        keys: float [num_rows, num_kv_heads, head_dim], any strides but the last. On CUDA the rows may lie in pinned
            host memory.
        values: as ``keys``.
        target_rows: int [num_tokens], all distinct.

    Raises:
        ValueError: a shape, a dtype or a stride is another.
    """
    num_tokens = _check(key_cache, value_cache, slots, positions, table, keys, values, target_rows)
    num_kv_heads, head_dim = keys.shape[1:]
    if not num_tokens:
        return
    _kernel[(triton.cdiv(num_tokens * num_kv_heads, _HEADS_PER_PROGRAM),)](
        key_cache,
        value_cache,
        slots,
        positions,
        table.cos_sin,
        keys,
        values,
        target_rows,
        num_tokens * num_kv_heads,
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
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


def naive_unrotate_from_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: RotaryTable,
    keys: torch.Tensor,
    values: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Compute :func:`unrotate_from_cache` in PyTorch, on any device."""
    _check(key_cache, value_cache, slots, positions, table, keys, values, target_rows)
    is_kept = slots >= 0
    rows, kept = target_rows[is_kept], slots[is_kept]
    blocks, offsets = kept // key_cache.shape[1], kept % key_cache.shape[1]
    keys[rows] = unrotate(key_cache[blocks, offsets], positions[is_kept], table).to(keys.dtype)
    values[rows] = value_cache[blocks, offsets].to(values.dtype)


def _check(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: RotaryTable,
    keys: torch.Tensor,
    values: torch.Tensor,
    target_rows: torch.Tensor,
) -> int:
    check_cache(key_cache, value_cache)
    check_rows("rows", keys, values)
    table.check_head(keys.shape[2])
    if keys.shape[1:] != key_cache.shape[2:]:
        raise ValueError(f"rows are {list(keys.shape)}, the cache {list(key_cache.shape)}: heads must be the same")
    num_tokens = slots.shape[0]
    for name, indices in (("slots", slots), ("positions", positions), ("target_rows", target_rows)):
        check_indices(name, indices, num_tokens)
    return num_tokens


@triton.jit(do_not_specialize=["num_heads_in_all"])
def _kernel(
    key_cache,
    value_cache,
    slots,
    positions,
    cos_sin,
    keys,
    values,
    target_rows,
    num_heads_in_all,
    key_block_stride,
    key_offset_stride,
    key_cache_head_stride,
    value_block_stride,
    value_offset_stride,
    value_cache_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
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
    row = tl.load(target_rows + token, mask=is_moved, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=is_moved, other=0).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    source = key_cache + block * key_block_stride + offset * key_offset_stride + head * key_cache_head_stride
    target = keys + row * key_row_stride + head * key_head_stride
    move_rotated(source, target, cos_sin + position * (2 * HALF), is_moved, HALF, HALF_PADDED, IS_NEOX, True)
    if 2 * HALF < HEAD_DIM:
        move(source, target, is_moved, 2 * HALF, HEAD_DIM, REST_PADDED)

    source = value_cache + block * value_block_stride + offset * value_offset_stride + head * value_cache_head_stride
    target = values + row * value_row_stride + head * value_head_stride
    move(source, target, is_moved, 0, HEAD_DIM, HEAD_PADDED)
