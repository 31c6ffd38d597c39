"""Rows into the cache and out of it: what is turned, what passes through, what is left alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels.cases import TOLERANCE, KernelCase, largest_error
from ragcache_kernels.rotary import RotaryTable, rotate, unrotate
from ragcache_kernels.rotate_into_cache import rotate_into_cache
from ragcache_kernels.unrotate_from_cache import unrotate_from_cache

Make = Callable[..., KernelCase]


def _rows(case: KernelCase) -> tuple[torch.Tensor, torch.Tensor]:
    shape = case.shape.num_keys, case.shape.num_kv_heads, case.shape.head_dim
    return case.random(*shape), case.random(*shape)


def _positions(case: KernelCase) -> torch.Tensor:
    return torch.arange(case.shape.num_keys, device=case.key_cache.device)


def _into_cache(case: KernelCase, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    positions = _positions(case)
    rotate_into_cache(keys, values, positions, positions, slots, case.table, case.key_cache, case.value_cache)


def _in_cache(case: KernelCase) -> tuple[torch.Tensor, torch.Tensor]:
    slots = case.slots(_positions(case))
    blocks, offsets = slots // case.shape.block_size, slots % case.shape.block_size
    return case.key_cache[blocks, offsets], case.value_cache[blocks, offsets]


def test_the_reference_rotates_pairs_as_complex_numbers(make: Make) -> None:
    case = make(is_neox=False)
    keys, _ = _rows(case)
    cos, sin = case.table.cos_sin.chunk(2, -1)
    turned = torch.view_as_complex(keys.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)[:, None]
    expected = torch.view_as_real(turned).flatten(-2)
    assert largest_error(rotate(keys, _positions(case), case.table), expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [True, False])
def test_a_chunk_taken_out_and_put_back_is_what_it_was(make: Make, is_neox: bool, dtype: torch.dtype) -> None:
    case = make(is_neox=is_neox, dtype=dtype, rotary_dim=14, rotary_scale=1.2079)
    keys, values = (torch.empty_like(rows) for rows in _rows(case))
    positions, slots = _positions(case), case.slots(_positions(case))
    before = [rows.clone() for rows in _in_cache(case)]
    unrotate_from_cache(
        case.key_cache, case.value_cache, slots, positions, case.table, keys, values, positions.flip(0).contiguous()
    )
    assert largest_error(keys.flip(0), before[0]) > 0.1
    case.key_cache.zero_()
    case.value_cache.zero_()
    _into_cache(case, keys.flip(0), values.flip(0), slots)
    after_keys, after_values = _in_cache(case)
    assert largest_error(after_keys, before[0]) <= TOLERANCE[dtype]
    assert torch.equal(after_values, before[1])


def test_a_scaled_bf16_table_is_taken_back_pair_by_pair(make: Make) -> None:
    case = make(dtype=torch.bfloat16, rotary_scale=1.2079)
    exact = case.random(case.shape.num_keys, 1, case.shape.head_dim).float()
    there_and_back = unrotate(rotate(exact, _positions(case), case.table), _positions(case), case.table)
    assert largest_error(there_and_back, exact) < 1e-6


def test_tokens_that_are_recomputed_are_neither_read_nor_written(make: Make) -> None:
    case = make()
    keys, values = _rows(case)
    slots = case.slots(_positions(case))
    is_recomputed = torch.zeros(case.shape.num_keys, dtype=torch.bool, device=slots.device)
    is_recomputed[::3] = True
    keys[is_recomputed], values[is_recomputed] = float("nan"), float("nan")
    before = [rows.clone() for rows in _in_cache(case)]
    _into_cache(case, keys, values, slots.masked_fill(is_recomputed, -1))
    after = _in_cache(case)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[is_recomputed], old[is_recomputed])
        assert not torch.equal(new[~is_recomputed], old[~is_recomputed])
    assert torch.equal(after[1][~is_recomputed], values[~is_recomputed])


def test_blocks_of_others_are_left_alone(make: Make) -> None:
    case = make()
    others = torch.ones(case.key_cache.shape[0], dtype=torch.bool, device=case.key_cache.device)
    others[case.block_table.long()] = False
    before = case.key_cache[others].clone()
    _into_cache(case, *_rows(case), case.slots(_positions(case)))
    assert others.any()
    assert torch.equal(case.key_cache[others], before)


def test_rows_may_lie_in_pages_of_all_layers(make: Make) -> None:
    case = make()
    shape = case.shape
    pages = case.random(shape.num_keys, 5, 2, shape.num_kv_heads, shape.head_dim)
    _into_cache(case, pages[:, 3, 0], pages[:, 3, 1], case.slots(_positions(case)))
    keys, values = _in_cache(case)
    assert torch.equal(values, pages[:, 3, 1])
    assert largest_error(keys, rotate(pages[:, 3, 0], _positions(case), case.table)) < 1e-6


def test_what_a_kernel_cannot_move_is_refused(make: Make) -> None:
    case = make()
    keys, values = _rows(case)
    slots, positions = case.slots(_positions(case)), _positions(case)
    caches = case.key_cache, case.value_cache
    with pytest.raises(ValueError, match=r"values \[23, 2, 21\]: give both as \[num_rows"):
        rotate_into_cache(keys, values[..., :-1], positions, positions, slots, case.table, *caches)
    with pytest.raises(ValueError, match="give both as bfloat16, float16 or float32"):
        rotate_into_cache(keys.double(), values.double(), positions, positions, slots, case.table, *caches)
    with pytest.raises(ValueError, match="heads must be the same"):
        rotate_into_cache(keys[:, :1], values[:, :1], positions, positions, slots, case.table, *caches)
    with pytest.raises(ValueError, match=r"positions are torch.int64 \[22\]: give int32 or int64 \[23\]"):
        rotate_into_cache(keys, values, positions, positions[1:], slots, case.table, *caches)
    with pytest.raises(ValueError, match="slots are torch.float32"):
        unrotate_from_cache(*caches, slots.float(), positions, case.table, keys, values, positions)
    with pytest.raises(ValueError, match="the last dimension has strides 2"):
        unrotate_from_cache(*caches, slots, positions, case.table, keys[..., ::2], values[..., ::2], positions)
    wide = RotaryTable(torch.zeros(23, 24, device=keys.device), is_neox=True)
    with pytest.raises(ValueError, match="the table rotates 24 dimensions, a head has 22"):
        unrotate_from_cache(*caches, slots, positions, wide, keys, values, positions)
    with pytest.raises(ValueError, match="an even rotary_dim"):
        RotaryTable(torch.zeros(23, 23), is_neox=True)
