"""A worker's memory of chunks: host memory pages, which the scheduler's process maps for the disk.

They are stored by layer: a copy into a layer of the engine's KV is in one piece where its pages are::

    layer 0: K [num_pages * tokens_per_page, num_kv_heads, head_dim], V the same | layer 1: ...

K is kept without RoPE. The library on the scheduler's side decides which pages hold which chunks.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.chunks.page_layout import LayerShape

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class PagesPlace:
    """The location of a worker's pages for another process of this host.

    Attributes:
        pid, file: the worker's process, and the number of the file there.
        name: which no other file has.
        num_pages: of the worker.
        part_bytes: of a page's K, or V, in each layer, in their order.
    """

    pid: int
    file: int
    name: str
    num_pages: int
    part_bytes: tuple[int, ...]

    def map(self) -> list[np.ndarray] | None:
        """Return each layer's K, then V, of all pages: ``[num_pages, bytes]``; None for a worker on another host."""
        path = Path(f"/proc/{self.pid}/fd/{self.file}")
        try:
            with path.open("r+b", buffering=0) as file:
                if self.name not in str(Path(f"/proc/self/fd/{file.fileno()}").readlink()):
                    return None
                memory = mmap.mmap(file.fileno(), self.num_pages * sum(self.part_bytes))
        except OSError:
            return None
        arena = np.frombuffer(memory, dtype=np.uint8)
        ends = accumulate(self.num_pages * size for size in self.part_bytes)
        return [
            arena[end - self.num_pages * size : end].reshape(self.num_pages, size)
            for end, size in zip(ends, self.part_bytes, strict=True)
        ]


class ChunkMemory:
    """Pages of KV. Used by one thread.

    Args:
        layers: of this worker, in its order.
        dtype: of what is kept.
        tokens_per_page: as the library has it, like ``num_pages``.
        pin_memory: whether the pages are page-locked, for copies to and from a GPU.
    """

    def __init__(
        self,
        *,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        tokens_per_page: int,
        num_pages: int,
        pin_memory: bool = False,
    ) -> None:
        self.tokens_per_page = tokens_per_page
        sizes = [tokens_per_page * each.num_kv_heads * each.head_dim * dtype.itemsize for each in layers for _ in "kv"]
        name = f"ragcache-chunks-{secrets.token_hex(8)}"
        self._file = os.memfd_create(name)
        os.ftruncate(self._file, num_pages * sum(sizes))
        self.place = PagesPlace(os.getpid(), self._file, name, num_pages, tuple(sizes))
        self._arena = torch.frombuffer(mmap.mmap(self._file, num_pages * sum(sizes)), dtype=torch.uint8)
        self._is_page_locked = pin_memory and _page_lock(self._arena)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        parts = iter(self._arena.split([num_pages * size for size in sizes]))
        for layer in layers:
            shape = (num_pages * tokens_per_page, layer.num_kv_heads, layer.head_dim)
            keys, values = (next(parts).view(dtype).view(shape) for _ in "kv")
            self._layers.append((keys, values))

    # Pages

    def pieces(
        self, pages: Sequence[int], layer: int, first: int, last: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K without RoPE and V of tokens ``[first, last)`` in ``pages``, ``[num_tokens, Hkv, D]`` each.

        A piece for each run of neighbouring pages. They are the memory itself, so write nothing to them, and keep the
        pages until they are copied.
        """
        keys, values = self._layers[layer]
        rows = [slice(at, at + count) for _, at, count in self._runs(pages, first, last - first)]
        return [(keys[row], values[row]) for row in rows]

    def write(self, pages: Sequence[int], layer: int, k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> None:
        """Write K without RoPE and V, ``[num_tokens, Hkv, D]`` each, to ``pages`` from token ``offset`` on.

        A copy from a GPU may still be under way on the current stream when this returns.
        """
        keys, values = self._layers[layer]
        for start, at, count in self._runs(pages, offset, k.shape[0]):
            keys[at : at + count].copy_(k[start : start + count], non_blocking=True)
            values[at : at + count].copy_(v[start : start + count], non_blocking=True)

    def close(self) -> None:
        """Release the pages. Idempotent."""
        if self._is_page_locked:
            self._is_page_locked = False
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # Inside

    def _runs(self, pages: Sequence[int], offset: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield contiguous runs of tokens: start after ``offset``, start in the arena, length."""
        size = self.tokens_per_page
        start = 0
        while start < num_tokens:
            page, within = divmod(offset + start, size)
            last = page
            while last + 1 < len(pages) and pages[last + 1] == pages[last] + 1:
                last += 1
            count = min((last + 1 - page) * size - within, num_tokens - start)
            yield start, pages[page] * size + within, count
            start += count


def _page_lock(memory: torch.Tensor) -> bool:
    """Page-lock memory for copies to and from a GPU, and return whether it worked; torch would round up to 2^n."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error.value:
        logger.warning(
            "RC-NOT-PAGE-LOCKED: %d bytes of chunks could not be page-locked (%s): their copies are slower",
            memory.nbytes,
            error,
        )
    return not error.value
