"""A worker's memory of chunks: pages of host memory, and the disk below them.

The arena is stored by layer: a copy into a layer of the engine's KV is in one piece where its pages are::

    layer 0: K [num_pages * tokens_per_page, num_kv_heads, head_dim], V the same | layer 1: ...

K is kept without RoPE. The library on the scheduler's side decides which pages hold which chunks. Threads use the disk:
a step waits for none of them, and gets their results from :meth:`ChunkMemory.take_report`. A disk that fails, or does
not answer in time, is out of service until the next start.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ragcache_core.chunkstore import AsyncStore, Scratch, Transfer
from ragcache_core.errors import CacheTierError, ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.vllm_plugin.chunks.messages import (
    DropChunks,
    MemoryCommand,
    MemoryReport,
    NameChunks,
    NoteUses,
    ReadChunk,
    ScrubDisk,
    StoredChunk,
    WriteChunk,
)
from ragcache_core.vllm_plugin.chunks.page_layout import LayerShape, page_bytes_of
from ragcache_core.vllm_plugin.chunks.storage.disk_store import ChunkDisk, DiskPlace

logger = logger_of(__name__)

_NUM_READERS = 2
_DRAIN_TIMEOUT_S = 60.0


class ChunkMemory:
    """Pages of KV, which one thread reads and writes, and commands that other threads carry out.

    Args:
        layers: of this worker, in its order.
        dtype: of what is kept.
        tokens_per_page: as the library has it, like ``num_pages``.
        pin_memory: whether the pages are page-locked, for copies to and from a GPU.
        disk: where chunks outlive the engine; None keeps none there.

    Raises:
        ConfigError, CacheTierError: the disk's share holds not a page, its key is gone, or it cannot be used, and this
            engine has not served before, which would go on without it.
    """

    def __init__(
        self,
        *,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        tokens_per_page: int,
        num_pages: int,
        pin_memory: bool = False,
        disk: DiskPlace | None = None,
    ) -> None:
        self.tokens_per_page = tokens_per_page
        self.num_pages = num_pages
        self.page_bytes = page_bytes_of(layers, dtype.itemsize, tokens_per_page)
        self._disk: ChunkDisk | None = None
        self._is_disk_lost = False
        try:
            if disk is not None:
                self._disk = ChunkDisk(disk, page_bytes=self.page_bytes, tokens_per_page=tokens_per_page)
        except (CacheTierError, ConfigError) as error:  # the latter where its key is gone
            if STARTED_AGAIN_ENV not in os.environ:
                raise
            logger.error("RC-TIER-OFF: RAGCache's disk of chunks is out of service until the next start: %s", error)
            self._is_disk_lost = True
        num_elements = num_pages * self.page_bytes // dtype.itemsize
        self._arena = torch.empty(num_elements, dtype=dtype)
        self._is_page_locked = pin_memory and _page_lock(self._arena)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes: list[np.ndarray] = []  # [num_pages, bytes of a page's K, or V, in one layer]
        start = 0
        for layer in layers:
            shape = (num_pages * tokens_per_page, layer.num_kv_heads, layer.head_dim)
            pair = []
            for _ in range(2):
                part = self._arena[start : start + shape[0] * shape[1] * shape[2]]
                start += part.numel()
                pair.append(part.view(shape))
                self._bytes.append(part.view(torch.uint8).numpy().reshape(num_pages, -1))
            self._layers.append((pair[0], pair[1]))
        self._store: AsyncStore | None = None
        if self._disk is not None:
            self._store = AsyncStore(self._disk, "RAGCache's disk of chunks", num_readers=_NUM_READERS)
        self._under_way: dict[int, Transfer] = {}
        self._lock = threading.Lock()
        self._report = _Tally()
        self._is_down = False

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
        """Put K without RoPE and V, ``[num_tokens, Hkv, D]`` each, into ``pages`` from token ``offset`` on.

        A copy from a GPU may still be under way on the current stream when this returns.
        """
        keys, values = self._layers[layer]
        for start, at, count in self._runs(pages, offset, k.shape[0]):
            keys[at : at + count].copy_(k[start : start + count], non_blocking=True)
            values[at : at + count].copy_(v[start : start + count], non_blocking=True)

    # Disk

    def stored(self) -> tuple[StoredChunk, ...]:
        """Return the variants that an engine before left on disk.

        Raises:
            CacheTierError: the disk cannot be read at the moment.
        """
        return () if self._disk is None else tuple(self._disk.stored())

    def run(self, commands: Iterable[MemoryCommand]) -> None:
        """Begin what the library asks for. Writes and deletions keep their order, reads overtake them."""
        for command in commands:
            if self._disk is None or self._store is None:
                if isinstance(command, ReadChunk | WriteChunk | ScrubDisk):
                    self._report.failed[command.command_id] += 1
                continue
            match command:
                case ReadChunk():
                    transfer = self._under_way[command.command_id] = Transfer()
                    self._store.read(transfer, partial(self._read, self._disk, command, transfer))
                case WriteChunk():
                    transfer = self._under_way[command.command_id] = Transfer()
                    self._store.change(
                        partial(self._write, self._store, self._disk, command, transfer),
                        partial(self._on_written, command.command_id, transfer),
                        is_write=True,
                    )
                case DropChunks():
                    for dropped in command.dropped:
                        self._store.change(partial(self._disk.drop, DropChunks((dropped,))))
                case ScrubDisk():
                    transfer = self._under_way[command.command_id] = Transfer()
                    self._store.change(
                        partial(self._disk.scrub, self._store.record_progress),
                        partial(self._on_written, command.command_id, transfer),
                        is_forced=True,
                    )
                case NameChunks():
                    self._store.change(partial(self._disk.rename, command))
                case NoteUses():
                    self._store.change(partial(self._disk.note, command))

    def take_report(self) -> MemoryReport:
        """Return what has been done since the last report; what takes too long has failed."""
        is_down = self._is_disk_lost or (self._store is not None and self._store.why_down() is not None)
        for command_id, transfer in list(self._under_way.items()) if is_down else ():
            if transfer.abandon():
                self._end(command_id, is_done=False)
        with self._lock:
            report, self._report = self._report, _Tally()
        is_news, self._is_down = is_down and not self._is_down, is_down
        return MemoryReport(report.done, report.failed, report.num_corrupt, is_news)

    def drain(self) -> None:
        """Wait until everything that was asked for has been done."""
        if self._store is not None:
            self._store.finish_reads(_DRAIN_TIMEOUT_S)
            self._store.finish_changes(_DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """End the threads after what they were asked to write, and close the stores. Idempotent."""
        if self._store is not None and not self._store.close():
            return
        if self._is_page_locked:
            self._is_page_locked = False
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())

    # Inside

    def _runs(self, pages: Sequence[int], offset: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield tokens that lie in one piece: where they begin after ``offset``, where in the arena, how many."""
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

    def _gather(self, pages: Sequence[int], rows: np.ndarray) -> None:
        """Copy pages into rows, ``[len(pages), page_bytes]``."""
        start, index = 0, list(pages)
        for part in self._bytes:
            rows[:, start : start + part.shape[1]] = part[index]
            start += part.shape[1]

    def _scatter(self, pages: Sequence[int], rows: np.ndarray) -> None:
        """Copy rows into pages."""
        start, index = 0, list(pages)
        for part in self._bytes:
            part[index] = rows[:, start : start + part.shape[1]]
            start += part.shape[1]

    def _write(self, store: AsyncStore, disk: ChunkDisk, command: WriteChunk, transfer: Transfer) -> None:
        def gather(pages: Sequence[int], rows: np.ndarray) -> None:
            if not transfer.move(lambda: self._gather(pages, rows)):
                raise CacheTierError("it has taken so long that its pages hold something else")
            store.record_progress()  # a large chunk is written in several parts

        disk.write(command, gather)

    def _on_written(self, command_id: int, transfer: Transfer, error: Exception | None) -> None:
        if transfer.finish():
            self._end(command_id, is_done=error is None)

    def _read(self, disk: ChunkDisk, command: ReadChunk, transfer: Transfer, scratch: Scratch) -> int:
        def deliver(pages: Sequence[int], rows: np.ndarray) -> bool:
            return transfer.move(lambda: self._scatter(pages, rows))

        is_found = False
        try:
            is_found = disk.read(command, scratch, deliver)
        except Exception:  # whatever it is, this chunk is a miss
            logger.warning("RC-DISK-UNREADABLE: a chunk cannot be read: a miss", exc_info=True)
        if transfer.finish():
            self._end(command.command_id, is_done=is_found, is_corrupt=not is_found)
        return len(command.pages) * self.page_bytes if is_found else 0

    def _end(self, command_id: int, *, is_done: bool, is_corrupt: bool = False) -> None:
        with self._lock:
            del self._under_way[command_id]
            (self._report.done if is_done else self._report.failed)[command_id] += 1
            self._report.num_corrupt += is_corrupt


def _page_lock(memory: torch.Tensor) -> bool:
    """Lock memory for copies to and from a GPU, and return whether it is; torch's way would round it up to 2^n."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error.value:
        logger.warning(
            "RC-NOT-PAGE-LOCKED: %d bytes of chunks could not be page-locked (%s): their copies are slower",
            memory.nbytes,
            error,
        )
    return not error.value


@dataclass(slots=True)
class _Tally:
    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    num_corrupt: int = 0
