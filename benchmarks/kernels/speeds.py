"""The time of each kernel at the size of Llama-3-8B, against its reference, vLLM's kernels and the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere

from benchmarks.kernels.cases import TOLERANCE, KernelCase, Shape, largest_error, make_case
from benchmarks.kernels.stock import Stock
from benchmarks.kernels.timing import Stopwatch
from ragcache_kernels.chunk_mass import chunk_attention_mass, naive_chunk_attention_mass
from ragcache_kernels.rotate_into_cache import naive_rotate_into_cache, rotate_into_cache
from ragcache_kernels.scattered_attention import Tiles, naive_scattered_attention, scattered_attention
from ragcache_kernels.unrotate_from_cache import naive_unrotate_from_cache, unrotate_from_cache

RECOMPUTED = 0.3


TILES = tuple(
    Tiles(num_queries, num_keys, num_warps, num_stages)
    for num_queries in (16, 32)
    for num_keys in (32, 64, 128)
    for num_warps, num_stages in ((4, 2), (8, 2), (8, 3))
)
"""What ``--sweep`` tries."""


@dataclass(frozen=True, slots=True)
class KernelWorkload:
    """Chunks behind one another, 30 % of their tokens recomputed in runs of each length of ``runs``.

    Rows are moved for ``num_layers`` at a time, attention is that of one.
    """

    shape: Shape
    num_layers: int
    chunk_tokens: int
    runs: tuple[int, ...]

    @classmethod
    def llama(cls) -> KernelWorkload:
        """Return Llama-3-8B's, in bf16, with five chunks of 1,000 tokens."""
        return cls(Shape(32, 8, 128, 5000, dtype=torch.bfloat16), 32, 1000, (1, 2, 4, 8, 16, 32))

    @classmethod
    def tiny(cls) -> KernelWorkload:
        """Return one that the interpreter gets through."""
        return cls(Shape(4, 2, 16, 37, dtype=torch.bfloat16), 1, 20, (1, 4))


@dataclass(frozen=True, slots=True)
class Speed:
    """One kernel on one case; bytes (``link_bytes``: to or from the host) and FLOP are what it cannot do without.

    ``goal`` is what it has to reach: a share of the copy's bandwidth, or of the stock kernel's time.
    """

    operation: str
    case: str
    num_bytes: int
    num_flop: int = 0
    link_bytes: int = 0
    seconds: float = 0.0
    spread: float = 0.0
    twin_s: float | None = None
    masked_sdpa_s: float | None = None
    stock_s: float | None = None
    goal: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


def measure_speeds(
    stopwatch: Stopwatch, workload: KernelWorkload, stock: Stock | None, on_failure: Callable[[str], None]
) -> Iterator[Speed]:
    """Yield what each kernel takes; of one that fails ``on_failure`` is told, and the others go on."""
    measures: list[tuple[str, Callable[[], Speed]]] = [
        ("rotate_into_cache", partial(_rotate, stopwatch, workload, stock)),
        ("rotate_into_cache from the host", partial(_rotate, stopwatch, workload, None, on_host=True)),
        ("unrotate_from_cache", partial(_unrotate, stopwatch, workload)),
        ("unrotate_from_cache to the host", partial(_unrotate, stopwatch, workload, on_host=True)),
        ("chunk_attention_mass", partial(_mass, stopwatch, workload)),
        *(
            (f"scattered_attention, {run}", partial(_attention, stopwatch, workload, stock, run))
            for run in workload.runs
        ),
    ]
    for name, measure in measures:
        try:
            yield measure()
        except Exception as error:  # memory is short, or a kernel cannot be built for this size
            on_failure(f"{name} was not measured: {type(error).__name__}: {error}".splitlines()[0])


def _rotate(stopwatch: Stopwatch, workload: KernelWorkload, stock: Stock | None, *, on_host: bool = False) -> Speed:
    layers, shape = _layers(stopwatch, workload)
    num_tokens = shape.num_keys
    positions = torch.arange(num_tokens, device=stopwatch.device)
    rows, slots = positions.flip(0), layers[0].slots(positions)
    slots[layers[0].scattered(int(RECOMPUTED * num_tokens)).long()] = -1
    num_kept = int((slots >= 0).sum())
    stored = [_rows(case, num_tokens, on_host) for case in layers]

    def with_each(operation: Callable[..., None]) -> Callable[[], None]:
        def call() -> None:
            for case, (keys, values) in zip(layers, stored, strict=True):
                operation(keys, values, rows, positions, slots, case.table, case.key_cache, case.value_cache)

        return call

    stock_calls = [
        stock.rotate_into_cache(case, each, rows, slots) for case, each in zip(layers, stored, strict=True) if stock
    ]
    num_bytes = num_kept * shape.token_bytes * workload.num_layers
    speed = Speed(
        "rotate_into_cache",
        f"{_layers_of(workload, on_host)}, {num_kept:,} of {num_tokens:,} tokens",
        num_bytes=2 * num_bytes,
        link_bytes=num_bytes if on_host else 0,
        goal="" if on_host else "80 % of copy",
    )
    if on_host:
        return _timed(stopwatch, speed, with_each(rotate_into_cache))
    return _timed(
        stopwatch,
        speed,
        with_each(rotate_into_cache),
        twin_s=with_each(naive_rotate_into_cache),
        stock_s=(lambda: [call() for call in stock_calls]) if stock else None,
    )


def _unrotate(stopwatch: Stopwatch, workload: KernelWorkload, *, on_host: bool = False) -> Speed:
    layers, shape = _layers(stopwatch, workload)
    num_tokens = shape.num_keys
    positions = torch.arange(num_tokens, device=stopwatch.device)
    rows, slots = positions.flip(0), layers[0].slots(positions)
    stored = [_rows(case, num_tokens, on_host) for case in layers]

    def with_each(operation: Callable[..., None]) -> Callable[[], None]:
        def call() -> None:
            for case, (keys, values) in zip(layers, stored, strict=True):
                operation(case.key_cache, case.value_cache, slots, positions, case.table, keys, values, rows)

        return call

    num_bytes = num_tokens * shape.token_bytes * workload.num_layers
    speed = Speed(
        "unrotate_from_cache",
        f"{_layers_of(workload, on_host)}, {num_tokens:,} tokens",
        num_bytes=2 * num_bytes,
        link_bytes=num_bytes if on_host else 0,
        goal="" if on_host else "80 % of copy",
    )
    if on_host:
        return _timed(stopwatch, speed, with_each(unrotate_from_cache))
    return _timed(stopwatch, speed, with_each(unrotate_from_cache), twin_s=with_each(naive_unrotate_from_cache))


def _mass(stopwatch: Stopwatch, workload: KernelWorkload) -> Speed:
    case = make_case(workload.shape, stopwatch.device)
    shape = workload.shape
    positions = torch.arange(shape.num_keys, dtype=torch.int32, device=stopwatch.device)
    query = case.random(shape.num_keys, shape.num_heads, shape.head_dim)
    starts = torch.arange(0, shape.num_keys, workload.chunk_tokens, dtype=torch.int32, device=stopwatch.device)
    ends = (starts + workload.chunk_tokens).clamp(max=shape.num_keys)
    arguments = (query, positions, case.key_cache, case.block_table, starts, ends, shape.head_dim**-0.5)
    num_pairs = shape.num_keys * (shape.num_keys + 1) // 2
    speed = Speed(
        "chunk_attention_mass",
        f"1 layer, {shape.num_keys:,} tokens, {len(starts)} chunks",
        num_bytes=query.nbytes + shape.num_keys * shape.token_bytes // 2,
        num_flop=2 * num_pairs * shape.num_heads * shape.head_dim,
    )
    return _timed(
        stopwatch,
        speed,
        lambda: chunk_attention_mass(*arguments),
        twin_s=lambda: naive_chunk_attention_mass(*arguments),
    )


def _attention(stopwatch: Stopwatch, workload: KernelWorkload, stock: Stock | None, run: int) -> Speed:
    shape = workload.shape
    case = make_case(shape, stopwatch.device)
    positions = case.in_runs(int(RECOMPUTED * shape.num_keys), run)
    query = case.random(len(positions), shape.num_heads, shape.head_dim)
    starts = torch.tensor([0, len(positions)], dtype=torch.int32, device=stopwatch.device)
    scale, group = shape.head_dim**-0.5, shape.num_heads // shape.num_kv_heads
    arguments = (query, positions, case.key_cache, case.value_cache, case.block_table[None], scale)
    num_queries = Tiles.for_heads(group, shape.head_dim, shape.dtype).num_queries
    # Each tile reads the keys of its last query once.
    num_keys_read = int(positions[num_queries - 1 :: num_queries].sum())
    num_keys_read += int(positions[-1]) if len(positions) % num_queries else 0
    stock_call = stock.scattered_attention(case, query, positions) if stock else None
    error = 0.0
    if stock_call is not None:
        error = largest_error(scattered_attention(*arguments, query_starts=starts), stock_call())
    speed = Speed(
        "scattered_attention",
        f"1 layer, {len(positions):,} queries in runs of {run}, {shape.num_keys:,} keys",
        num_bytes=2 * query.nbytes + num_keys_read * shape.token_bytes,
        num_flop=4 * (int(positions.sum()) + len(positions)) * shape.num_heads * shape.head_dim,
        goal="faster than stock" if run < 8 else "",
        note=f"differs from stock by {error:.2g}" if error > TOLERANCE[shape.dtype] else "",
    )
    return _timed(
        stopwatch,
        speed,
        lambda: scattered_attention(*arguments, query_starts=starts),
        twin_s=lambda: naive_scattered_attention(*arguments, query_starts=starts),
        masked_sdpa_s=_masked_sdpa(case, query, positions),
        stock_s=stock_call,
    )


def measure_tiles(
    stopwatch: Stopwatch, workload: KernelWorkload, tiles: Sequence[Tiles], on_failure: Callable[[str], None]
) -> Iterator[tuple[Tiles, float]]:
    """Yield the seconds of single scattered queries in each kind of tile that can be built."""
    shape = workload.shape
    case = make_case(shape, stopwatch.device)
    positions = case.in_runs(int(RECOMPUTED * shape.num_keys), 1)
    query = case.random(len(positions), shape.num_heads, shape.head_dim)
    starts = torch.tensor([0, len(positions)], dtype=torch.int32, device=stopwatch.device)
    arguments = (query, positions, case.key_cache, case.value_cache, case.block_table[None], shape.head_dim**-0.5)
    for each in tiles:
        call = partial(scattered_attention, *arguments, query_starts=starts, tiles=each)
        try:
            yield each, stopwatch.time(call).median_s
        except Exception as error:  # too much shared memory for this GPU
            on_failure(f"{each}: {type(error).__name__}: {error}".splitlines()[0])


def _masked_sdpa(case: KernelCase, query: torch.Tensor, positions: torch.Tensor) -> Callable[[], torch.Tensor]:
    # PyTorch's own fused attention, given the mask as a matrix and the keys in one piece.
    shape = case.shape
    group = shape.num_heads // shape.num_kv_heads
    mask = torch.arange(shape.num_keys, device=query.device)[None, :] <= positions[:, None]
    blocks = case.block_table.long()

    def contiguous(cache: torch.Tensor) -> torch.Tensor:
        return cache[blocks].flatten(0, 1)[: shape.num_keys].transpose(0, 1).repeat_interleave(group, 0)

    keys, values = contiguous(case.key_cache)[None], contiguous(case.value_cache)[None]
    queries = query.transpose(0, 1)[None]
    return lambda: F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _layers(stopwatch: Stopwatch, workload: KernelWorkload) -> tuple[list[KernelCase], Shape]:
    cases = [make_case(workload.shape, stopwatch.device, seed) for seed in range(workload.num_layers)]
    first = cases[0]  # one block table for all layers, as in vLLM
    return [replace(case, block_table=first.block_table, table=first.table) for case in cases], workload.shape


def _layers_of(workload: KernelWorkload, on_host: bool) -> str:
    return f"{workload.num_layers} layers{', rows in pinned host memory' if on_host else ''}"


def _rows(case: KernelCase, num_tokens: int, on_host: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = num_tokens, case.shape.num_kv_heads, case.shape.head_dim
    keys, values = case.random(*shape), case.random(*shape)
    if on_host and keys.is_cuda:
        return keys.cpu().pin_memory(), values.cpu().pin_memory()
    return keys, values


def _timed(
    stopwatch: Stopwatch,
    speed: Speed,
    call: Callable[[], object],
    **others: Callable[[], object] | None,
) -> Speed:
    timing = stopwatch.time(call)
    times: dict[str, Any] = {}
    notes = [speed.note] if speed.note else []
    if stopwatch.device.type == "cuda" and not timing.is_replayed:
        notes.append("launched each time: it could not be captured in a CUDA graph")
    for name, other in others.items():
        if other is None:
            continue
        try:
            times[name] = stopwatch.time(other, can_be_captured=name != "twin_s").median_s
        except Exception as error:  # a baseline that fails, or needs more memory than there is, is left out
            notes.append(f"no {name.removesuffix('_s')}: {type(error).__name__}: {error}".splitlines()[0][:120])
    return replace(speed, seconds=timing.median_s, spread=timing.spread, note="; ".join(notes), **times)
