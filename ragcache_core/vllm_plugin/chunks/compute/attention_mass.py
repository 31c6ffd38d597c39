"""How much the tokens of a chunk attend to other chunks and to their own (Cache-Craft Eq. 3, 4, 14).

One more product of queries and keys beside the attention itself, so of deep models only some layers are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import linear

from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.chunks.model.paged_kv import to_device

_MAX_MEASURED_LAYERS = 8
_MAX_SCORES = 1 << 24
"""Elements of a piece of the score matrix: 64 MiB in float32."""

Observer = Callable[[int, torch.Tensor], None]
"""Is told a layer's index and its queries [num_tokens, num_heads, head_dim], when their keys are in the cache.

What it raises ends the forward pass.
"""
Attend = Callable[[int, torch.Tensor, torch.Tensor], bool]
"""Is asked to write a layer's attention: its index, queries, and where to, as the queries; False if it does not."""


def measured_layers(num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers whose attention stands for all: at most 8, evenly spread."""
    count = min(num_layers, _MAX_MEASURED_LAYERS)
    return tuple(sorted({(2 * i + 1) * num_layers // (2 * count) for i in range(count)}))


class Observed:
    """Attention layers with two hooks: one observes their queries, the other may compute their attention.

    vLLM hands a connector keys and values, never queries. So each layer's ``impl.forward`` is wrapped, on its own
    instance. Unused hooks cost two look-ups.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.observer: Observer | None = None
        self.attend: Attend | None = None
        self._impls = [layer.attention.impl for layer in layers]
        for index, (layer, impl) in enumerate(zip(layers, self._impls, strict=True)):
            updates_cache_in_forward = layer.attention.get_attn_backend().forward_includes_kv_cache_update
            impl.forward = self._wrapped(index, impl.forward, updates_cache_in_forward=updates_cache_in_forward)

    def close(self) -> None:
        """Give the layers their own ``forward`` back."""
        for impl in self._impls:
            del impl.forward
        self._impls = []

    def _wrapped(
        self, index: int, forward: Callable[..., Any], *, updates_cache_in_forward: bool
    ) -> Callable[..., Any]:
        """Wrap a layer's ``forward``; ``updates_cache_in_forward`` where only that brings the keys into the cache."""

        def observed(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            observer, attend = self.observer, self.attend
            if observer is not None and not updates_cache_in_forward:
                observer(index, query)
            if attend is not None and attend(index, query, kwargs["output"]):
                return kwargs["output"]
            output = forward(layer, query, *args, **kwargs)
            if observer is not None and updates_cache_in_forward:
                observer(index, query)
            return output

        return observed


class PromptKeys:
    """The keys of a prompt in one layer's cache, for queries that look at its chunks.

    Args:
        layer: the layer.
        slots: [num_keys], where its cache keeps the prompt from the first token on.
    """

    def __init__(self, layer: AttentionLayer, slots: torch.Tensor) -> None:
        self._layer = layer
        self._slots = slots

    def mass(self, query: torch.Tensor, positions: torch.Tensor, chunks: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return how much each query attends to each chunk, the mean of its heads; none to itself.

        Args:
            query: [num_rows, num_heads, head_dim], rotated.
            positions: [num_rows], in the prompt, sorted; on the CPU.
            chunks: ``[start, end)`` of each; they may leave gaps.

        Returns:
            float32 [num_rows, num_chunks].
        """
        there = to_device(positions, query.device)
        if self._layer.unrotated.uses_kernels and not soft_cap(self._layer):
            return self._mass_by_kernel(query, there, chunks)
        keys = self._keys[..., : int(positions[-1]) + 1]
        num_keys = keys.shape[-1]
        members = torch.zeros((len(chunks), num_keys), device=keys.device)
        for row, (start, end) in enumerate(chunks):
            members[row, start:end] = 1.0
        num_rows = max(1, _MAX_SCORES // (query.shape[1] * num_keys))
        pieces = []
        for first in range(0, len(query), num_rows):
            part, at = query[first : first + num_rows], there[first : first + num_rows]
            weights = _weights(self._layer, part, at, int(positions[first]), keys)
            own = weights.gather(3, at.view(1, -1, 1, 1).expand(*weights.shape[:3], 1))
            mass = linear(weights, members) - own * members.T[at].unsqueeze(1)
            pieces.append(mass.sum((0, 2)) / query.shape[1])
        return torch.cat(pieces)

    @cached_property
    def _keys(self) -> torch.Tensor:
        """float32 [num_kv_heads, head_dim, num_keys]."""
        return self._layer.kv.read_keys(self._slots).float().permute(1, 2, 0)

    def _mass_by_kernel(
        self, query: torch.Tensor, positions: torch.Tensor, chunks: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        from ragcache_kernels.chunk_mass import chunk_attention_mass

        size, device = self._layer.kv.tokens_per_block, query.device
        key_cache, _ = self._layer.unrotated.caches()
        starts, ends = to_device(torch.tensor(chunks), device).unbind(1)
        return chunk_attention_mass(
            query.contiguous(),
            positions,
            key_cache,
            self._slots[::size] // size,
            starts.contiguous(),
            ends.contiguous(),
            float(self._layer.attention.impl.scale),
        )


def soft_cap(layer: AttentionLayer) -> float:
    """Return what bounds a layer's scores; 0 where nothing does."""
    return float(getattr(layer.attention.impl, "logits_soft_cap", None) or 0.0)


def _weights(
    layer: AttentionLayer, query: torch.Tensor, positions: torch.Tensor, first: int, keys: torch.Tensor
) -> torch.Tensor:
    """Return the softmax of the scores, [num_kv_heads, num_rows, group, num_keys]; ``first`` is the first position."""
    num_rows, num_heads, head_dim = query.shape
    scaled = query.float() * layer.attention.impl.scale
    grouped = scaled.view(num_rows, keys.shape[0], -1, head_dim).transpose(0, 1)  # [kv heads, rows, group, dim]
    scores = grouped.flatten(1, 2) @ keys
    if cap := soft_cap(layer):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.view(keys.shape[0], num_rows, num_heads // keys.shape[0], keys.shape[2])
    later = torch.arange(first, keys.shape[2], device=keys.device) > positions.unsqueeze(1)
    scores[..., first:].masked_fill_(later.unsqueeze(1), float("-inf"))
    return scores.softmax(-1)
