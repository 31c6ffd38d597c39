"""The copy stream of layer-wise loads on CUDA, with the copy kernel of vLLM's offloading."""

from __future__ import annotations

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import CanonicalKVCaches, SharedOffloadRegion
from ragcache_core.vllm_plugin.offload.layer_loads import CopyEvent


class DeviceEvent:
    """An event in a stream of the device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        """Let the current stream wait for the copies before this event; does not block this thread."""
        current_platform.current_stream().wait_event(self._event)

    def is_done(self) -> bool:
        """Return whether the copies before this event have ended."""
        return bool(self._event.query())

    def seconds_since(self, other: CopyEvent) -> float:
        """Return the seconds between an earlier event and this one, after both have passed."""
        assert isinstance(other, DeviceEvent)
        return float(other._event.elapsed_time(self._event)) * 1e-3


class DeviceCopies:
    """Copies blocks of one KV tensor after another, in a stream beside the computing one.

    Args:
        kv_caches: the engine's KV tensors, ``[num_blocks, page_bytes]``.
        region: host memory. A row has a worker's pages of a block one after another.
        row_bytes: from one row to the next.
        first_byte: of this worker in a row.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, *, row_bytes: int, first_byte: int
    ) -> None:
        self._tensors = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
        self._row_bytes = row_bytes
        page_bytes = [cache.page_size_bytes for cache in kv_caches.tensors]
        first_page = region.base_tensor.data_ptr() + first_byte
        self._pages = [first_page + sum(page_bytes[:i]) for i in range(len(page_bytes))]
        self._stream = current_platform.Stream()
        self._descriptors: list[torch.Tensor] = []
        self._last = self.record()

    def begin(self) -> None:
        """Make later copies wait until the current stream has done the work that it has now."""
        self._stream.wait_stream(current_platform.current_stream())
        if self._last.is_done():
            self._descriptors.clear()

    def copy(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        """Copy rows of host memory into blocks of a KV tensor; return the bytes."""
        pages = self._tensors[tensor]
        descriptors = np.empty((3, len(rows)), np.int64)
        descriptors[0] = self._pages[tensor] + rows * self._row_bytes
        descriptors[1] = pages.data_ptr() + blocks * pages.stride(0)
        descriptors[2] = pages.shape[1]
        source, target, sizes = batch = torch.from_numpy(descriptors)
        with current_platform.stream(self._stream):
            # No stream writes to these rows: the host tier keeps them from eviction until all workers read them.
            ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=True)
        self._descriptors.append(batch)  # which the copies may still read
        return int(descriptors[2].sum())

    def record(self) -> DeviceEvent:
        """Return an event after all copies so far."""
        self._last = DeviceEvent(self._stream)
        return self._last
