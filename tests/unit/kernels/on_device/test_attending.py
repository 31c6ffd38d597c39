"""Scattered attention and chunk masses: what must hold whatever the twin says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import KernelCase, largest_error
from ragcache_kernels.chunk_mass import chunk_attention_mass
from ragcache_kernels.scattered_attention import Tiles, attention_probabilities, scattered_attention

Make = Callable[..., KernelCase]
SCALE = 0.2
TILES = Tiles(16, 16)  # fewer programs than a GPU would like: the interpreter's time goes by programs


def _query(case: KernelCase, positions: torch.Tensor) -> torch.Tensor:
    return case.random(len(positions), case.shape.num_heads, case.shape.head_dim)


def _attend(case: KernelCase, query: torch.Tensor, positions: torch.Tensor, **options: object) -> torch.Tensor:
    caches = case.key_cache, case.value_cache
    options = {"tiles": TILES, **options}
    return scattered_attention(query, positions, *caches, case.block_table, SCALE, **options)  # type: ignore[arg-type]  # by name


def _mass(case: KernelCase, query: torch.Tensor, positions: torch.Tensor, edges: list[int]) -> torch.Tensor:
    starts, ends = (torch.tensor(each, dtype=torch.int32, device=query.device) for each in (edges[:-1], edges[1:]))
    where = case.key_cache, case.block_table, starts, ends, SCALE
    return chunk_attention_mass(query, positions, *where, tiles=TILES)


def _all(case: KernelCase) -> torch.Tensor:
    return torch.arange(case.shape.num_keys, device=case.key_cache.device)


def _cached(case: KernelCase, cache: torch.Tensor) -> torch.Tensor:
    return cache[case.block_table.long()].flatten(0, 1)[: case.shape.num_keys].transpose(0, 1)


@pytest.mark.parametrize("heads", [(2, 2), (6, 3), (5, 1)])
def test_all_positions_are_plain_causal_attention(make: Make, heads: tuple[int, int]) -> None:
    case = make(num_heads=heads[0], num_kv_heads=heads[1])
    query = _query(case, _all(case))
    keys, values = (_cached(case, cache)[None] for cache in (case.key_cache, case.value_cache))
    queries = query.transpose(0, 1)[None]
    plain = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALE, enable_gqa=True)
    assert largest_error(_attend(case, query, _all(case)), plain[0].transpose(0, 1)) < 1e-5


def test_some_positions_are_some_rows_of_all(make: Make) -> None:
    case = make()
    query = _query(case, _all(case))
    whole = _attend(case, query, _all(case))
    some = case.scattered(11).long()
    assert largest_error(_attend(case, query[some], some), whole[some]) < 1e-5


def test_keys_behind_a_query_do_not_count(make: Make) -> None:
    case = make()
    positions = torch.tensor([3, 17], device=case.key_cache.device)
    query = _query(case, positions)
    before = _attend(case, query, positions), _mass(case, query, positions, [0, 18])
    slots = case.slots(torch.arange(18, 23, device=positions.device))
    blocks, offsets = slots // case.shape.block_size, slots % case.shape.block_size
    case.key_cache[blocks, offsets] = 1e4
    case.value_cache[blocks, offsets] = float("nan")
    assert torch.equal(_attend(case, query, positions), before[0])
    assert torch.equal(_mass(case, query, positions, [0, 18]), before[1])


@pytest.mark.parametrize("tiles", [Tiles(1, 16), Tiles(2, 32), Tiles(16, 64)])
def test_tiles_of_every_size_agree(make: Make, tiles: Tiles) -> None:
    case = make()
    positions = case.scattered(19)
    query = _query(case, positions)
    assert largest_error(_attend(case, query, positions, tiles=tiles), _attend(case, query, positions)) < 1e-5


def test_scores_of_any_size_stay_finite(make: Make) -> None:
    case = make()
    positions = case.scattered(7)
    query = 1e4 * _query(case, positions)
    assert torch.isfinite(_attend(case, query, positions)).all()
    mass = _mass(case, query, positions, [0, 23])
    assert torch.isfinite(mass).all()
    assert ((mass >= 0) & (mass <= 1)).all()


def test_sequences_attend_to_their_own_blocks_and_may_have_no_queries(make: Make) -> None:
    case = make()
    positions = case.scattered(13)
    query = _query(case, positions)
    tables = torch.stack((case.block_table, case.block_table, case.block_table.roll(1)))
    starts = torch.tensor([0, 5, 5, 13], device=query.device)
    caches = case.key_cache, case.value_cache
    both = scattered_attention(query, positions, *caches, tables, SCALE, query_starts=starts)
    alone = [
        scattered_attention(query[start:end], positions[start:end], *caches, table, SCALE)
        for table, start, end in ((tables[0], 0, 5), (tables[2], 5, 13))
    ]
    assert torch.equal(both, torch.cat(alone))


def test_chunks_that_cover_a_prompt_have_all_of_the_mass_but_what_tokens_give_to_themselves(make: Make) -> None:
    case = make()
    query = _query(case, _all(case))
    mass = _mass(case, query, _all(case), [0, 5, 5, 11, 20, 23])
    weights = attention_probabilities(query, _all(case), case.key_cache, case.block_table, SCALE).mean(0)
    assert largest_error(mass.sum(1), 1 - weights.diagonal()) < 1e-5
    assert (mass[:, 1] == 0).all()


def test_what_a_kernel_cannot_attend_with_is_refused(make: Make) -> None:
    case = make()
    positions = case.scattered(7)
    query = _query(case, positions)
    with pytest.raises(ValueError, match=r"the query is \[7, 3, 22\]: give \[num_tokens, a multiple of 2, 22\]"):
        _attend(case, query[:, :3], positions)
    with pytest.raises(ValueError, match=r"the query is torch.float16, the cache torch.float32: convert"):
        _attend(case, query.half(), positions)
    with pytest.raises(ValueError, match="positions are"):
        _mass(case, query, positions[1:], [0, 23])
    with pytest.raises(ValueError, match="the block table is torch.float32"):
        scattered_attention(query, positions, case.key_cache, case.value_cache, case.block_table.float(), SCALE)
    with pytest.raises(ValueError, match="out is torch.float32"):
        _attend(case, query, positions, out=query[:3])
    with pytest.raises(ValueError, match="give both as bfloat16"):
        eight_bits = case.key_cache.to(torch.uint8), case.value_cache.to(torch.uint8)
        scattered_attention(query, positions, *eight_bits, case.block_table, SCALE)
