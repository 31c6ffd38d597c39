"""Paged caches, tables and chunks of any shape, for the GPU check and for the tests in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragcache_kernels.arguments import slots_of
from ragcache_kernels.rotary import RotaryTable

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The largest error of a kernel against its reference, relative to 1 + the number: a few units in the last place."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's attention, and a sequence of ``num_keys`` tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_keys: int
    block_size: int = 16
    rotary_dim: int | None = None
    is_neox: bool = True
    rotary_scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        pairs = "neox" if self.is_neox else "interleaved"
        rotary = "" if self.rotary_dim is None else f", {self.rotary_dim} rotated"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}{rotary}, {pairs}, {name}"

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A sequence in a paged cache whose blocks lie in no order, and where everything of it is."""

    shape: Shape
    table: RotaryTable
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    generator: torch.Generator

    def random(self, *shape: int) -> torch.Tensor:
        """Return normally distributed numbers in the case's dtype."""
        device = self.key_cache.device
        numbers = torch.randn(shape, generator=self.generator, device=device, dtype=torch.float32)
        return numbers.to(self.shape.dtype)

    def scattered(self, num_tokens: int) -> torch.Tensor:
        """Return ``num_tokens`` random positions, ascending."""
        device = self.key_cache.device
        chosen = torch.randperm(self.shape.num_keys, generator=self.generator, device=device)[:num_tokens]
        return chosen.sort().values.to(torch.int32)

    def in_runs(self, num_tokens: int, run: int) -> torch.Tensor:
        """Return at most ``num_tokens`` positions in runs of exactly ``run`` neighbours, evenly spread."""
        device = self.key_cache.device
        num_runs = max(num_tokens // run, 1)
        starts = torch.arange(num_runs, device=device) * self.shape.num_keys // num_runs
        return (starts[:, None] + torch.arange(run, device=device)[None, :]).flatten().to(torch.int32)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where the sequence keeps the tokens at ``positions``."""
        return slots_of(positions, self.block_table, self.shape.block_size)


def make_case(shape: Shape, device: torch.device, seed: int = 0) -> KernelCase:
    """Return a case with random keys and values, laid out as vLLM lays them: [blocks, heads, tokens, K and V]."""
    generator = torch.Generator(device).manual_seed(seed)
    num_blocks = -(-shape.num_keys // shape.block_size)
    rotary_dim = shape.head_dim if shape.rotary_dim is None else shape.rotary_dim
    laid = (num_blocks + 3, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
    cache = torch.randn(laid, generator=generator, device=device).to(shape.dtype)
    key_cache, value_cache = cache.transpose(1, 2).split(shape.head_dim, dim=-1)
    block_table = torch.randperm(num_blocks + 3, generator=generator, device=device)[:num_blocks].to(torch.int32)
    table = make_table(shape.num_keys, rotary_dim, device, shape)
    return KernelCase(shape, table, key_cache, value_cache, block_table, generator)


def make_table(num_positions: int, rotary_dim: int, device: torch.device, shape: Shape) -> RotaryTable:
    """Return cosines and sines as Llama has them (base 500,000), times ``shape.rotary_scale`` as YaRN has them."""
    frequencies = 500_000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / max(rotary_dim, 1))
    angles = torch.arange(num_positions, device=device)[:, None] * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1) * shape.rotary_scale
    return RotaryTable(cos_sin.to(shape.dtype), shape.is_neox)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest |actual - expected| / (1 + |expected|); infinite if a number is not finite."""
    if not actual.numel():
        return 0.0
    actual, expected = actual.float(), expected.float()
    error = ((actual - expected).abs() / (1 + expected.abs())).max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")
