"""Store the KV of chunks that were just computed, with their attention statistics (Cache-Craft §3.1).

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
from ragcache_core.vllm_plugin.chunks.model.paged_kv import to_device


class ChunkPages(Protocol):
    """The memory of stored chunks; see ``storage/host_pool.py``."""

    def write(self, pages: Sequence[int], layer: int, k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> None:
        """Write keys without RoPE, and values, ``[T, num_kv_heads, head_dim]`` each, of a layer."""

    def pieces(
        self, pages: Sequence[int], layer: int, first: int, last: int
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return tokens ``[first, last)`` in consecutive pieces."""


@dataclass(slots=True)
class _Measured:
    """Sums so far: ``mass`` ``[num_tokens of the chunk, chunks before it and itself]``, on the device.

    ``seen`` masks measured tokens, on the CPU.
    """

    mass: torch.Tensor
    seen: torch.Tensor


class ChunkCapture:
    """The chunks of requests in flight that will be stored.

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
        """Add the attention of a request's chunk rows in a layer.

        Args:
            layer_index: the layer.
            captures: the chunks.
            query: [num_rows, num_heads, head_dim].
            positions: [num_rows], some of the prompt's, sorted, on the CPU; those outside the chunks are passed over.
            slots: where the cache keeps the prompt, up to the last of ``positions`` at least.
        """
        if layer_index not in self._measured_layers:
            return
        keys = PromptKeys(self._layers[layer_index], slots)
        for capture in captures:
            first, last = torch.searchsorted(positions, torch.tensor([capture.start, capture.end])).tolist()
            if first == last:
                continue
            chunks = [*capture.before, (capture.start, capture.end)]
            rows = query[first:last], positions[first:last]
            mass = keys.mass(*rows, chunks)
            measured = self._measured.get(capture.id)
            if measured is None:
                num_tokens = capture.end - capture.start
                measured = _Measured(
                    torch.zeros((num_tokens, len(chunks)), device=query.device),
                    torch.zeros(num_tokens, dtype=torch.bool),
                )
                self._measured[capture.id] = measured
            offsets = positions[first:last] - capture.start
            measured.mass[to_device(offsets, query.device)] += mass / len(self._measured_layers)
            measured.seen[offsets] = True

    def keep(self, capture: Capture, slots: torch.Tensor) -> torch.Tensor | None:
        """Copy a complete chunk's KV into its pages, and return its statistics; ``None`` if they are incomplete.

        Tokens that were not computed here, because a prefix hit brought them, count as the mean of the others. On CUDA
        the copies are under way when this returns, and :func:`figures_of` wait for them.

        Args:
            capture: the chunk.
            slots: where the cache keeps the prompt, up to the chunk's end at least.

        Returns:
            float32 [num_tokens, num_chunks]: how each token attends to the chunks before, and to its own.
        """
        measured = self._measured.pop(capture.id, None)
        if measured is None or 2 * int(measured.seen.sum()) < capture.end - capture.start:
            return None
        positions = torch.arange(capture.start, capture.end, device=slots.device)
        for index, layer in enumerate(self._layers):
            keys, values = layer.unrotated.read(positions, slots[capture.start : capture.end])
            self._memory.write(capture.pages, index, keys, values)
        mass, seen = measured.mass, measured.seen
        if not bool(seen.all()):
            is_seen = to_device(seen, mass.device).unsqueeze(1)
            mass = torch.where(is_seen, mass, (mass * is_seen).sum(0) / int(seen.sum()))
        return mass.to("cpu", non_blocking=True)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the measurements of requests."""
        gone = set(request_ids)
        for name in [name for name in self._measured if name[0] in gone]:
            del self._measured[name]


def figures_of(capture: Capture, mass: torch.Tensor) -> CapturedChunk:
    """Return the sums measured by :meth:`ChunkCapture.keep`, whose copy has ended."""
    own = len(capture.before)
    sums = mass[:, : own + 1].sum(0).tolist()
    return CapturedChunk(tuple(sums[:own]), sums[own], tuple(mass[:, :own].sum(1).tolist()))
