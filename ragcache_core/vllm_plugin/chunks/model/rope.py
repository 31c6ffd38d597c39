"""Rotate keys to a position and back: stored K is without RoPE, so a chunk fits any position (Cache-Craft §3.1).

The angles are vLLM's own: the table of the model's rotary module, one row per position, half cosines, half sines. YaRN
scales its rows, and no row of a bfloat16 table has exactly norm 1. So rotating back divides by each row's norm.
"""

from __future__ import annotations

from typing import Any

import torch

_REFUSED = {
    "Phi3LongRoPEScaledRotaryEmbedding": "LongRoPE, whose angles depend on the length of the prompt",
    "DualChunkRotaryEmbedding": "dual-chunk attention, whose angles depend on the query",
    "MRotaryEmbedding": "mRoPE, which has three positions for a token",
    "MRotaryEmbeddingInterleaved": "mRoPE, which has three positions for a token",
    "BailingMRotaryEmbedding": "mRoPE, which has three positions for a token",
    "Ernie4_5_VLRotaryEmbedding": "mRoPE, which has three positions for a token",
    "DeepseekScalingRotaryEmbedding": "the RoPE of DeepSeek's compressed attention (MLA)",
    "DeepseekV4ScalingRotaryEmbedding": "the RoPE of DeepSeek's compressed attention (MLA)",
    "FourierRotaryEmbedding": "FoPE, which mixes frequencies",
    "Gemma4RotaryEmbedding": "Gemma's proportional RoPE",
    "Llama4VisionRotaryEmbedding": "a RoPE of images",
}
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class Rope:
    """Rotates keys as a model's rotary module does. Maths in float32, results in the keys' own dtype.

    Args:
        rotary: vLLM's module; its table is used where it lies.
    """

    def __init__(self, rotary: Any) -> None:
        self.table: torch.Tensor = rotary.cos_sin_cache
        """Half cosines, half sines: ``[max_position, rotary_dim]``."""
        self.rotary_dim: int = rotary.rotary_dim
        self.is_neox: bool = rotary.is_neox_style
        """Whether the halves of a head are turned against one another, rather than neighbours."""

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``keys`` ``[T, heads, head_dim]`` without RoPE, rotated to ``positions`` ``[T]``."""
        cos, sin = self._angles(positions)
        return self._turn(keys, cos, sin)

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``keys`` ``[T, heads, head_dim]`` at ``positions`` ``[T]``, without RoPE."""
        cos, sin = self._angles(positions)
        norm = cos.square() + sin.square()
        return self._turn(keys, cos / norm, -sin / norm)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.table[positions].float().chunk(2, dim=-1)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, kept = keys[..., : self.rotary_dim].float(), keys[..., self.rotary_dim :]
        first, second = turned.chunk(2, dim=-1) if self.is_neox else (turned[..., ::2], turned[..., 1::2])
        halves = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(halves, dim=-1) if self.is_neox else torch.stack(halves, dim=-1).flatten(-2)
        joined = joined.to(keys.dtype)
        return torch.cat((joined, kept), dim=-1) if kept.shape[-1] else joined


def unsupported(rotary: Any, head_dim: int) -> str | None:
    """Return why a model's rotary module cannot be inverted; ``None`` if it can.

    What is not refused by name is tried: the module must turn a key as its table says.
    """
    kind = type(rotary).__name__
    if kind in _REFUSED:
        return _REFUSED[kind]
    table = getattr(rotary, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[1] != getattr(rotary, "rotary_dim", 0):
        return f"{kind}, which has no table of cosines and sines by position"
    if (size := getattr(rotary, "head_size", head_dim)) != head_dim:
        return f"{kind} of {size} numbers in heads of {head_dim}"
    cos, sin = table.float().chunk(2, dim=-1)
    if (cos.square() + sin.square()).min() < 1e-3:
        return f"{kind}, whose table cannot be turned back"
    rope = Rope(rotary)
    positions = torch.linspace(0, table.shape[0] - 1, 5, device=table.device).long()
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((5, 1, head_dim), generator=generator).to(device=table.device, dtype=rotary.dtype)
    with torch.inference_mode():
        flat = keys.flatten(1)
        _, turned = rotary(positions, flat.clone(), flat.clone())
        ours = rope.rotate(keys, positions)
        back = rope.unrotate(ours, positions)
    limit = _TOLERANCES.get(rotary.dtype, 6e-2) * max(1.0, ours.abs().max().item())
    if (turned.view_as(keys).float() - ours.float()).abs().max().item() > limit:
        return f"{kind}, which does not turn keys as its table says"
    if (back.float() - keys.float()).abs().max().item() > limit:
        return f"{kind}, whose keys cannot be turned back"
    return None
