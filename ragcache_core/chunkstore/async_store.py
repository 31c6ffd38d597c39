"""A store used by background threads, so that callers do not wait for the disk.

Where writing fails, it rests and is tried again. A disk that does not answer in time is used no more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from ragcache_core.chunkstore.slotfile import aligned_rows
from ragcache_core.errors import CacheCapacityError, CacheTierError, CacheWriteError
from ragcache_core.log import logger_of

logger = logger_of(__name__)

READ_TIMEOUT_S = 20.0
_WRITE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
_HEALTH_CHECK_INTERVAL_S = 10.0
REST_S = 5.0
_LONGEST_REST_S = 60.0
_KEPT_OF_RATE = 0.9
_RATE_LASTS_S = 60.0

_Kind = Literal["changes", "reads"]


class Store(Protocol):
    """A ``ChunkStore``, or several as one. One thread changes it, any may read."""

    @property
    def path(self) -> Path:
        """Folder of the store."""
        ...

    def check_in_place(self) -> None:
        """Raise CacheTierError if the files are gone."""
        ...

    def close(self) -> None:
        """Close it after the reads in flight."""
        ...


class Transfer:
    """Bytes in flight between disk and host memory; a caller that times out abandons them.

    From then on that memory is not accessed, because it holds other data.
    """

    def __init__(self) -> None:
        self.submitted_s = time.monotonic()
        self.progressed_s: float | None = None
        """When its latest part was begun; ``None`` while it waits for its turn."""
        self.is_abandoned = False
        self.is_finished = False
        self._lock = threading.Lock()

    def move(self, copy: Callable[[], object]) -> bool:
        """Copy from or to host memory, and return ``True``; do nothing if it was abandoned."""
        with self._lock:
            if not self.is_abandoned:
                copy()
                self.progressed_s = time.monotonic()
            return not self.is_abandoned

    def finish(self) -> bool:
        """End it; ``False`` if it was abandoned before."""
        with self._lock:
            self.is_finished = not self.is_abandoned
            return self.is_finished

    def abandon(self) -> bool:
        """Abandon it; ``False`` if it has ended before."""
        with self._lock:
            self.is_abandoned = not self.is_finished
            return self.is_abandoned


class Scratch:
    """Page-aligned memory that a reader reuses, as new memory for each read costs more than a copy."""

    def __init__(self) -> None:
        self._memory = np.empty((1, 0), dtype=np.uint8)

    def rows(self, num_rows: int, num_bytes: int) -> np.ndarray:
        """Return ``[num_rows, num_bytes]`` bytes, the same memory every time."""
        needed = num_rows * num_bytes
        if needed > self._memory.size:
            self._memory = aligned_rows(1, needed)
        return self._memory[0, :needed].reshape(num_rows, num_bytes)


class ReadRate:
    """Read bandwidth of all readers: a running average over the time in which any of them reads."""

    def __init__(self) -> None:
        self._num_reading = 0
        self._since_s = 0.0
        self._num_bytes = self._seconds = 0.0
        self._lock = threading.Lock()

    def begin(self, now_s: float) -> None:
        """Count a starting reader."""
        with self._lock:
            if not self._num_reading:
                self._since_s = now_s
            self._num_reading += 1

    def end(self, now_s: float, num_bytes: int) -> None:
        """Count a reader that has read ``num_bytes``."""
        with self._lock:
            self._num_reading -= 1
            self._num_bytes = _KEPT_OF_RATE * self._num_bytes + num_bytes
            self._seconds = _KEPT_OF_RATE * self._seconds + now_s - self._since_s
            self._since_s = now_s

    def bytes_per_s(self, now_s: float) -> float | None:
        """Return the average; ``None`` after a minute without reads, so that it is measured again."""
        with self._lock:
            is_recent = self._num_reading > 0 or now_s - self._since_s < _RATE_LASTS_S
            return self._num_bytes / self._seconds if self._seconds and is_recent else None


class Breaker:
    """Pauses a failing store: for 5 s, doubled after each further failure, up to a minute.

    The first failure is logged, and the first success after it. ``num_failures`` counts all failures.
    """

    def __init__(
        self,
        what: str,
        meanwhile: str,
        *,
        describe: Callable[[Exception], str] = str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a pause.

        Args:
            what: can fail, for messages, as in "the store could not be " ``read``.
            meanwhile: what the failure means for the user.
            describe: returns the reason of an error, and what to do.
            now_s: the clock.
        """
        self._what, self._meanwhile = what, meanwhile
        self._describe, self._now_s = describe, now_s
        self._lock = threading.Lock()
        self._rest_s = 0.0
        self._until_s = 0.0
        self.num_failures = 0

    @property
    def is_resting(self) -> bool:
        """Whether the store is paused."""
        return self._now_s() < self._until_s

    def fail(self, error: Exception) -> None:
        """Count a failure, and pause the store."""
        with self._lock:
            self.num_failures += 1
            is_first = not self._rest_s
            if not self.is_resting:
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) or REST_S
                self._until_s = self._now_s() + self._rest_s
        if is_first:
            logger.warning(
                "RC-TIER-FAILED: %s failed: %s. %s; it is tried again after %g s, and then after up to %g s",
                self._what, self._describe(error), self._meanwhile, REST_S, _LONGEST_REST_S,
            )  # fmt: skip

    def succeed(self) -> None:
        """End the pause, as the store works."""
        if not self._rest_s:
            return
        with self._lock:
            self._rest_s = self._until_s = 0.0
        logger.warning("RC-TIER-WORKS: %s works again", self._what)


@dataclass(frozen=True, slots=True)
class _Change:
    make: Callable[[], object]
    ended: Callable[[Exception | None], object] | None
    is_forced: bool
    is_write: bool


class AsyncStore:
    """Owns a store and its threads: one makes changes in order, others read and may overtake them.

    After a failed write, as on a full disk, its chunks are lost and writing rests for a while; reading goes on. The
    store is out of service after another failed change, if files are missing, or after a read of more than 20 s or a
    write of more than 60 s. It stays as it is, which is as after a crash, and changes fail from then on. The waiter for
    a transfer then abandons it.

    Attributes:
        writes: whether writing rests.
    """

    def __init__(self, store: Store, what: str, *, num_readers: int, comes_back: bool = False) -> None:
        """Start the threads.

        Args:
            store: the store.
            what: it is, for messages.
            num_readers: threads that read.
            comes_back: whether its user opens it again when it failed; else it is out of service until the next start.
        """
        self._comes_back = comes_back
        self._store = store
        self._what = what
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[Transfer, Callable[[Scratch], int]] | None] = queue.SimpleQueue()
        self._reading: set[Transfer] = set()
        self._changing_since_s: float | None = None
        self._num_open: Counter[_Kind] = Counter()
        self._is_done = threading.Condition()
        self._rate = ReadRate()
        self._failure: str | None = None
        self.writes = Breaker(f"Writing to {what}", "What is there is still read, and new KV is not kept there")
        self._is_closing = False
        name = self._store.path.name[:8]
        self._readers = [
            threading.Thread(target=self._run_reads, name=f"ragcache-read-{name}-{i}", daemon=True)
            for i in range(num_readers)
        ]  # daemons: no disk that hangs keeps a process
        self._writer = threading.Thread(target=self._run_changes, name=f"ragcache-write-{name}", daemon=True)
        for thread in (*self._readers, self._writer):
            thread.start()

    # Its user's side

    def change(
        self,
        make: Callable[[], object],
        ended: Callable[[Exception | None], object] | None = None,
        *,
        is_forced: bool = False,
        is_write: bool = False,
    ) -> None:
        """Queue a change of the store; ``ended`` is called with its error or ``None``.

        One that ``is_forced`` is tried out of service as well. One that ``is_write`` stores something: it fails at once
        while writing rests, which ends when ``make`` returns anything but False.
        """
        self._begin("changes")
        self._changes.put(_Change(make, ended, is_forced, is_write))

    def read(self, transfer: Transfer, fetch: Callable[[Scratch], int]) -> None:
        """Queue a read for a transfer.

        ``fetch`` finishes the transfer and returns how many bytes it has read; an error in it abandons the transfer.
        """
        self._begin("reads")
        self._reads.put((transfer, fetch))

    def record_progress(self) -> None:
        """Record that the next part of a running change begins."""
        self._changing_since_s = time.monotonic()

    def read_bytes_per_s(self) -> float | None:
        """Return the recent bandwidth of all readers; ``None`` if unknown."""
        return self._rate.bytes_per_s(time.monotonic())

    def why_down(self) -> str | None:
        """Return why the store is out of service, such as a time-out; ``None`` if it works."""
        now_s, changing_since_s = time.monotonic(), self._changing_since_s
        with self._is_done:
            begun_s = [each.progressed_s for each in self._reading]
        if any(since_s is not None and since_s < now_s - READ_TIMEOUT_S for since_s in begun_s):
            self.take_down(f"a read takes longer than {READ_TIMEOUT_S:g} s")
        if changing_since_s is not None and changing_since_s < now_s - _WRITE_TIMEOUT_S:
            self.take_down(f"a write takes longer than {_WRITE_TIMEOUT_S:g} s")
        return self._failure

    def take_down(self, why: str, *, comes_back: bool | None = None) -> None:
        """Take the store out of service, and log it; ``comes_back`` overrides the store's setting."""
        with self._is_done:
            is_first = self._failure is None
            self._failure = self._failure or why
        if is_first:
            opened = self._comes_back if comes_back is None else comes_back
            until = "until the disk answers" if opened else "until the next start"
            logger.error("RC-TIER-OFF: %s is out of service %s: %s", self._what, until, why)

    def on_write_error(self, error: CacheWriteError) -> None:
        """Pause writing; take the store out of service if its files are gone."""
        try:
            self._store.check_in_place()
        except CacheTierError as gone:
            self.take_down(str(gone))
        else:
            self.writes.fail(error)

    def finish_reads(self, timeout_s: float) -> bool:
        """Wait for the queued reads; return whether they end in time."""
        return self._wait_for("reads", timeout_s)

    def finish_changes(self, timeout_s: float) -> bool:
        """Wait for the queued changes; return whether they end in time."""
        return self._wait_for("changes", timeout_s)

    def close(self, ends_s: float | None = None) -> bool:
        """End the threads after the queued changes, and close the store; return whether they ended.

        Idempotent. A disk that has not answered by ``ends_s``, or in 30 s, is left as it is: what was written is found
        again, as after a crash.
        """
        if ends_s is None:
            ends_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._is_closing = True
        self._changes.put(None)
        for _ in self._readers:
            self._reads.put(None)
        for thread in (*self._readers, self._writer):
            thread.join(max(ends_s - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.error(
                    "RC-DISK-HANGS: %s has not answered in %g s, and is left as it is",
                    self._store.path,
                    CLOSE_TIMEOUT_S,
                )
                return False
        return True

    def _begin(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_open[kind] += 1

    def _end(self, kind: _Kind) -> None:
        with self._is_done:
            self._num_open[kind] -= 1
            self._is_done.notify_all()

    def _wait_for(self, kind: _Kind, timeout_s: float) -> bool:
        with self._is_done:
            return self._is_done.wait_for(lambda: not self._num_open[kind], timeout_s)

    # The threads' side

    def _run_changes(self) -> None:
        while (change := self._next_change()) is not None:
            error = self._make(change)
            self._changing_since_s = None
            if change.ended is not None:
                change.ended(error)
            self._end("changes")
        self._store.close()

    def _make(self, change: _Change) -> Exception | None:
        """Make a change, and return its error."""
        if self._failure is not None and not change.is_forced:
            return CacheTierError(self._failure)
        if change.is_write and self.writes.is_resting:
            return CacheTierError(f"{self._what} could not be written to lately, and is tried again later")
        try:
            self.record_progress()
            has_stored = change.make() is not False
        except CacheCapacityError as full:
            return full
        except Exception as failure:  # any error, as no caller waits for this thread
            if change.is_write and isinstance(failure, CacheWriteError):
                self.on_write_error(failure)
            else:
                self.take_down(f"a change failed: {failure}")
            return failure
        if change.is_write and has_stored:
            self.writes.succeed()
        return None

    def _next_change(self) -> _Change | None:
        """Wait for a change; check now and then whether the store still exists."""
        while self._failure is None:
            try:
                return self._changes.get(timeout=_HEALTH_CHECK_INTERVAL_S)
            except queue.Empty:
                pass
            try:
                self._store.check_in_place()
            except CacheTierError as error:
                self.take_down(str(error))
        return self._changes.get()

    def _run_reads(self) -> None:
        scratch = Scratch()
        while (job := self._reads.get()) is not None:
            transfer, fetch = job
            if self._failure is None and not self._is_closing and not transfer.is_abandoned:
                self._fetch(transfer, fetch, scratch)
            self._end("reads")

    def _fetch(self, transfer: Transfer, fetch: Callable[[Scratch], int], scratch: Scratch) -> None:
        transfer.progressed_s = time.monotonic()
        with self._is_done:
            self._reading.add(transfer)
        self._rate.begin(transfer.progressed_s)
        num_bytes = 0
        try:
            num_bytes = fetch(scratch)
        except Exception:  # any error makes the read a miss
            logger.warning("RC-DISK-UNREADABLE: %s cannot be read: a miss", self._store.path, exc_info=True)
            transfer.abandon()
        finally:
            self._rate.end(time.monotonic(), num_bytes)
            with self._is_done:
                self._reading.discard(transfer)
