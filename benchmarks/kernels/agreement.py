"""Checks every kernel against its reference: prime sizes, all dtypes, both kinds of pairs, part of a head rotated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.cases import TOLERANCE, KernelCase, Shape, largest_error, make_case
from ragcache_kernels.chunk_mass import chunk_attention_mass, naive_chunk_attention_mass
from ragcache_kernels.rotate_into_cache import naive_rotate_into_cache, rotate_into_cache
from ragcache_kernels.scattered_attention import naive_scattered_attention, scattered_attention
from ragcache_kernels.unrotate_from_cache import naive_unrotate_from_cache, unrotate_from_cache

SHAPES = tuple(
    Shape(heads, kv_heads, head_dim, num_keys, block_size, rotary_dim, is_neox, scale, dtype)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for heads, kv_heads, head_dim, num_keys, block_size, rotary_dim, is_neox, scale in (
        (32, 8, 128, 1999, 16, None, True, 1.0),
        (14, 2, 64, 1009, 32, None, True, 1.2079),
        (7, 7, 80, 509, 16, 32, True, 1.0),
        (6, 3, 96, 251, 16, 22, False, 1.0),
        (8, 1, 256, 127, 64, 64, False, 1.3),
    )
)
"""Llama-3-8B, Qwen2 with YaRN, Phi and GPT-J in kind; sequences of prime lengths."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The error of one kernel against its reference on one shape, or why it did not run."""

    operation: str
    shape: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def is_met(self) -> bool:
        """Whether they agree."""
        return not self.failure and self.error <= self.tolerance


def check_all(device: torch.device, shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Agreement]:
    """Yield the comparison of each kernel with its reference on each shape."""
    for shape in shapes:
        for name, compare in COMPARISONS.items():
            yield _compared(name, compare, shape, device)


def compare_rotate(case: KernelCase) -> float:
    """Return the error of :func:`rotate_into_cache` against its reference, skipped tokens included."""
    shape, num_tokens = case.shape, _num_tokens(case)
    keys, values = (case.random(num_tokens + 5, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    rows, positions = _rows(case, num_tokens), case.scattered(num_tokens)
    slots = case.slots(positions)
    slots[::5] = -1
    ours = case.key_cache.clone(), case.value_cache.clone()
    theirs = case.key_cache.clone(), case.value_cache.clone()
    rotate_into_cache(keys, values, rows, positions, slots, case.table, *ours)
    naive_rotate_into_cache(keys, values, rows, positions, slots, case.table, *theirs)
    return max(map(largest_error, ours, theirs))


def compare_unrotate(case: KernelCase) -> float:
    """Return the error of :func:`unrotate_from_cache` against its reference, unwritten rows included."""
    shape, num_tokens = case.shape, _num_tokens(case)
    rows, positions = _rows(case, num_tokens), case.scattered(num_tokens)
    slots = case.slots(positions)
    slots[::5] = -1
    stored = [torch.zeros(num_tokens + 5, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype) for _ in range(4)]
    keys, values, twin_keys, twin_values = (empty.to(case.key_cache.device) for empty in stored)
    caches = case.key_cache, case.value_cache
    unrotate_from_cache(*caches, slots, positions, case.table, keys, values, rows)
    naive_unrotate_from_cache(*caches, slots, positions, case.table, twin_keys, twin_values, rows)
    return max(largest_error(keys, twin_keys), largest_error(values, twin_values))


def compare_mass(case: KernelCase) -> float:
    """Return the error of :func:`chunk_attention_mass`: for chunks with gaps, of one token and of no tokens."""
    shape, num_keys = case.shape, case.shape.num_keys
    positions = case.scattered(_num_tokens(case))
    query = case.random(len(positions), shape.num_heads, shape.head_dim)
    edges = sorted({0, 3, 4, num_keys // 5, num_keys // 3, num_keys // 2, num_keys - 7})
    starts = torch.tensor([*edges, num_keys // 2], dtype=torch.int32, device=query.device)
    ends = torch.tensor([*edges[1:], num_keys - 5, num_keys // 2], dtype=torch.int32, device=query.device)
    arguments = (query, positions, case.key_cache, case.block_table, starts, ends, shape.head_dim**-0.5)
    return largest_error(chunk_attention_mass(*arguments), naive_chunk_attention_mass(*arguments))


def compare_attention(case: KernelCase) -> float:
    """Return the error of :func:`scattered_attention` on two sequences of different lengths."""
    shape = case.shape
    first, second = case.scattered(_num_tokens(case)), case.scattered(7)
    positions = torch.cat((first, second))
    query = case.random(len(positions), shape.num_heads, shape.head_dim)
    starts = torch.tensor([0, len(first), len(positions)], dtype=torch.int32, device=query.device)
    tables = torch.stack((case.block_table, case.block_table.roll(1)))
    caches = case.key_cache, case.value_cache
    arguments = (query, positions, *caches, tables, shape.head_dim**-0.5)
    ours = scattered_attention(*arguments, query_starts=starts)
    return largest_error(ours, naive_scattered_attention(*arguments, query_starts=starts))


COMPARISONS: dict[str, Callable[[KernelCase], float]] = {
    "rotate_into_cache": compare_rotate,
    "unrotate_from_cache": compare_unrotate,
    "chunk_attention_mass": compare_mass,
    "scattered_attention": compare_attention,
}


def _compared(name: str, compare: Callable[[KernelCase], float], shape: Shape, device: torch.device) -> Agreement:
    tolerance = TOLERANCE[shape.dtype]
    try:
        return Agreement(name, str(shape), compare(make_case(shape, device)), tolerance)
    except Exception as error:  # a kernel that does not build must not hide what the others do
        return Agreement(name, str(shape), float("inf"), tolerance, f"{type(error).__name__}: {error}")


def _num_tokens(case: KernelCase) -> int:
    return case.shape.num_keys * 2 // 3


def _rows(case: KernelCase, num_tokens: int) -> torch.Tensor:
    device = case.key_cache.device
    return torch.randperm(num_tokens + 5, generator=case.generator, device=device)[:num_tokens]
