"""Layer-wise loads on a worker: a step computes each layer after its KV has been loaded.

RAGCache §6 and Cache-Craft §3.5 overlap a load with the computation of earlier layers. vLLM's offloading loads all
layers before a request is scheduled: the request waits for the load, then for the end of the running step.

::

    step          wait 0 | layer 0 | wait 1 | layer 1 | ...
    copy stream   copy 0 | copy 1  | copy 2 | ...            an event after each layer's copies

vLLM's attention layers ask for their KV (``wait_for_layer_load``), except in a replayed CUDA graph of a whole step:
such a step waits for all layers before it begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import CanonicalKVCaches, OffloadingConnectorMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig


class LayerLoad(NamedTuple):
    """The blocks of a request that a step loads layer by layer.

    Attributes:
        number: of the copy.
        rows: of host memory, one for each block.
        blocks: of the engine's KV memory.
    """

    number: int
    rows: np.ndarray
    blocks: np.ndarray


@dataclass
class LayerLoadMetadata(OffloadingConnectorMetadata):
    """A step's copies, including layer-wise ones."""

    layer_loads: list[LayerLoad] = field(default_factory=list)


class FinishedLoad(NamedTuple):
    """The ended loads of one step.

    Attributes:
        numbers: of the loads.
        num_bytes: bytes of all their blocks.
        seconds: from the first copy to the end of the last one.
    """

    numbers: list[int]
    num_bytes: int
    seconds: float


class CopyEvent(Protocol):
    """An event in a copy stream."""

    def wait(self) -> None:
        """Let the worker's following work wait for the copies before this event."""

    def is_done(self) -> bool:
        """Return whether the copies before this event have ended."""

    def seconds_since(self, other: CopyEvent) -> float:
        """Return the seconds between an earlier event and this one, after both have passed."""


class LayerCopies(Protocol):
    """Copies blocks of one KV tensor after another, in its own stream."""

    def begin(self) -> None:
        """Let the following copies wait for the worker's present work, which may write to their blocks."""

    def copy(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        """Copy rows of host memory into blocks of a KV tensor; return the bytes."""

    def record(self) -> CopyEvent:
        """Return an event after all copies so far."""


class LayerLoadWorker:
    """Runs the layer-wise loads of each step.

    Args:
        copies: the device's copy stream.
        num_tensors: KV tensors of the model, in the order of its layers.
        tensor_of_layer: which of them a layer reads, by the layer's name. A layer without an entry waits for all.
    """

    def __init__(self, copies: LayerCopies, num_tensors: int, tensor_of_layer: Mapping[str, int]) -> None:
        self._copies = copies
        self._num_tensors = num_tensors
        self._tensor_of_layer = tensor_of_layer
        self._events: list[CopyEvent] = []
        self._running: deque[tuple[list[int], int, CopyEvent, CopyEvent]] = deque()

    def start(self, loads: Sequence[LayerLoad], *, waits_by_layer: bool) -> None:
        """Begin the loads of a step.

        Args:
            loads: of the step; none is usual.
            waits_by_layer: whether each layer of the step calls :meth:`wait`. Otherwise the step waits for all here.
        """
        if not loads:
            return
        rows = np.concatenate([load.rows for load in loads])
        blocks = np.concatenate([load.blocks for load in loads])
        self._copies.begin()
        first, num_bytes = self._copies.record(), 0
        for tensor in range(self._num_tensors):
            num_bytes += self._copies.copy(tensor, rows, blocks)
            self._events.append(self._copies.record())
        self._running.append(([load.number for load in loads], num_bytes, first, self._events[-1]))
        if not waits_by_layer:
            self.end_step()

    def wait(self, layer_name: str) -> None:
        """Let a layer of the step wait for its KV."""
        if self._events:
            self._events[self._tensor_of_layer.get(layer_name, -1)].wait()

    def end_step(self) -> None:
        """Let all later work wait for the step's loads, as a layer may not have been computed."""
        if self._events:
            self._events[-1].wait()
            self._events = []

    def take_finished(self) -> list[FinishedLoad]:
        """Return the loads that ended since the last call."""
        finished = []
        while self._running and self._running[0][-1].is_done():
            numbers, num_bytes, first, last = self._running.popleft()
            finished.append(FinishedLoad(numbers, num_bytes, last.seconds_since(first)))
        return finished


def calls_each_layer(context: ForwardContext) -> bool:
    """Return whether each attention layer of a step waits for its KV; a replayed CUDA graph of a step does not."""
    return context.attn_metadata is not None and context.cudagraph_runtime_mode != CUDAGraphMode.FULL


def tensors_by_layer(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: CanonicalKVCaches
) -> dict[str, int]:
    """Return the KV tensor that each layer of the only KV cache group reads.

    Empty if a layer reads its KV without asking for it first, as the index of sparse attention does, and if one tensor
    has all layers: every layer waits for all then.
    """
    layer_names = kv_cache_config.kv_cache_groups[0].layer_names
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
    references = caches.group_data_refs[0]
    if len(references) != len(layers) or not current_platform.opaque_attention_op():
        return {}
    if not all(isinstance(layer, Attention | MLAAttention) for layer in layers):
        return {}
    return {name: reference.tensor_idx for name, reference in zip(layer_names, references, strict=True)}


class PastEvent:
    """An event whose copies had ended when it was recorded."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def seconds_since(self, other: CopyEvent) -> float:
        """Return the seconds between an earlier event and this one."""
        assert isinstance(other, PastEvent)
        return self._at_s - other._at_s
