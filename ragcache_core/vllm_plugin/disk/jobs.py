"""Messages between the disk tier and its threads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ragcache_core.chunkstore import ChunkNote, Transfer


class PendingChunk:
    """A chunk of host memory in flight to the disk.

    Args:
        key: under which it is stored.
        chunk_id: its row of host memory.
        first_note: the note of the first chunk of its run, which are consecutive chunks of one tree node.
        parent: the key of the chunk before it; None for the first of a run, whose note has it.
        offset: how many chunks of its run come before it.
    """

    __slots__ = ("_first_note", "_offset", "_parent", "chunk_id", "key")

    def __init__(
        self, key: bytes, chunk_id: int, first_note: ChunkNote, parent: bytes | None = None, offset: int = 0
    ) -> None:
        self.key = key
        self.chunk_id = chunk_id
        self._first_note = first_note
        self._parent = parent
        self._offset = offset

    @property
    def parent(self) -> bytes | None:
        """The key of the chunk before it."""
        return self._parent if self._offset else self._first_note.parent

    @property
    def note(self) -> ChunkNote:
        """Its note, made on access: on the disk's thread."""
        first = self._first_note
        return replace(first, parent=self._parent, position=first.position + self._offset) if self._offset else first


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a write: its chunks are on the disk, were dropped, or there was an ``error``.

    ``num_failures`` is the number of failed writes so far.
    """

    keys: list[bytes]
    error: Exception | None = None
    is_dropped: bool = False
    num_failures: int = 0


class LoadPart(Transfer):
    """Chunks of a job that a reader reads at once."""

    def __init__(self, keys: list[bytes], chunk_ids: list[int]) -> None:
        super().__init__()
        self.keys = keys
        self.chunk_ids = chunk_ids
        self.found = [False] * len(keys)


@dataclass(slots=True)
class LoadJob:
    """Chunks in flight into host memory, read in parts by several readers."""

    job_id: int
    parts: list[LoadPart]

    @property
    def keys(self) -> list[bytes]:
        """All of them."""
        return [key for part in self.parts for key in part.keys]

    @property
    def submitted_s(self) -> float:
        """When it was asked for."""
        return self.parts[0].submitted_s

    @property
    def is_begun(self) -> bool:
        """Whether a reader has come to it."""
        return any(part.progressed_s is not None for part in self.parts)

    def is_ended(self) -> bool:
        """Return whether each part was read or abandoned."""
        return all(part.is_finished or part.is_abandoned for part in self.parts)

    def abandon(self) -> None:
        """Abandon parts that are not read yet: from now on nothing is written to host memory."""
        for part in self.parts:
            part.abandon()


@dataclass(slots=True, eq=False)
class StoreJob:
    """Chunks whose host memory is held until they are in buffers, or are dropped."""

    job_id: int
    chunks: list[PendingChunk]
    evicted: list[bytes]
    ends_s: float
    """Until when it waits for buffers."""
    num_known_failures: int = 0
    """Failed writes that the scheduler knew of: chunks may depend on those that failed since."""
    drops_unbuffered: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Erasure:
    """Chunks to erase from the disk without a byte left, after all earlier writes.

    An erasure with an ``error`` is retried when writing has rested; until then it is not done.
    """

    keys: frozenset[bytes]
    is_done: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class WriteBatch:
    """One batch of the writer: free slots, then fill some; or erase chunks; or delete everything."""

    evicted: list[bytes] = field(default_factory=list)
    chunks: list[PendingChunk] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    job: StoreJob | None = None
    worths: list[tuple[bytes, float, float]] = field(default_factory=list)
    clears: bool = False
    erasure: Erasure | None = None
    is_stale: bool = False
    """Whether an earlier write failed that the scheduler did not know of when it made the job."""
    names: list[tuple[bytes, str | None]] = field(default_factory=list)
    """Chunks whose stored document names are outdated, with the new names."""
