"""Checks of tensor arguments, and the place of a token in a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)


def slots_of(positions: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slots in a paged cache of the tokens at ``positions`` of one sequence.

    Args:
        positions: int [num_tokens].
        block_table: int [num_blocks], the sequence's blocks in order.
        block_size: tokens in a block.

    Returns:
        int64 [num_tokens], block * block_size + offset, as in vLLM's slot mapping.
    """
    return block_table[positions // block_size].long() * block_size + positions % block_size


def check_rows(name: str, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Reject keys and values other than numeric ``[num_rows, num_kv_heads, head_dim]``.

    Raises:
        ValueError: another shape or dtype, or a head that does not lie in one piece.
    """
    _check_pair(name, keys, values, 3, "[num_rows, num_kv_heads, head_dim]")


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Reject caches other than numeric ``[num_blocks, block_size, num_kv_heads, head_dim]``, in any memory order.

    Raises:
        ValueError: another shape, an 8-bit cache, or a head that does not lie in one piece.
    """
    _check_pair("cache", key_cache, value_cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim]")


def check_indices(name: str, indices: torch.Tensor, num_tokens: int) -> None:
    """Reject ``indices`` other than contiguous integer ``[num_tokens]``.

    Raises:
        ValueError: another shape, dtype or stride.
    """
    if indices.dtype not in _INTEGERS or indices.shape != (num_tokens,) or (num_tokens > 1 and indices.stride(0) != 1):
        raise ValueError(
            f"{name} are {indices.dtype} {list(indices.shape)}: give int32 or int64 [{num_tokens}], contiguous"
        )


def check_heads(query: torch.Tensor, key_cache: torch.Tensor) -> int:
    """Return the number of query heads per key head (1: MHA; more: GQA).

    Raises:
        ValueError: the query's heads do not divide among the cache's, or are of another size or dtype.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    if query.ndim != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads or query.stride(2) != 1:
        raise ValueError(
            f"the query is {list(query.shape)}: give [num_tokens, a multiple of {num_kv_heads}, {head_dim}], as the "
            "cache has it, with heads that lie in one piece"
        )
    if query.dtype != key_cache.dtype:
        raise ValueError(f"the query is {query.dtype}, the cache {key_cache.dtype}: convert the query")
    return query.shape[1] // num_kv_heads


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which a kernel multiplies tensors of ``dtype``: their own.

    Triton's interpreter keeps bf16 as bits and would multiply those, so there it is float32.
    """
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def _check_pair(name: str, keys: torch.Tensor, values: torch.Tensor, num_dimensions: int, wanted: str) -> None:
    if keys.ndim != num_dimensions or keys.shape != values.shape:
        raise ValueError(f"{name}: keys are {list(keys.shape)}, values {list(values.shape)}: give both as {wanted}")
    if keys.dtype not in FLOATS or values.dtype != keys.dtype:
        raise ValueError(
            f"{name}: keys are {keys.dtype}, values {values.dtype}: give both as bfloat16, float16 or float32"
        )
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension has strides {keys.stride(-1)} and {values.stride(-1)}: give 1")
