"""What passes between the disk tier and its threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from ragcache_core.chunkstore import ChunkNote


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of host memory on its way to the disk, and what is noted about it."""

    key: bytes
    chunk_id: int
    note: ChunkNote


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of chunks that were to be written: they are on the disk, were dropped, or there was an ``error``."""

    keys: list[bytes]
    error: Exception | None = None
    is_dropped: bool = False


@dataclass(slots=True)
class LoadJob:
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


@dataclass(slots=True, eq=False)
class StoreJob:
    """Chunks whose host memory is held until they are in buffers, or are dropped."""

    job_id: int
    chunks: list[PendingChunk]
    evicted: list[bytes]
    ends_s: float
    """Until when it waits for buffers."""
    drops_unbuffered: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class WriteBatch:
    """What the writer does at once: give slots back, then fill some; or forget everything."""

    evicted: list[bytes] = field(default_factory=list)
    chunks: list[PendingChunk] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    job: StoreJob | None = None
    worths: list[tuple[bytes, float, float]] = field(default_factory=list)
    clears: bool = False
