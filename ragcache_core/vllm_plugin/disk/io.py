"""The disk tier's threads: they copy, write and read, and leave the results for the scheduler's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from ragcache_core.chunkstore import AsyncStore, ChunkStore, ChunkWrite, Scratch, aligned_rows, async_store
from ragcache_core.errors import CacheWriteError
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.disk.jobs import DiskStore, Erasure, Outcome, PendingChunk, PendingRun, WriteBatch
from ragcache_core.vllm_plugin.lower.jobs import LoadPart, LoadTransfer

logger = logger_of(__name__)

NUM_READERS = 4
_READ_AT_ONCE_BYTES = 1 << 20
"""What is read, checked and copied while it is in the processor's cache."""
_NUM_BUFFERED_BYTES = 256 << 20
_TIMEOUT_S = 10.0
_SLOWEST_BYTES_PER_S = 64 << 20


class DiskIO:
    """Owns the store and the threads that use it.

    ``primary_kv_view`` is host memory, ``[num_chunks, chunk_bytes]``. The copier releases a job's chunks when all of
    them are in buffers, which take ``num_buffered_bytes`` in total. The writer compresses them. When the buffers are
    full the copier waits: as long as a disk of 64 MiB/s needs for all queued bytes, plus 10 s. Then it drops the rest
    of the job and its descendants.

    A failed write drops its chunks, and those of all jobs that the scheduler made before it knew of the failure. So no
    chunk is stored without its prefix.
    """

    def __init__(
        self, store: ChunkStore, primary_kv_view: memoryview, *, num_buffered_bytes: int = _NUM_BUFFERED_BYTES
    ) -> None:
        self._store = store
        self._disk = AsyncStore(store, "RAGCache's disk tier", num_readers=NUM_READERS, comes_back=True)
        self._rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(primary_kv_view.shape)
        self._num_free_buffers = self._num_buffers = max(num_buffered_bytes // store.chunk_bytes, 1)
        self._read_at_once = max(_READ_AT_ONCE_BYTES // store.chunk_bytes, 1)
        self._copied_at_once = min(self._num_free_buffers, store.chunks_per_batch)
        self._jobs: queue.SimpleQueue[DiskStore | Outcome | WriteBatch | None] = queue.SimpleQueue()
        self._held: set[DiskStore] = set()
        self._has_been_slow = False
        self._num_failures = 0  # the writer's
        self._num_known_failures = 0  # the scheduler's
        self._written: deque[Outcome] = deque()
        self._is_done = threading.Condition()
        self._is_cleared = False
        self.is_closed = False
        """Whether nothing more is done than was asked for up to now."""
        self._copier = threading.Thread(target=self._copy_jobs, name="ragcache-disk-copy", daemon=True)
        self._copier.start()

    # The scheduler's side

    def store(self, runs: Sequence[PendingRun], evicted: list[bytes]) -> DiskStore:
        """Begin to write chunks, parents first, after the chunks evicted for them are deleted."""
        with self._is_done:
            num_waiting = sum(job.num_blocks for job in self._held) + sum(len(run.names) for run in runs)
            timeout_s = _TIMEOUT_S + num_waiting * self._store.chunk_bytes / _SLOWEST_BYTES_PER_S
            job = DiskStore(runs, evicted, timeout_s, self._num_known_failures)
            self._held.add(job)
        self._jobs.put(job)
        return job

    def wake(self) -> None:
        """Have the copier notice that jobs are to be released."""
        with self._is_done:
            self._is_done.notify_all()

    def release_rows(self) -> None:
        """Have host memory copied or released without waiting for the disk: what finds no free buffer is dropped."""
        self._release_held()
        with self._is_done:
            self._is_done.wait_for(lambda: not self._held)  # they wait for no disk any more

    def warn_of_slowness(self, num_chunks: int) -> None:
        """Log, the first time, that chunks are not written because the disk is too slow."""
        if not self._has_been_slow:
            self._has_been_slow = True
            logger.warning(
                "RC-DISK-SLOW: RAGCache's disk tier writes slower than KV is computed: %d blocks are not written to "
                "%s, and further ones are only counted",
                num_chunks,
                self._store.path,
            )

    def delete(self, names: list[bytes]) -> None:
        """Delete chunks that the store may still hold, before any later write."""
        self._write(WriteBatch(evicted=names))

    def erase(self, names: list[bytes]) -> Erasure:
        """Erase all bytes of chunks from the disk, after all earlier changes; also tried when it is out of service."""
        erasure = Erasure(frozenset(names))
        self._jobs.put(WriteBatch(erasure=erasure))
        return erasure

    def rename(self, doc_ids: list[tuple[bytes, str | None]]) -> None:
        """Store the documents that chunks belong to, after all earlier changes."""
        self._jobs.put(WriteBatch(doc_ids=doc_ids))

    def load(self, names: list[bytes], rows: Sequence[int]) -> LoadTransfer:
        """Begin to read chunks into rows of host memory, in parts for all readers."""
        size = min(max(-(-len(names) // NUM_READERS), self._read_at_once), self._store.chunks_per_batch)
        load = LoadTransfer(names, rows, size)
        for part in load.parts:
            self._disk.read(part, partial(self._read, part))
        return load

    def is_to_be_abandoned(self, load: LoadTransfer, limit_s: float) -> bool:
        """Return whether no reader has begun a load in time; a read that hangs takes the disk out of service."""
        return self.why_down() is not None or (
            not load.is_begun and time.monotonic() - load.submitted_s > async_store.READ_TIMEOUT_S
        )

    def take_written(self) -> Iterator[Outcome]:
        """Yield the outcomes of writes."""
        while self._written:
            outcome = self._written.popleft()
            if outcome.is_dropped:
                self._jobs.put(outcome)  # later jobs are made with knowledge of it
            self._num_known_failures = max(self._num_known_failures, outcome.num_failures)
            yield outcome

    def update_notes(self, worths: list[tuple[bytes, float, float]]) -> None:
        """Update stored frequencies and costs: key, frequency, cost."""
        self._write(WriteBatch(worths=worths))

    def clear(self) -> Erasure:
        """Delete every chunk, after all earlier changes; a disk that hangs does it when it answers."""
        self.release_rows()
        self._is_cleared = False
        erasure = Erasure(frozenset())
        self._write(WriteBatch(clears=True, erasure=erasure))
        return erasure

    def load_s(self, num_chunks: int) -> float | None:
        """Return how long the disk takes to read chunks, by its recent reads; None if that is unknown."""
        bytes_per_s = self._disk.read_bytes_per_s()
        return num_chunks * self._store.chunk_bytes / bytes_per_s if bytes_per_s else None

    def num_over(self, num_here: int, num_new: int) -> int:
        """Return how many of ``num_here`` chunks have to leave for ``num_new`` others to fit; 0 or less: none."""
        return self._store.num_over(num_here, num_new)

    @property
    def used_bytes(self) -> int:
        """What the chunks take on the disk."""
        return self._store.stats.used_bytes

    def why_down(self) -> str | None:
        """Return why the disk is out of service; None while it is in use."""
        return self._disk.why_down()

    @property
    def can_write(self) -> bool:
        """Whether writing does not rest, as it does for a while after a write that failed."""
        return not self._disk.writes.is_resting

    def take_down(self, why: str, *, comes_back: bool = True) -> None:
        """Take the disk out of service, and release host memory; ``comes_back`` while the engine runs."""
        self._disk.take_down(why, comes_back=comes_back)
        self._release_held()

    def finish_reads(self, timeout_s: float) -> bool:
        """Release host memory, and wait for all requested reads; return whether they end within ``timeout_s``.

        The caller then abandons reads that have not ended.
        """
        self.release_rows()
        return self._disk.finish_reads(timeout_s)

    @property
    def is_cleared(self) -> bool:
        """Whether the last :meth:`clear` has ended and left no chunk."""
        return self._is_cleared

    def finish_writes(self, timeout_s: float) -> bool:
        """Wait for all queued writes; return whether they end within ``timeout_s``."""
        ends_s = time.monotonic() + timeout_s
        with self._is_done:
            is_copied = self._is_done.wait_for(lambda: not self._held, timeout_s)
        return is_copied and self._disk.finish_changes(max(ends_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """End the threads after all queued writes, and close the store. Idempotent."""
        ends_s = time.monotonic() + async_store.CLOSE_TIMEOUT_S
        self.is_closed = True
        self._jobs.put(None)
        self._copier.join(async_store.CLOSE_TIMEOUT_S)
        if self._copier.is_alive():  # it waits for a disk that does not answer
            self.release_rows()
        self._disk.close(ends_s)
        self._rows = self._rows[:0].copy()  # vLLM cannot unmap host memory while a view is open

    def _release_held(self) -> None:
        with self._is_done:
            for job in self._held:
                job.release()
            self._is_done.notify_all()

    def _write(self, batch: WriteBatch) -> None:
        self._disk.change(
            partial(self._apply, batch),
            partial(self._on_applied, batch),
            is_forced=batch.clears or batch.erasure is not None,
            is_write=bool(batch.chunks),
        )

    # The threads' side

    def _copy_jobs(self) -> None:
        dropped: set[bytes] = set()  # the scheduler may not know of them yet
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Outcome):
                dropped.difference_update(job.names)
            elif isinstance(job, WriteBatch):
                self._write(job)
            else:
                try:
                    self._copy(job, dropped)
                finally:
                    job.finish()
                    with self._is_done:
                        self._held.discard(job)
                        self._is_done.notify_all()

    def _copy(self, job: DiskStore, dropped: set[bytes]) -> None:
        """Copy a job's chunks into buffers part by part; add the others and their descendants to ``dropped``."""
        if job.evicted:
            self._write(WriteBatch(evicted=job.evicted, job=job))
        chunks, late = list[PendingChunk](), list[bytes]()
        for run in job.runs:
            if run.note.parent in dropped:
                dropped.update(run.names)
                late += run.names
            else:
                chunks += run.chunks()
        while chunks and (num_chunks := self._take_buffers(job, min(len(chunks), self._copied_at_once))):
            batch, chunks = WriteBatch(chunks=chunks[:num_chunks], job=job), chunks[num_chunks:]
            try:
                batch.payloads = self._payloads_of(batch.chunks)
            except Exception as error:  # any error: the writer reports it, as no caller waits for this thread
                job.error = error
            self._write(batch)
        late += [chunk.name for chunk in chunks]
        if late:
            dropped.update(late)
            if not job.is_released:
                self.warn_of_slowness(len(late))
            self._written.append(Outcome(late, is_dropped=True))

    def _payloads_of(self, chunks: list[PendingChunk]) -> list[np.ndarray]:
        payloads = list(aligned_rows(len(chunks), self._store.chunk_bytes))
        for chunk, payload in zip(chunks, payloads, strict=True):
            np.copyto(payload, self._rows[chunk.row])
        return payloads

    def _take_buffers(self, job: DiskStore, num_wanted: int) -> int:
        """Wait for buffers and return how many are taken; fewer than wanted when the job must not wait any more."""
        with self._is_done:
            self._is_done.wait_for(
                lambda: self._num_free_buffers >= num_wanted or job.is_released, timeout=job.remaining_s
            )
            num_taken = min(self._num_free_buffers, num_wanted)
            self._num_free_buffers -= num_taken
            return num_taken

    def _return_buffers(self, num_buffers: int) -> None:
        with self._is_done:
            self._num_free_buffers += num_buffers
            self._is_done.notify_all()

    def _apply(self, batch: WriteBatch) -> bool:
        """Apply a batch; return False if it is stale and nothing of it is stored."""
        if batch.job is not None and batch.job.error is not None:
            raise batch.job.error
        if batch.job is not None and batch.chunks and batch.job.num_known_failures < self._num_failures:
            batch.is_stale = True
            return False
        if batch.clears:
            self._store.clear()
            logger.info("RAGCache has emptied %s", self._store.path)
        elif batch.erasure is not None:
            try:
                self._store.erase(batch.erasure.names, self._disk.record_progress)
            except CacheWriteError as error:
                batch.erasure.error = error
                self._disk.on_write_error(error)
        if batch.doc_ids:
            self._store.rename(batch.doc_ids)
        self._store.evict_many(batch.evicted)
        if batch.worths:
            with suppress(CacheWriteError):  # they only rank
                self._store.update_notes(batch.worths)
        if batch.chunks:
            pairs = zip(batch.chunks, batch.payloads, strict=True)
            writes = [ChunkWrite(chunk.name, payload.data, chunk.note) for chunk, payload in pairs]
            self._store.write_many(writes, packs=self._has_time_to_pack)
        return True

    @property
    def _has_time_to_pack(self) -> bool:
        """Whether chunks are compressed: they are not while most buffers wait, lest they are dropped."""
        return 2 * self._num_free_buffers >= self._num_buffers

    def _on_applied(self, batch: WriteBatch, error: Exception | None) -> None:
        names = [chunk.name for chunk in batch.chunks]
        if batch.erasure is not None:
            batch.erasure.error, batch.erasure.is_done = error or batch.erasure.error, True
        if names and (batch.is_stale or error is not None):
            self._num_failures += 1  # unknown to the jobs that wait now
        if names or error is not None:
            self._written.append(Outcome(names, error, batch.is_stale, self._num_failures))
        self._is_cleared |= batch.clears and error is None
        if error is not None and batch.clears:
            logger.error("RC-RESET-FAILED: RAGCache's disk tier still has KV from before a reset: %s", error)
        batch.payloads.clear()
        self._return_buffers(len(names))

    def _read(self, part: LoadPart, scratch: Scratch) -> int:
        num_chunks = len(part.names)
        for first in range(0, num_chunks, self._read_at_once):
            names = part.names[first : first + self._read_at_once]
            rows = scratch.rows(len(names), self._store.chunk_bytes)
            found = [False] * len(names)
            try:
                found = self._store.read_many([(name, row.data) for name, row in zip(names, rows, strict=True)])
            except Exception:  # whatever it is, these chunks are misses
                logger.warning("RC-DISK-UNREADABLE: %s cannot be read: a miss", self._store.path, exc_info=True)
            if not part.move(partial(self._deliver, part, first, rows, found)):
                break
        part.finish()
        return sum(part.found) * self._store.chunk_bytes

    def _deliver(self, part: LoadPart, first: int, rows: np.ndarray, found: list[bool]) -> None:
        for i, is_found in enumerate(found):
            if is_found:
                np.copyto(self._rows[part.rows[first + i]], rows[i])
        part.found[first : first + len(found)] = found
