"""The disk tier's threads: they copy, write and read, and leave what came of it for the scheduler's thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite, aligned_rows

logger = logging.getLogger(f"vllm.{__name__}")

_NUM_READERS = 4
_NUM_BUFFERED_BYTES = 256 << 20
_MAX_BATCH = 64
_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of host memory on its way to the disk, and what is noted about it."""

    key: bytes
    chunk_id: int
    note: ChunkNote


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of chunks that were to be written: they are on the disk, or there was an ``error``."""

    keys: list[bytes]
    error: Exception | None = None


@dataclass(slots=True)
class Load:
    """A batch of chunks on its way into host memory. Whoever gives up waiting abandons it: then nothing is written."""

    job_id: int
    keys: list[bytes]
    submitted_s: float
    progressed_s: float | None = None
    """When its latest part was begun; ``None`` while it waits for its turn."""
    is_abandoned: bool = False
    _found: list[bool] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_finished(self) -> bool:
        """Return whether the reader is done."""
        return len(self._found) == len(self.keys)

    def abandon(self) -> bool:
        """Give up; False if the reader was faster."""
        with self._lock:
            if not self.is_finished():
                self.is_abandoned = True
            return self.is_abandoned

    def outcome(self) -> list[bool]:
        """Return for each key whether its bytes are in host memory."""
        return self._found if self.is_finished() and not self.is_abandoned else [False] * len(self.keys)

    def deliver(self, rows: np.ndarray, chunk_ids: list[int], buffers: np.ndarray, found: list[bool]) -> bool:
        """Copy what was found of the next chunks into host memory; False if nobody waits any more."""
        with self._lock:
            if self.is_abandoned:
                return False
            for i, is_found in enumerate(found):
                if is_found:
                    np.copyto(rows[chunk_ids[i]], buffers[i])
            self._found += found
            return True


@dataclass(slots=True)
class _Batch:
    """What the writer does at once: give slots back, then fill some; or forget everything."""

    evicted: list[bytes]
    chunks: list[PendingChunk]
    payloads: list[np.ndarray]
    error: Exception | None = None
    worths: list[tuple[bytes, float, float]] = field(default_factory=list)
    clears: bool = False


_Kind = Literal["copies", "writes", "reads"]


class DiskIO:
    """Owns the store and the threads that use it.

    ``primary_kv_view`` is host memory, ``[num_chunks, chunk_bytes]``. The copier lets go of host memory as soon as a
    payload is in a buffer of its own. Buffers are reserved before; ``num_buffered_bytes`` at most wait for the disk.
    """

    def __init__(
        self, store: ChunkStore, primary_kv_view: memoryview, *, num_buffered_bytes: int = _NUM_BUFFERED_BYTES
    ) -> None:
        self._store = store
        self._rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(primary_kv_view.shape)
        self._room = threading.BoundedSemaphore(max(num_buffered_bytes // store.chunk_bytes, 1))
        self._jobs: queue.SimpleQueue[tuple[int, list[PendingChunk], list[bytes]] | None] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._copied: deque[int] = deque()
        self._written: deque[Outcome] = deque()
        self._loads: queue.SimpleQueue[tuple[Load, list[int]] | None] = queue.SimpleQueue()
        self._num_pending: Counter[_Kind] = Counter()
        self._is_done = threading.Condition()
        self.changing_since_s: float | None = None
        """Since when the disk has been at what it was last asked to change; ``None`` if it is at nothing."""
        self._threads = [  # daemons: no disk that hangs keeps a process
            threading.Thread(target=self._copy_jobs, name="ragcache-disk-copy", daemon=True),
            threading.Thread(target=self._write_batches, name="ragcache-disk-write", daemon=True),
            *(
                threading.Thread(target=self._read_loads, name=f"ragcache-disk-read-{i}", daemon=True)
                for i in range(_NUM_READERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    # The scheduler's side

    def reserve(self) -> bool:
        """Reserve a buffer for a chunk that is to be stored; False where too many wait for the disk."""
        return self._room.acquire(blocking=False)

    def unreserve(self) -> None:
        """Undo :meth:`reserve`."""
        self._room.release()

    def store(self, job_id: int, chunks: list[PendingChunk], evicted: list[bytes]) -> None:
        """Write chunks for which buffers are reserved, after those that gave way to them are deleted."""
        if not chunks and not evicted:
            self._copied.append(job_id)
            return
        self._begin("copies")
        self._begin("writes")
        self._jobs.put((job_id, chunks, evicted))

    def delete(self, keys: list[bytes]) -> None:
        """Have chunks forgotten that the store may still hold, before whatever is stored from now on."""
        self._write(_Batch(keys, [], []))

    def load(self, load: Load, chunk_ids: list[int]) -> None:
        """Read the chunks of ``load`` into the rows ``chunk_ids`` of host memory."""
        self._begin("reads")
        self._loads.put((load, chunk_ids))

    def take_copied(self) -> Iterator[int]:
        """Yield the jobs whose chunks of host memory are free again."""
        while self._copied:
            yield self._copied.popleft()

    def take_written(self) -> Iterator[Outcome]:
        """Yield what became of chunks."""
        while self._written:
            yield self._written.popleft()

    def update_notes(self, worths: list[tuple[bytes, float, float]]) -> None:
        """Have frequencies and costs noted anew: key, frequency, cost."""
        self._write(_Batch([], [], [], worths=worths))

    def clear(self) -> None:
        """Have every chunk forgotten, after what was asked for before; a disk that hangs does it when it answers."""
        self._wait_for("copies", None)
        self._write(_Batch([], [], [], clears=True))

    def finish_reads(self, timeout_s: float) -> bool:
        """Wait until host memory is copied and the disk has brought what was asked for; return whether it has in time.

        Whoever still waits for a read then abandons it.
        """
        self._wait_for("copies", None)  # they wait for no disk
        return self._wait_for("reads", timeout_s)

    def finish_writes(self, timeout_s: float) -> bool:
        """Wait until the disk has what it was given; return whether it has in time."""
        return self._wait_for("writes", timeout_s)

    def close(self) -> None:
        """End the threads after what they were asked for, and close the store. Idempotent.

        A disk that does not answer is left as it is: what was written is found again, as after a crash.
        """
        ends_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._jobs.put(None)
        for _ in range(_NUM_READERS):
            self._loads.put(None)
        for thread in self._threads:
            thread.join(max(ends_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            logger.error("RAGCache leaves %s, which has not answered in %g s", self._store.path, _CLOSE_TIMEOUT_S)
        self._rows = self._rows[:0].copy()  # vLLM cannot unmap host memory that somebody sees

    def _write(self, batch: _Batch) -> None:
        self._begin("writes")
        self._batches.put(batch)

    def _begin(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_pending[kind] += 1

    def _end(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_pending[kind] -= 1
            self._is_done.notify_all()

    def _wait_for(self, kind: _Kind, timeout_s: float | None) -> bool:
        with self._is_done:
            return self._is_done.wait_for(lambda: not self._num_pending[kind], timeout_s)

    # The threads' side

    def _copy_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, chunks, evicted = job
            batch = _Batch(evicted, chunks, [])
            try:
                batch.payloads = list(aligned_rows(len(chunks), self._store.chunk_bytes)) if chunks else []
                for chunk, payload in zip(chunks, batch.payloads, strict=True):
                    np.copyto(payload, self._rows[chunk.chunk_id])
            except Exception as error:  # whatever it is, the writer reports it, and nobody waits for this thread
                batch.error = error
            finally:
                self._copied.append(job_id)
                self._batches.put(batch)
                self._end("copies")
        self._batches.put(None)

    def _write_batches(self) -> None:
        has_failed = False
        while (batch := self._batches.get()) is not None:
            keys = [chunk.key for chunk in batch.chunks]
            try:
                if batch.error is not None:
                    raise batch.error
                self.changing_since_s = time.monotonic()
                if batch.clears:
                    self._store.clear()
                    logger.info("RAGCache has emptied %s", self._store.path)
                self._store.delete_many(batch.evicted)
                if batch.worths:
                    self._store.update_notes(batch.worths)
                for first in range(0, len(keys), _MAX_BATCH):
                    part = slice(first, first + _MAX_BATCH)
                    self.changing_since_s = time.monotonic()
                    self._store.write_many(
                        [
                            ChunkWrite(chunk.key, payload.data, chunk.note)
                            for chunk, payload in zip(batch.chunks[part], batch.payloads[part], strict=True)
                        ]
                    )
                    self._written.append(Outcome(keys[part]))
            except Exception as error:
                if batch.clears:
                    logger.error("RAGCache's disk tier still holds KV from before a reset: %s", error)
                elif not has_failed:  # at once: the scheduler hears of it with its next step, which may be far away
                    logger.error("RAGCache's disk tier could not be written to: %s", error)
                has_failed = True
                done = {key for key in keys if key in self._store}
                self._written.append(Outcome([key for key in keys if key not in done], error))
            finally:
                self.changing_since_s = None
                for _ in keys:
                    self._room.release()
                self._end("writes")
        self._store.close()

    def _read_loads(self) -> None:
        while (job := self._loads.get()) is not None:
            try:
                self._read(*job)
            except Exception:  # the scheduler gives up what is not delivered
                logger.exception("A read of %s could not be delivered", self._store.path)
            finally:
                self._end("reads")

    def _read(self, load: Load, chunk_ids: list[int]) -> None:
        for first in range(0, len(chunk_ids), _MAX_BATCH):
            if load.is_abandoned:
                return
            load.progressed_s = time.monotonic()
            keys, ids = load.keys[first : first + _MAX_BATCH], chunk_ids[first : first + _MAX_BATCH]
            buffers = np.empty((0, self._store.chunk_bytes), dtype=np.uint8)
            found = [False] * len(keys)
            try:
                buffers = aligned_rows(len(keys), self._store.chunk_bytes)
                found = self._store.read_many([(key, row.data) for key, row in zip(keys, buffers, strict=True)])
            except Exception:  # whatever it is, these chunks are misses
                logger.exception("Chunks could not be read from %s", self._store.path)
            if not load.deliver(self._rows, ids, buffers, found):
                return
