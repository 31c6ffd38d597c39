"""Keeps the KV of chunks that were just computed, with what their tokens attended to (Cache-Craft §3.1).

Queries exist only while a layer runs, so attention is measured there, step by step if a prefill is chunked. Keys and
values are read from the paged cache once a chunk is complete: tokens that a prefix hit brought are there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ragcache_core.vllm_plugin.chunks.compute.attention_mass import PromptKeys, measured_layers
from ragcache_core.vllm_plugin.chunks.messages import Capture, CapturedChunk, CaptureId
from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer


class ChunkPages(Protocol):
    """Where the KV of chunks is kept; see ``storage/host_pool.py``."""

    def write(self, pages: Sequence[int], layer: int, k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> None:
        """Keep keys without a position, and values, [T, num_kv_heads, head_dim], of a layer."""

    def read(self, pages: Sequence[int], layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first ``num_tokens`` of what was written."""


@dataclass(slots=True)
class _Measured:
    """Sums so far: ``mass`` [num_tokens of the chunk, chunks before it and itself]; which tokens were seen."""

    mass: torch.Tensor
    seen: torch.Tensor


class ChunkCapture:
    """The chunks of requests in flight that are to be kept.

    Args:
        layers: the model's.
        memory: where they are kept.
    """

    def __init__(self, layers: Sequence[AttentionLayer], memory: ChunkPages) -> None:
        self._layers = layers
        self._memory = memory
        self._measured_layers = measured_layers(len(layers))
        self._measured: dict[CaptureId, _Measured] = {}

    def measure(
        self,
        layer_index: int,
        captures: Sequence[Capture],
        query: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Add what rows of a request's chunks attend to in a layer.

        Args:
            layer_index: the layer.
            captures: the chunks.
            query: [num_rows, num_heads, head_dim].
            positions: [num_rows], some of the prompt's; those outside the chunks are passed over.
            slots: where the cache keeps the prompt, up to the last of ``positions`` at least.
        """
        if layer_index not in self._measured_layers:
            return
        keys = PromptKeys(self._layers[layer_index], slots)
        for capture in captures:
            inside = (positions >= capture.start) & (positions < capture.end)
            if not bool(inside.any()):
                continue
            chunks = [*capture.before, (capture.start, capture.end)]
            mass = keys.mass(query[inside], positions[inside], chunks)
            measured = self._measured.get(capture.id)
            if measured is None:
                num_tokens, device = capture.end - capture.start, query.device
                measured = _Measured(
                    torch.zeros((num_tokens, len(chunks)), device=device),
                    torch.zeros(num_tokens, dtype=torch.bool, device=device),
                )
                self._measured[capture.id] = measured
            offsets = positions[inside] - capture.start
            measured.mass[offsets] += mass / len(self._measured_layers)
            measured.seen[offsets] = True

    def keep(self, capture: Capture, slots: torch.Tensor) -> CapturedChunk | None:
        """Copy a complete chunk's KV into its pages and return its figures; None if too little of it was seen.

        Tokens that were not computed here, because a prefix hit brought them, count as the mean of the others.

        Args:
            capture: the chunk.
            slots: where the cache keeps the prompt, up to the chunk's end at least.
        """
        measured = self._measured.pop(capture.id, None)
        if measured is None or 2 * int(measured.seen.sum()) < capture.end - capture.start:
            return None
        positions = torch.arange(capture.start, capture.end, device=slots.device)
        for index, layer in enumerate(self._layers):
            keys, values = layer.unrotated.read(positions, slots[capture.start : capture.end])
            self._memory.write(capture.pages, index, keys, values)
        return _figures(measured)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what was measured for requests."""
        gone = set(request_ids)
        for name in [name for name in self._measured if name[0] in gone]:
            del self._measured[name]


def _figures(measured: _Measured) -> CapturedChunk:
    mass, seen = measured.mass, measured.seen
    if not bool(seen.all()):
        mass = torch.where(seen.unsqueeze(1), mass, mass[seen].mean(0))
    sums = mass.sum(0).tolist()
    return CapturedChunk(tuple(sums[:-1]), sums[-1], tuple(mass[:, :-1].sum(1).tolist()))
