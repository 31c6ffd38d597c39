"""The shared tier's threads: they query, read and write, and pass results to the scheduler's thread.

::

    scheduler      asker: which of a request's chunks exist
                   readers: get, check, copy into host memory
                   writer: copy out of host memory, put; delete

The engine does not depend on the store: a look-up, a load and a store each have a time limit, after which they are
abandoned. After a failure or a timeout, reading or writing rests for a while; the next request after that retries it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from ragcache_core.chunkstore import Transfer, async_store
from ragcache_core.chunkstore.async_store import Breaker, ReadRate
from ragcache_core.chunkstore.remote import RemoteStore, brief
from ragcache_core.chunkstore.remote.quota import StoreQuota
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.lower.jobs import LoadPart, LoadTransfer, StoreTransfer
from ragcache_core.vllm_plugin.shared.objects import MissingCodecError, Objects

logger = logger_of(__name__)

LOOKUP_TIMEOUT_S = 0.5
STALL_TIMEOUT_S = 1.0
LOAD_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 3.0
NUM_READERS = 4
_AT_ONCE_BYTES = 2 << 20
_DELETED_AT_ONCE = 1000
_MAX_LOOKUPS = 256
_MAX_KNOWN = 200_000
_MAX_UNDELETED = 200_000  # about 350 bytes each


class Inquiry(Transfer):
    """A query for existing blocks: a chain, each depending on the previous ones, and blocks beside it.

    Attributes:
        found: names of existing chunks; complete when it ``is_finished``.
    """

    def __init__(self, chain: Sequence[str], beside: Sequence[Sequence[str]]) -> None:
        """Take ``beside``: per entry, query as many as are found of the ``chain``."""
        super().__init__()
        self.chain = chain
        self.beside = beside
        self.found: set[str] = set()


class PutJob(StoreTransfer):
    """Blocks whose host memory is held until they are copied or abandoned."""

    def __init__(self, chunks: list[tuple[str, int, float]]) -> None:
        """Take ``chunks``: names, rows of host memory, and times of computation."""
        super().__init__(len(chunks), STORE_TIMEOUT_S)
        self.chunks = chunks


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """A part of a load; it stores its objects' times of computation by name."""

    part: LoadPart
    computed_s: dict[bytes, float]


@dataclass(frozen=True, slots=True)
class Deletion:
    """Objects to delete; if ``is_retried``, until the store succeeds."""

    names: Sequence[str] = ()
    is_retried: bool = True


class SharedIO:
    """Owns the store's client and its threads. Its methods do not block; only the scheduler's thread calls them.

    ``primary_kv_view`` is host memory, ``[num_chunks, chunk_bytes]``; with ``max_bytes`` the objects take no more. A
    store that ``is_read_only`` is never written: its deletions wait for good, and what they name is not read.

    Attributes:
        is_disabled: more deletions wait than can be kept, so nothing may be read from the store any more.
        quota: the limit of what the objects take, where there is one.
    """

    def __init__(
        self,
        store: RemoteStore,
        objects: Objects,
        primary_kv_view: memoryview,
        max_bytes: int | None = None,
        *,
        is_read_only: bool = False,
    ) -> None:
        self._store = store
        self._is_read_only = is_read_only
        self._objects = objects
        self._rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(primary_kv_view.shape)
        self.reads, self.writes = (
            Breaker(f"{what} RAGCache's shared store", meanwhile, describe=self._describe)
            for what, meanwhile in (
                ("Reading from", "What is asked of it is a miss"),
                ("Writing to", "What is stored there is dropped"),
            )
        )
        self._rate = ReadRate()
        self.quota = None if max_bytes is None else StoreQuota(store, f"{objects.prefix}/", max_bytes, self.unlearn)
        at_once = _AT_ONCE_BYTES if self.quota is None else min(_AT_ONCE_BYTES, self.quota.most_at_once)
        self._at_once = max(at_once // objects.chunk_bytes, 1)
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[str, None] = OrderedDict()
        self._leaving: Counter[str] = Counter()  # how many deletions of a name wait, with those in `_undeleted`
        self._undeleted: dict[str, None] = {}  # the writer's
        self.is_disabled = False
        self._progressed_s = 0.0
        self._ends_s: float | None = None
        self._inquiries: queue.Queue[Inquiry | None] = queue.Queue(_MAX_LOOKUPS)
        self._parts: queue.SimpleQueue[SharedLoad | None] = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[PutJob | Deletion | None] = queue.SimpleQueue()
        self.num_damaged = 0
        self.num_dropped = 0
        readers = [
            threading.Thread(target=self._run_reads, name=f"ragcache-shared-read-{i}") for i in range(NUM_READERS)
        ]
        self._threads = [
            threading.Thread(target=self._run_inquiries, name="ragcache-shared-ask"),
            threading.Thread(target=self._run_changes, name="ragcache-shared-write"),
            *readers,
        ]
        for thread in self._threads:
            thread.daemon = True  # no store that hangs keeps a process
            thread.start()

    # The scheduler's side

    def ask(self, chain: Sequence[str], beside: Sequence[Sequence[str]]) -> Inquiry:
        """Begin to query which blocks exist; skipped during a pause, or if too many queries wait."""
        inquiry = Inquiry(chain, beside)
        try:
            if self.reads.is_resting:
                raise queue.Full
            self._inquiries.put_nowait(inquiry)
        except queue.Full:
            inquiry.finish()
        return inquiry

    def is_answered(self, inquiry: Inquiry) -> bool:
        """Return whether an inquiry has ended; a slow one is abandoned."""
        if inquiry.is_finished or inquiry.is_abandoned:
            return True
        if time.monotonic() < inquiry.submitted_s + LOOKUP_TIMEOUT_S and not self.reads.is_resting:
            return False
        if inquiry.abandon() and not self.reads.is_resting:
            self.reads.fail(TimeoutError(f"a look-up took longer than {LOOKUP_TIMEOUT_S:g} s"))
        return True

    def load(self, names: list[bytes], rows: Sequence[int]) -> tuple[LoadTransfer, dict[bytes, float]]:
        """Begin to read objects into host memory; return the load, and a dict for times of computation."""
        computed_s: dict[bytes, float] = {}
        load = LoadTransfer(names, rows, min(max(-(-len(names) // NUM_READERS), 1), self._at_once))
        for part in load.parts:
            self._parts.put(SharedLoad(part, computed_s))
        return load, computed_s

    def is_to_be_abandoned(self, load: LoadTransfer, limit_s: float) -> bool:
        """Return whether a load stalls, or exceeds ``limit_s``: then reading pauses."""
        now_s = time.monotonic()
        if self.reads.is_resting:
            return True
        if now_s - max(load.submitted_s, self._progressed_s) > STALL_TIMEOUT_S:
            why = f"nothing came for {STALL_TIMEOUT_S:g} s"
        elif now_s - load.submitted_s > limit_s:
            why = f"a load took longer than {limit_s:.3g} s"
        else:
            return False
        self.reads.fail(TimeoutError(why))
        return True

    @property
    def can_write(self) -> bool:
        """Whether the store is written, and writing is not paused after a failure."""
        return not (self._is_read_only or self.writes.is_resting)

    def wake(self) -> None:
        """Do nothing, as no thread waits for released stores."""

    def load_s(self, num_chunks: int) -> float | None:
        """Return the estimated seconds of a load, from recent reads; ``None`` if unknown."""
        bytes_per_s = self._rate.bytes_per_s(time.monotonic())
        return num_chunks * self._objects.chunk_bytes / bytes_per_s if bytes_per_s else None

    def unknown(self, chunks: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
        """Return the blocks that are not known to exist."""
        with self._lock:
            return [chunk for chunk in chunks if chunk[0] not in self._known]

    def put(self, chunks: list[tuple[str, int, float]]) -> PutJob:
        """Begin to write blocks."""
        job = PutJob(chunks)
        with self._lock:
            self._num_waiting += len(chunks)
        self._changes.put(job)
        return job

    def drop(self, num_chunks: int) -> None:
        """Count blocks that are not written."""
        with self._lock:
            self.num_dropped += num_chunks

    def unlearn(self, names: Sequence[str]) -> None:
        """Let missing or invalid objects be written again."""
        with self._lock:
            for name in names:
                self._known.pop(name, None)

    def delete(self, names: Sequence[str], *, is_retried: bool) -> None:
        """Delete objects, after all earlier writes.

        A deletion that ``is_retried`` is tried until the store does it, with :meth:`is_leaving` true until then. Others
        are tried once, and not while writing rests: objects that are never read again need no more.
        """
        self.unlearn(names)
        if self.is_disabled or not (is_retried or self.can_write):
            return
        if is_retried:
            with self._lock:
                self._leaving.update(names)
        self._changes.put(Deletion(names, is_retried))

    def is_leaving(self, name: str) -> bool:
        """Return whether an object is to be deleted, and must not be read."""
        return name in self._leaving

    @property
    def num_undeleted(self) -> int:
        """Number of objects with a pending deletion."""
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait for the writer, at most as long as the store is tried."""
        return self._num_waiting

    @property
    def num_known(self) -> int:
        """Number of objects known to exist, as of the last query."""
        return len(self._known)

    def close(self) -> None:
        """End the threads, after the writer had some seconds for its queue. Idempotent."""
        ends_s = self._ends_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._changes.put(None)
        for _ in range(NUM_READERS):
            self._parts.put(None)
        with suppress(queue.Full):  # a queued inquiry wakes the thread
            self._inquiries.put_nowait(None)
        for thread in self._threads:
            thread.join(max(ends_s - time.monotonic(), 0.0))
        if num_pending := self.num_undeleted:
            logger.warning(
                "RC-SHARED-UNDELETED: the shared store may still hold %d deleted chunks: delete the "
                "keys that begin with %s",
                num_pending,
                self._objects.prefix,
            )
        self._store.close()
        self._rows = self._rows[:0].copy()  # vLLM cannot unmap host memory while a view is open

    # The threads' side

    def _know(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._known[name] = None
                self._known.move_to_end(name)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _run_inquiries(self) -> None:
        while (inquiry := self._inquiries.get()) is not None and self._ends_s is None:
            if not inquiry.is_abandoned and not self.reads.is_resting:
                try:
                    self._answer(inquiry)
                    if not inquiry.found:  # else it is to be loaded, which may be what fails
                        self.reads.succeed()
                except Exception as error:  # whatever a client raises, it is a miss
                    self.reads.fail(error)
            inquiry.finish()

    def _answer(self, inquiry: Inquiry) -> None:
        there = self._store.exists(inquiry.chain, is_chain=True)
        num_found = there.index(False) if False in there else len(there)
        found = set(inquiry.chain[:num_found])
        for names in inquiry.beside:
            asked = names[:num_found]
            if asked:
                there = self._store.exists(asked, is_chain=False)
                found.update(name for name, here in zip(asked, there, strict=True) if here)
        inquiry.found = found
        self.unlearn([name for name in inquiry.chain if name not in found])
        self._know([name for name in inquiry.chain if name in found])

    def _run_reads(self) -> None:
        while (one := self._parts.get()) is not None:
            part = one.part
            if self._ends_s is not None or self.reads.is_resting:
                part.abandon()
            if part.is_abandoned:
                continue
            self._rate.begin(time.monotonic())
            num_bytes = 0
            try:
                num_bytes = self._read(one)
                self.reads.succeed()
            except Exception as error:  # whatever a client raises, it is a miss
                part.abandon()
                self.reads.fail(error)
            finally:
                self._rate.end(time.monotonic(), num_bytes)

    def _read(self, load: SharedLoad) -> int:
        part = load.part
        names = [name.decode() for name in part.names]
        num_bytes = 0
        for at, data in enumerate(self._store.get(names)):
            try:
                unpacked = None if data is None else self._objects.unpack(names[at], data)
                self.num_damaged += unpacked is None and data is not None
            except MissingCodecError:  # the object is whole
                unpacked = None
            if unpacked is None:
                self.unlearn([names[at]])
                continue
            row, moment_s = unpacked
            if not part.move(partial(self._deliver, part, at, row)):
                return num_bytes
            load.computed_s[part.names[at]] = moment_s
            num_bytes += self._objects.chunk_bytes
        part.finish()
        return num_bytes

    def _deliver(self, part: LoadPart, at: int, row: np.ndarray) -> None:
        np.copyto(self._rows[part.rows[at]], row)
        part.found[at] = True
        self._progressed_s = time.monotonic()

    def _run_changes(self) -> None:
        while True:
            try:
                change = self._changes.get(timeout=async_store.REST_S if self._undeleted else None)
            except queue.Empty:
                change = Deletion()
            if change is None:
                return
            if isinstance(change, Deletion):
                self._take_in(change)
            if self._undeleted and self.can_write:
                self._delete()
            if isinstance(change, PutJob):  # after the write, or an earlier deletion would delete the new object
                self._put(change)

    def _put(self, job: PutJob) -> None:
        num_pending = len(job.chunks)
        try:
            for start in range(0, len(job.chunks), self._at_once):
                part, copies = job.chunks[start : start + self._at_once], list[bytes]()
                if not self.can_write or self._is_out_of_time() or not job.move(partial(self._copy, part, copies)):
                    break
                if start + len(part) == len(job.chunks):
                    job.finish()  # host memory is needed no more
                packed = [
                    (name, self._objects.pack(name, data, computed_s))
                    for (name, _, computed_s), data in zip(part, copies, strict=True)
                ]
                num_bytes = sum(len(data) for _, data in packed)
                if self.quota is not None and not self.quota.admit(num_bytes, self._is_out_of_time):
                    break
                begun_s = time.monotonic()
                self._store.put(packed)
                self._objects.record_write(num_bytes, time.monotonic() - begun_s)
                self.writes.succeed()
                self._know([name for name, _ in packed])
                num_pending -= len(part)
        except Exception as error:  # whatever a client raises, it is not stored
            self.writes.fail(error)
        finally:
            job.abandon()
            with self._lock:
                self._num_waiting -= len(job.chunks)
                self.num_dropped += num_pending

    def _copy(self, part: list[tuple[str, int, float]], copies: list[bytes]) -> None:
        copies.extend(self._rows[chunk_id].tobytes() for _, chunk_id, _ in part)

    def _describe(self, error: Exception) -> str:
        return f"{brief(error)}: {self._store.cure_of(error)}"

    def _is_out_of_time(self) -> bool:
        """Return whether the engine ends, and has waited long enough for writes."""
        return self._ends_s is not None and time.monotonic() > self._ends_s

    def _take_in(self, deletion: Deletion) -> None:
        """Queue a deletion, once per name and bounded."""
        if not deletion.is_retried:
            self._delete_once(deletion.names)
            return
        with self._lock:
            for name in deletion.names:
                if name in self._undeleted:
                    self._leaving[name] -= 1
                self._undeleted[name] = None
        if self.is_disabled or (len(self._undeleted) > _MAX_UNDELETED and not self.can_write):
            self._disable()

    def _delete_once(self, names: Sequence[str]) -> None:
        try:
            for start in range(0, len(names), _DELETED_AT_ONCE):
                if not self.can_write:
                    return
                self._store.delete(names[start : start + _DELETED_AT_ONCE])
                self.writes.succeed()
        except Exception as error:  # whatever a client raises, they stay
            self.writes.fail(error)

    def _delete(self) -> None:
        try:
            while self._undeleted:
                names = list(islice(self._undeleted, _DELETED_AT_ONCE))
                self._store.delete(names)
                self.writes.succeed()
                with self._lock:
                    for name in names:
                        del self._undeleted[name]
                        self._leaving[name] -= 1
                        if not self._leaving[name]:
                            del self._leaving[name]
        except Exception as error:  # whatever a client raises, it is tried again
            self.writes.fail(error)

    def _disable(self) -> None:
        """Stop using the store, as too many objects must not be read."""
        is_first, self.is_disabled = not self.is_disabled, True
        with self._lock:
            self._undeleted.clear()
            self._leaving.clear()
        if is_first:
            logger.error(
                "RC-TIER-OFF: RAGCache's shared store is out of service until the next start: it did not delete more "
                "than %d forgotten chunks. Before that, delete what begins with %s",
                _MAX_UNDELETED,
                self._objects.prefix,
            )
