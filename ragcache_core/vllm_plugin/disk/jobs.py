"""Messages between the disk tier and its threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ragcache_core.chunkstore import ChunkNote
from ragcache_core.vllm_plugin.lower.jobs import StoreTransfer


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Consecutive blocks of one tree node, in flight from host memory to disk, each depending on the previous one.

    Attributes:
        names: under which they are stored.
        rows: their rows of host memory.
        note: of the first of them.
    """

    names: Sequence[bytes]
    rows: Sequence[int]
    note: ChunkNote

    def chunks(self) -> Iterator[PendingChunk]:
        """Yield the blocks one by one, on the disk's thread."""
        for offset, (name, row) in enumerate(zip(self.names, self.rows, strict=True)):
            yield PendingChunk(name, row, self, offset)


class PendingChunk(NamedTuple):
    """One block of a run."""

    name: bytes
    row: int
    run: PendingRun
    offset: int

    @property
    def note(self) -> ChunkNote:
        """Its stored metadata."""
        first, offset = self.run.note, self.offset
        if not offset:
            return first
        return replace(first, parent=self.run.names[offset - 1], position=first.position + offset)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a write: its blocks are stored or dropped, or there was an ``error``.

    ``num_failures`` is the number of failed writes so far.
    """

    names: list[bytes]
    error: Exception | None = None
    is_dropped: bool = False
    num_failures: int = 0


class DiskStore(StoreTransfer):
    """Blocks whose host memory is held until they are in buffers, or dropped.

    Args:
        runs: the chunks, parents first.
        evicted: the names of chunks that are deleted before.
        timeout_s: how long it waits for buffers.
        num_known_failures: failed writes that the scheduler knew of: chunks may depend on those that failed since.
    """

    def __init__(
        self, runs: Sequence[PendingRun], evicted: list[bytes], timeout_s: float, num_known_failures: int
    ) -> None:
        super().__init__(sum(len(run.names) for run in runs), timeout_s)
        self.runs = runs
        self.evicted = evicted
        self.num_known_failures = num_known_failures
        self.error: Exception | None = None
        self.is_released = False

    def release(self) -> None:
        """Stop waiting for buffers; blocks with a free buffer are still copied."""
        self.is_released = True


@dataclass(slots=True, eq=False)
class Erasure:
    """Blocks to overwrite on the disk, after all earlier writes.

    An erasure with an ``error`` is retried when writing has rested; until then it is not done.
    """

    names: frozenset[bytes]
    is_done: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class WriteBatch:
    """One batch of the writer: free slots and fill others; or overwrite blocks; or delete everything.

    Attributes:
        evicted: the names of chunks to delete first.
        chunks, payloads: what to write.
        job: of these chunks.
        worths: frequencies and costs to note, by name.
        clears: delete everything.
        erasure: what to erase.
        is_stale: an earlier write failed that the scheduler did not know of when it made the job.
        doc_ids: chunks whose stored document names are outdated, with the new names.
    """

    evicted: list[bytes] = field(default_factory=list)
    chunks: list[PendingChunk] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    job: DiskStore | None = None
    worths: list[tuple[bytes, float, float]] = field(default_factory=list)
    clears: bool = False
    erasure: Erasure | None = None
    is_stale: bool = False
    doc_ids: list[tuple[bytes, str | None]] = field(default_factory=list)
