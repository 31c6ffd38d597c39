"""Rotary position embedding from a table of cosines and sines, and its inverse, for two kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """A model's rotary table, in vLLM's format (``cos_sin_cache``, ``is_neox_style``).

    Attributes:
        cos_sin: float [num_positions, rotary_dim], a position's cosines and then its sines, contiguous. YaRN and its
            like scale them: cos^2 + sin^2 need not be 1.
        is_neox: the pairs that turn are (i, i + rotary_dim / 2); otherwise neighbours, (2 i, 2 i + 1).

    Raises:
        ValueError: a table of another shape.
    """

    cos_sin: torch.Tensor
    is_neox: bool

    def __post_init__(self) -> None:
        if self.cos_sin.ndim != 2 or self.cos_sin.shape[1] % 2 or not self.cos_sin.is_contiguous():
            raise ValueError(
                f"the table is {list(self.cos_sin.shape)}: give [num_positions, an even rotary_dim], contiguous"
            )

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head; the others are copied."""
        return self.cos_sin.shape[1]

    def check_head(self, head_dim: int) -> None:
        """Reject heads with fewer dimensions than are rotated.

        Raises:
            ValueError: they are.
        """
        if self.rotary_dim > head_dim:
            raise ValueError(f"the table rotates {self.rotary_dim} dimensions, a head has {head_dim}: take its table")


def rotate(keys: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Return ``keys`` rotated to ``positions``: (a c - b s, b c + a s) for each pair (a, b), in float32.

    Args:
        keys: float [num_tokens, num_kv_heads, head_dim], not rotated.
        positions: int [num_tokens].
        table: the model's.

    Returns:
        As ``keys``, in their dtype.
    """
    cos, sin = _cos_sin(positions, table)
    first, second = _pairs(keys, table)
    return _join(keys, first * cos - second * sin, second * cos + first * sin, table)


def unrotate(keys: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Return ``keys`` before :func:`rotate`: rotated back, and divided by cos^2 + sin^2 of each pair.

    That is the table's scale squared, and in a bf16 table what rounding left of it, so it is taken where it is used.
    """
    cos, sin = _cos_sin(positions, table)
    first, second = _pairs(keys, table)
    norm = cos * cos + sin * sin
    return _join(keys, (first * cos + second * sin) / norm, (second * cos - first * sin) / norm, table)


def _cos_sin(positions: torch.Tensor, table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = table.cos_sin[positions].float()[:, None].chunk(2, -1)
    return cos, sin


def _pairs(keys: torch.Tensor, table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = keys[..., : table.rotary_dim].float()
    if table.is_neox:
        first, second = rotated.chunk(2, -1)
        return first, second
    return rotated[..., ::2], rotated[..., 1::2]


def _join(keys: torch.Tensor, first: torch.Tensor, second: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    turned = torch.cat((first, second), -1) if table.is_neox else torch.stack((first, second), -1).flatten(-2)
    return torch.cat((turned.to(keys.dtype), keys[..., table.rotary_dim :]), -1)


@triton.jit
def move_rotated(
    source,
    target,
    table_row,
    is_moved,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BACK: tl.constexpr,
):
    """Read a head at each of ``source``, turn its first 2 * HALF dimensions (``BACK``: back), write it to ``target``.

    ``source``, ``target``, ``table_row``: pointers [ROWS, 1]; ``is_moved``: [ROWS, 1].
    """
    i = tl.arange(0, HALF_PADDED)[None, :]
    is_pair = is_moved & (i < HALF)
    cos = tl.load(table_row + i, mask=is_pair, other=1.0).to(tl.float32)
    sin = tl.load(table_row + HALF + i, mask=is_pair, other=0.0).to(tl.float32)
    j = tl.arange(0, 2 * HALF_PADDED)[None, :]
    is_number = is_moved & (j < 2 * HALF)
    if IS_NEOX:
        first = tl.load(source + i, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + i, mask=is_pair, other=0.0).to(tl.float32)
    else:  # neighbours: one load of whole lines, taken apart in registers
        pairs = tl.load(source + j, mask=is_number, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, (pairs.shape[0], HALF_PADDED, 2)))
    if BACK:
        norm = cos * cos + sin * sin
        new_first = (first * cos + second * sin) / norm
        new_second = (second * cos - first * sin) / norm
    else:
        new_first = first * cos - second * sin
        new_second = second * cos + first * sin
    dtype = target.dtype.element_ty
    if IS_NEOX:
        tl.store(target + i, new_first.to(dtype), mask=is_pair)
        tl.store(target + HALF + i, new_second.to(dtype), mask=is_pair)
    else:
        turned = tl.reshape(tl.join(new_first, new_second), (cos.shape[0], 2 * HALF_PADDED))
        tl.store(target + j, turned.to(dtype), mask=is_number)


@triton.jit
def move(source, target, is_moved, FIRST: tl.constexpr, END: tl.constexpr, PADDED: tl.constexpr):
    """Copy the dimensions FIRST to END of a head from each of ``source`` to ``target``, pointers [ROWS, 1]."""
    i = FIRST + tl.arange(0, PADDED)[None, :]
    is_number = is_moved & (i < END)
    numbers = tl.load(source + i, mask=is_number, other=0.0)
    tl.store(target + i, numbers.to(target.dtype.element_ty), mask=is_number)


def padded(num_dimensions: int) -> int:
    """Return the power of two that a kernel pads ``num_dimensions`` to."""
    return int(triton.next_power_of_2(max(num_dimensions, 1)))
