"""Brings stored KV of chunks into the paged cache, layer by layer, turned to where the chunks stand now.

On CUDA the copies out of pinned host memory run on a stream of their own, some layers ahead of the computation
(Cache-Craft §3.5, Algorithm 2); a layer waits for its own copies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcache_core.vllm_plugin.chunks.compute.capture import ChunkPages
from ragcache_core.vllm_plugin.chunks.messages import Injection
from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer

_MEASURED_BYTES = 64 << 20


@dataclass(slots=True)
class _Loaded:
    """A layer's KV in flight to the device: one pair for each injection, and the event of its arrival."""

    pairs: list[tuple[torch.Tensor, ...]]
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Placed:
    """An injection and the slots [last - first] of the paged cache that it goes to."""

    injection: Injection
    slots: torch.Tensor


def copy_rate(device: torch.device) -> float:
    """Return how many bytes a second come from pinned host memory to a CUDA device, measured."""
    source = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)  # the first copy also wakes the link
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return float(_MEASURED_BYTES / (start.elapsed_time(end) * 1e-3))


class LayerwiseLoader:
    """The injections of some jobs, to be called layer by layer, in order.

    Args:
        layers: the model's.
        memory: where the chunks are kept.
        placed: which pages are copied into which blocks.
        depth: how many layers to load ahead of the one that is asked for.
        stream: what copies run on; None where memory is the device's own.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        memory: ChunkPages,
        placed: Sequence[Placed],
        *,
        depth: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._layers = layers
        self._memory = memory
        self._placed = placed
        self._depth = depth
        self._stream = stream
        self._loaded: dict[int, _Loaded] = {}
        self._num_requested = 0

    def inject(self, index: int) -> None:
        """Write the chunks' KV of layer ``index`` into the paged cache."""
        if not self._placed:
            return
        ahead = index + 1 + (self._depth if self._stream is not None else 0)
        while self._num_requested < min(ahead, len(self._layers)):
            self._loaded[self._num_requested] = self._load(self._num_requested)
            self._num_requested += 1
        loaded, layer = self._loaded.pop(index), self._layers[index]
        if loaded.event is not None:
            torch.cuda.current_stream().wait_event(loaded.event)
        for placed, (keys, values) in zip(self._placed, loaded.pairs, strict=True):
            injection = placed.injection
            positions = torch.arange(injection.first, injection.last, device=placed.slots.device)
            layer.unrotated.write(keys, values, positions, placed.slots)
            if loaded.event is not None:
                keys.record_stream(torch.cuda.current_stream())
                values.record_stream(torch.cuda.current_stream())

    def inject_all(self) -> None:
        """Write all layers."""
        for index in range(len(self._layers)):
            self.inject(index)

    def _load(self, index: int) -> _Loaded:
        pairs: list[tuple[torch.Tensor, ...]] = []
        with torch.cuda.stream(self._stream):  # of None: a context that does nothing
            for placed in self._placed:
                injection, device = placed.injection, placed.slots.device
                first, last = injection.first - injection.start, injection.last - injection.start
                pieces = self._memory.pieces(injection.pages, index, first, last)
                pairs.append(tuple(_joined(half, device) for half in zip(*pieces, strict=True)))
            event = None
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
        return _Loaded(pairs, event)


def _joined(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return pieces of page-locked memory as one tensor on a device, joined there."""
    there = [piece.to(device, non_blocking=True) for piece in pieces]
    return there[0] if len(there) == 1 else torch.cat(there)
