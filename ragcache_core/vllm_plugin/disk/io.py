"""The disk tier's threads: they copy, write and read, and leave what came of it for the scheduler's thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ragcache_core.chunkstore import ChunkStore, ChunkWrite, aligned_rows
from ragcache_core.errors import CacheTierError
from ragcache_core.vllm_plugin.disk.jobs import LoadJob, Outcome, PendingChunk, StoreJob, WriteBatch

logger = logging.getLogger(f"vllm.{__name__}")

_NUM_READERS = 4
_NUM_BUFFERED_BYTES = 256 << 20
_PATIENCE_S = 10.0
_SLOWEST_BYTES_PER_S = 64 << 20
_CLOSE_TIMEOUT_S = 30.0
_LOOKS_EVERY_S = 10.0


_Kind = Literal["writes", "reads"]


class DiskIO:
    """Owns the store and the threads that use it.

    ``primary_kv_view`` is host memory, ``[num_chunks, chunk_bytes]``. The copier lets go of a job's chunks when all of
    them are in buffers, of which there are ``num_buffered_bytes``. When those are full it waits: for as long as a disk
    of 64 MiB/s would need for all that waits, and 10 s more. Then it drops the rest of the job and what stands on it.
    """

    def __init__(
        self, store: ChunkStore, primary_kv_view: memoryview, *, num_buffered_bytes: int = _NUM_BUFFERED_BYTES
    ) -> None:
        self._store = store
        self._rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(primary_kv_view.shape)
        self._num_free_buffers = max(num_buffered_bytes // store.chunk_bytes, 1)
        self._copied_at_once = min(self._num_free_buffers, store.chunks_per_batch)
        self._jobs: queue.SimpleQueue[StoreJob | Outcome | None] = queue.SimpleQueue()
        self._held: set[StoreJob] = set()
        self._has_been_slow = False
        self._batches: queue.SimpleQueue[WriteBatch | None] = queue.SimpleQueue()
        self._copied: deque[int] = deque()
        self._written: deque[Outcome] = deque()
        self._loads: queue.SimpleQueue[tuple[LoadJob, list[int]] | None] = queue.SimpleQueue()
        self._num_pending: Counter[_Kind] = Counter()
        self._is_done = threading.Condition()
        self.changing_since_s: float | None = None
        """Since when the disk has been at what it was last asked to change; ``None`` if it is at nothing."""
        self.lost: Exception | None = None
        """Why the store is no longer where it was, if that was noticed while there was nothing to write."""
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

    def has_room_for(self, num_chunks: int) -> bool:
        """Return whether a job may wait, alone or beside others that hold half of host memory with it at most.

        What is held cannot be evicted.
        """
        num_held = self._num_held()
        return not num_held or num_held + num_chunks <= len(self._rows) // 2

    def store(self, job_id: int, chunks: list[PendingChunk], evicted: list[bytes]) -> None:
        """Write chunks, parents first, after those that gave way to them are deleted."""
        if not chunks and not evicted:
            self._copied.append(job_id)
            return
        waiting_bytes = (self._num_held() + len(chunks)) * self._store.chunk_bytes
        ends_s = time.monotonic() + _PATIENCE_S + waiting_bytes / _SLOWEST_BYTES_PER_S
        job = StoreJob(job_id, chunks, evicted, ends_s)
        with self._is_done:
            self._held.add(job)
        self._begin("writes")
        self._jobs.put(job)

    def drop_unbuffered(self) -> None:
        """Have host memory let go without waiting for the disk: what no buffer is free for is dropped."""
        with self._is_done:
            for job in self._held:
                job.drops_unbuffered = True
            self._is_done.notify_all()

    def warn_of_slowness(self, num_chunks: int) -> None:
        """Log, the first time, that chunks are not written as the disk is too slow."""
        if not self._has_been_slow:
            self._has_been_slow = True
            logger.warning(
                "RAGCache's disk tier is slower than what is computed: %d chunks are not written to %s, and further "
                "ones are only counted",
                num_chunks,
                self._store.path,
            )

    def delete(self, keys: list[bytes]) -> None:
        """Have chunks forgotten that the store may still hold, before whatever is stored from now on."""
        self._write(WriteBatch(evicted=keys))

    def load(self, load: LoadJob, chunk_ids: list[int]) -> None:
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
            outcome = self._written.popleft()
            if outcome.is_dropped:
                self._jobs.put(outcome)  # jobs behind it were made knowing of it
            yield outcome

    def update_notes(self, worths: list[tuple[bytes, float, float]]) -> None:
        """Have frequencies and costs noted anew: key, frequency, cost."""
        self._write(WriteBatch(worths=worths))

    def clear(self) -> None:
        """Have every chunk forgotten, after what was asked for before; a disk that hangs does it when it answers."""
        self._finish_copies()
        self._write(WriteBatch(clears=True))

    def finish_reads(self, timeout_s: float) -> bool:
        """Let go of host memory, and wait until the disk has brought what was asked for; return whether it has in time.

        Whoever still waits for a read then abandons it.
        """
        self._finish_copies()
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
            self._finish_copies()
        self._rows = self._rows[:0].copy()  # vLLM cannot unmap host memory that somebody sees

    def _num_held(self) -> int:
        with self._is_done:
            return sum(len(job.chunks) for job in self._held)

    def _finish_copies(self) -> None:
        self.drop_unbuffered()
        with self._is_done:
            self._is_done.wait_for(lambda: not self._held)  # they wait for no disk any more

    def _write(self, batch: WriteBatch) -> None:
        self._begin("writes")
        self._batches.put(batch)

    def _begin(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_pending[kind] += 1

    def _end(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_pending[kind] -= 1
            self._is_done.notify_all()

    def _wait_for(self, kind: _Kind, timeout_s: float) -> bool:
        with self._is_done:
            return self._is_done.wait_for(lambda: not self._num_pending[kind], timeout_s)

    # The threads' side

    def _copy_jobs(self) -> None:
        dropped: set[bytes] = set()  # of which the scheduler may not know yet
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Outcome):
                dropped.difference_update(job.keys)
                continue
            try:
                self._copy(job, dropped)
            finally:
                self._copied.append(job.job_id)
                with self._is_done:
                    self._held.discard(job)
                self._end("writes")
        self._batches.put(None)

    def _copy(self, job: StoreJob, dropped: set[bytes]) -> None:
        """Copy a job's chunks into buffers part by part; add to ``dropped`` what is not, and what stands on it."""
        if job.evicted:
            self._write(WriteBatch(evicted=job.evicted, job=job))
        chunks, late = [], []
        for chunk in job.chunks:
            if chunk.note.parent in dropped:
                dropped.add(chunk.key)
                late.append(chunk.key)
            else:
                chunks.append(chunk)
        while chunks:
            num_chunks = self._take_buffers(job, min(len(chunks), self._copied_at_once))
            if not num_chunks:
                late += [chunk.key for chunk in chunks]
                break
            part, chunks = chunks[:num_chunks], chunks[num_chunks:]
            batch = WriteBatch(chunks=part, job=job)
            try:
                batch.payloads = self._payloads_of(part)
            except Exception as error:  # whatever it is, the writer reports it, and nobody waits for this thread
                job.error = error
            self._write(batch)
        if late:
            dropped.update(late)
            if not job.drops_unbuffered:
                self.warn_of_slowness(len(late))
            self._written.append(Outcome(late, is_dropped=True))

    def _payloads_of(self, chunks: list[PendingChunk]) -> list[np.ndarray]:
        payloads = list(aligned_rows(len(chunks), self._store.chunk_bytes))
        for chunk, payload in zip(chunks, payloads, strict=True):
            np.copyto(payload, self._rows[chunk.chunk_id])
        return payloads

    def _take_buffers(self, job: StoreJob, num_wanted: int) -> int:
        """Wait for buffers and return how many there are; fewer than wanted when the job must not wait any more."""
        with self._is_done:
            self._is_done.wait_for(
                lambda: self._num_free_buffers >= num_wanted or job.drops_unbuffered,
                max(job.ends_s - time.monotonic(), 0.0),
            )
            num_taken = min(self._num_free_buffers, num_wanted)
            self._num_free_buffers -= num_taken
            return num_taken

    def _write_batches(self) -> None:
        has_failed = False
        while (batch := self._next_batch(looks=not has_failed)) is not None:
            if self.lost is not None:
                has_failed = True
            keys = [chunk.key for chunk in batch.chunks]
            try:
                if batch.job is not None and batch.job.error is not None:
                    raise batch.job.error
                self.changing_since_s = time.monotonic()
                if batch.clears:
                    self._store.clear()
                    logger.info("RAGCache has emptied %s", self._store.path)
                self._store.delete_many(batch.evicted)
                if batch.worths:
                    self._store.update_notes(batch.worths)
                if keys:
                    self._store.write_many(
                        [
                            ChunkWrite(chunk.key, payload.data, chunk.note)
                            for chunk, payload in zip(batch.chunks, batch.payloads, strict=True)
                        ]
                    )
                    self._written.append(Outcome(keys))
            except Exception as error:
                if batch.clears:
                    logger.error("RAGCache's disk tier still holds KV from before a reset: %s", error)
                elif not has_failed:  # at once: the scheduler hears of it with its next step, which may be far away
                    logger.error("RAGCache's disk tier could not be written to: %s", error)
                has_failed = True
                if batch.job is not None:
                    batch.job.error = error  # its later chunks would stand on nothing
                self._written.append(Outcome(keys, error))
            finally:
                self.changing_since_s = None
                batch.payloads.clear()
                with self._is_done:
                    self._num_free_buffers += len(keys)
                self._end("writes")
        self._store.close()

    def _next_batch(self, *, looks: bool) -> WriteBatch | None:
        """Wait for something to write; meanwhile look now and then whether the store is still there."""
        while looks:
            try:
                return self._batches.get(timeout=_LOOKS_EVERY_S)
            except queue.Empty:
                pass
            try:
                self._store.check_in_place()
            except CacheTierError as error:
                logger.error("RAGCache's disk tier has lost its files: %s", error)
                self.lost = error
                break
        return self._batches.get()

    def _read_loads(self) -> None:
        while (job := self._loads.get()) is not None:
            try:
                self._read(*job)
            except Exception:  # the scheduler gives up what is not delivered
                logger.exception("A read of %s could not be delivered", self._store.path)
            finally:
                self._end("reads")

    def _read(self, load: LoadJob, chunk_ids: list[int]) -> None:
        size = self._store.chunks_per_batch
        for first in range(0, len(chunk_ids), size):
            if load.is_abandoned:
                return
            load.progressed_s = time.monotonic()
            keys, ids = load.keys[first : first + size], chunk_ids[first : first + size]
            buffers = np.empty((0, self._store.chunk_bytes), dtype=np.uint8)
            found = [False] * len(keys)
            try:
                buffers = aligned_rows(len(keys), self._store.chunk_bytes)
                found = self._store.read_many([(key, row.data) for key, row in zip(keys, buffers, strict=True)])
            except Exception:  # whatever it is, these chunks are misses
                logger.exception("Chunks could not be read from %s", self._store.path)
            if not load.deliver(self._rows, ids, buffers, found):
                return
