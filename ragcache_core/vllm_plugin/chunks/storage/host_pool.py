"""A worker's memory of chunks: pages of host memory, and the disk below them.

The arena is layer by layer, so that what is copied into a layer of the engine's KV is in one piece where pages are::

    layer 0: K [num_pages * tokens_per_page, num_kv_heads, head_dim], V the same | layer 1: ...

K is kept without RoPE. Which pages hold what is decided by the library on the scheduler's side. The disk is used by
threads: a step waits for none of them, and finds in :meth:`ChunkMemory.take_report` what they did. A disk that fails,
or does not answer in time, is used no more until the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ragcache_core.errors import CacheCapacityError, CacheTierError
from ragcache_core.vllm_plugin.chunks.messages import (
    DropChunks,
    MemoryCommand,
    MemoryReport,
    NoteUses,
    ReadChunk,
    StoredChunk,
    WriteChunk,
)
from ragcache_core.vllm_plugin.chunks.page_layout import LayerShape, page_bytes_of
from ragcache_core.vllm_plugin.chunks.storage.disk_store import ChunkDisk, DiskPlace

logger = logging.getLogger(f"vllm.{__name__}")

_NUM_READERS = 2
_READ_TIMEOUT_S = 20.0
_WRITE_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Transfer:
    """A variant on its way into pages or out of them; once it is abandoned, they are somebody else's."""

    command: ReadChunk | WriteChunk
    started_s: float | None = None
    is_abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class ChunkMemory:
    """Pages of KV, which one thread reads and writes, and commands that other threads carry out.

    Args:
        layers: of this worker, in its order.
        dtype: of what is kept.
        tokens_per_page: as the library has it, like ``num_pages``.
        pin_memory: whether the pages are page-locked, for copies to and from a GPU.
        disk: where chunks outlive the engine; None keeps none there.

    Raises:
        ConfigError: the disk's share holds not a page. CacheTierError: the disk cannot be used.
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
        self._disk = (
            None if disk is None else ChunkDisk(disk, page_bytes=self.page_bytes, tokens_per_page=tokens_per_page)
        )
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
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ragcache-chunk-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="ragcache-chunk-read")
        self._under_way: dict[int, _Transfer] = {}
        self._changing_since_s: float | None = None
        self._pending: set[Future[None]] = set()
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
            match command:
                case ReadChunk() | WriteChunk():
                    transfer = self._under_way[command.command_id] = _Transfer(command)
                    if isinstance(command, ReadChunk):
                        future = self._readers.submit(self._read, transfer, command)
                    else:
                        future = self._writer.submit(self._write, transfer, command)
                case DropChunks() | NoteUses():
                    future = self._writer.submit(self._change, command)
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)

    def take_report(self) -> MemoryReport:
        """Return what has been done since the last report; what takes too long has failed."""
        self._abandon_overdue()
        with self._lock:
            report, self._report = self._report, _Tally()
            return MemoryReport(report.done, report.failed, report.num_corrupt, report.is_disk_down)

    def drain(self) -> None:
        """Wait until everything that was asked for has been done."""
        wait(list(self._pending))

    def close(self) -> None:
        """End the threads after what they were asked to write, and close the stores. Idempotent.

        A disk that does not answer is left as it is: what was written is found again, as after a crash.
        """
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False)
        if wait(list(self._pending), _CLOSE_TIMEOUT_S).not_done:
            logger.error("RAGCache leaves its chunks' disk, which has not answered in %g s", _CLOSE_TIMEOUT_S)
            return
        self._readers.shutdown()
        self._writer.shutdown()
        if self._disk is not None:
            self._disk.close()
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

    def _write(self, transfer: _Transfer, command: WriteChunk) -> None:
        def gather(pages: Sequence[int], rows: np.ndarray) -> None:
            with transfer.lock:
                if transfer.is_abandoned:
                    raise CacheTierError("it has taken so long that its pages hold something else")
                self._gather(pages, rows)
            self._changing_since_s = time.monotonic()  # a large chunk is written in several parts

        self._finish(transfer, is_done=self._try("written", lambda disk: disk.write(command, gather)))

    def _change(self, command: DropChunks | NoteUses) -> None:
        if isinstance(command, DropChunks):
            for dropped in command.dropped:
                self._try("deleted", partial(ChunkDisk.drop, command=DropChunks((dropped,))))
        else:
            self._try("noted", lambda disk: disk.note(command))

    def _try(self, what: str, change: Callable[[ChunkDisk], None]) -> bool:
        """Return whether a change was made; one that fails takes the disk out of service, unless it was only full."""
        if self._is_down or self._disk is None:
            return False
        self._changing_since_s = time.monotonic()
        try:
            change(self._disk)
        except CacheCapacityError as error:
            logger.debug("a chunk was not %s: %s", what, error)
            return False
        except Exception as error:  # whatever it is, nobody waits for this thread
            self._take_down(f"a chunk could not be {what}: {error}")
            return False
        finally:
            self._changing_since_s = None
        return True

    def _read(self, transfer: _Transfer, command: ReadChunk) -> None:
        transfer.started_s = time.monotonic()

        def deliver(pages: Sequence[int], rows: np.ndarray) -> bool:
            with transfer.lock:
                if not transfer.is_abandoned:
                    self._scatter(pages, rows)
                return not transfer.is_abandoned

        is_found, was_tried = False, self._disk is not None and not self._is_down
        try:
            is_found = was_tried and self._disk is not None and self._disk.read(command, deliver)
        except Exception:  # whatever it is, this chunk is a miss
            logger.exception("A chunk could not be read")
        self._finish(transfer, is_done=is_found, is_corrupt=was_tried and not is_found)

    def _finish(self, transfer: _Transfer, *, is_done: bool, is_corrupt: bool = False) -> None:
        command_id = transfer.command.command_id
        with transfer.lock, self._lock:
            if not transfer.is_abandoned:
                del self._under_way[command_id]
                (self._report.done if is_done else self._report.failed)[command_id] += 1
                self._report.num_corrupt += is_corrupt

    def _abandon_overdue(self) -> None:
        """Wait no more for a disk that does not answer; one that is only slow is waited for."""
        now_s, changing_since_s = time.monotonic(), self._changing_since_s
        transfers = list(self._under_way.values())
        if any(each.started_s is not None and each.started_s < now_s - _READ_TIMEOUT_S for each in transfers):
            self._take_down(f"a read takes longer than {_READ_TIMEOUT_S:g} s")
        if changing_since_s is not None and changing_since_s < now_s - _WRITE_TIMEOUT_S:
            self._take_down(f"a write takes longer than {_WRITE_TIMEOUT_S:g} s")
        for transfer in transfers if self._is_down else ():
            with transfer.lock, self._lock:
                if self._under_way.pop(transfer.command.command_id, None) is not None:
                    transfer.is_abandoned = True
                    self._report.failed[transfer.command.command_id] += 1

    def _take_down(self, why: str) -> None:
        with self._lock:
            if not self._is_down:
                logger.error("RAGCache keeps chunks on disk no more until the next start: %s", why)
            self._is_down = self._report.is_disk_down = True


def _page_lock(memory: torch.Tensor) -> bool:
    """Lock memory for copies to and from a GPU, and return whether it is; torch's way would round it up to 2^n."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error.value:
        logger.warning(
            "%d bytes of chunks could not be page-locked (%s): their copies are slower", memory.nbytes, error
        )
    return not error.value


@dataclass(slots=True)
class _Tally:
    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    num_corrupt: int = 0
    is_disk_down: bool = False
