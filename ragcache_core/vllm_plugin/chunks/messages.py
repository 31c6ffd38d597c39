"""What the scheduler's side of chunk reuse tells the workers in a step, and what they answer.

Everything that decides is in here: which positions are computed, which slices run in which step. So all workers of a
tensor-parallel model do the same in the same step, each with its own heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ragcache_core.chunk.types import ChunkKey, ChunkVariant


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Write a variant's pages, its tokens and its statistics to disk; the pages are left alone until it is reported.

    ``token_ids`` are 32 bits each. ``frequency``, ``worth``, ``documents`` and ``stored_s`` are noted with it.
    """

    command_id: int
    variant: ChunkVariant
    token_ids: bytes
    pages: tuple[int, ...]
    frequency: float
    worth: float
    documents: frozenset[str] = frozenset()
    stored_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Read a variant from disk into pages."""

    command_id: int
    key: ChunkKey
    number: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropChunks:
    """Delete variants, each a key, a number and how many pages it has, from disk."""

    dropped: tuple[tuple[ChunkKey, int, int], ...]


@dataclass(frozen=True, slots=True)
class ScrubDisk:
    """Leave nothing on disk of what was deleted before."""

    command_id: int


@dataclass(frozen=True, slots=True)
class NameChunks:
    """Update the documents of variants on disk: key, number, documents."""

    names: tuple[tuple[ChunkKey, int, frozenset[str]], ...]


@dataclass(frozen=True, slots=True)
class NoteUses:
    """Update the worth of variants on disk: key, number, frequency, worth."""

    uses: tuple[tuple[ChunkKey, int, float, float], ...]


MemoryCommand = WriteChunk | ReadChunk | DropChunks | ScrubDisk | NameChunks | NoteUses


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What workers did since they reported last: how many of them finished, or could not finish, which command.

    ``num_corrupt`` reads found a chunk that was damaged or gone. ``is_disk_down``: a worker's disk is out of service.
    """

    num_done: Counter[int] = field(default_factory=Counter)
    num_failed: Counter[int] = field(default_factory=Counter)
    num_corrupt: int = 0
    is_disk_down: bool = False

    def merged(self, other: MemoryReport) -> MemoryReport:
        """Return the reports of two workers, or of two steps, as one."""
        return MemoryReport(
            self.num_done + other.num_done,
            self.num_failed + other.num_failed,
            self.num_corrupt + other.num_corrupt,
            self.is_disk_down or other.is_disk_down,
        )

    def __bool__(self) -> bool:
        return bool(self.num_done or self.num_failed or self.num_corrupt or self.is_disk_down)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A variant that a worker found on its disk at the start, its tokens, what it was worth, when it was computed, and
    its documents and those before it, see :func:`~ragcache_core.vllm_plugin.chunks.page_layout.digest_of`."""

    variant: ChunkVariant
    token_ids: bytes
    frequency: float
    worth: float
    documents: frozenset[str] = frozenset()
    stored_s: float = 0.0


CaptureId = tuple[str, ChunkKey, int]
"""Request, key and number of a reservation."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A chunk whose KV is kept once it is computed.

    It stands at tokens ``[start, end)`` of the prompt, after the chunks at ``before``; ``pages`` are those of the
    workers' memory.
    """

    id: CaptureId
    start: int
    end: int
    before: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CaptureStep:
    """Tokens ``[start, end)`` of a request are computed in this step by vLLM, and belong to ``captures``."""

    block_ids: np.ndarray
    start: int
    end: int
    captures: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class Injection:
    """Tokens ``[first, last)`` of a prompt get the stored KV of a chunk that stands at ``start``."""

    start: int
    first: int
    last: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FocusRequest:
    """Find the chunks that the question attends to, and stop computing the others (Cache-Craft Algorithm 1).

    ``question_start`` is the first token of the question, and ``chunks`` are all chunks of the prompt. ``droppable``
    are indices in ``chunks`` of those that stored KV can replace. The chunks are found when ``window`` layers in a row
    agree.
    """

    question_start: int
    chunks: tuple[tuple[int, int], ...]
    droppable: tuple[int, ...]
    window: int


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """The tokens of a request that chunk reuse provides: stored KV, and what is computed.

    ``positions`` and ``token_ids`` [num_rows] are what is computed, sorted by position. With ``awaits_load`` the tiers
    below bring exact tokens first. ``prefill_s`` is about how long the rows take.
    """

    request_id: str
    block_ids: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray
    injections: tuple[Injection, ...] = ()
    captures: tuple[Capture, ...] = ()
    focus: FocusRequest | None = None
    awaits_load: bool = False
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slice:
    """The next ``num_rows`` of a job run in this step; with 0 it has none left, and ends."""

    request_id: str
    num_rows: int


@dataclass(slots=True)
class ChunkStep:
    """One step's work for chunk reuse."""

    jobs: list[ChunkJob] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    captures: list[CaptureStep] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Jobs that end without a result: their requests have ended."""
    forgotten: list[str] = field(default_factory=list)
    """Requests whose captures are dropped."""
    commands: tuple[MemoryCommand, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturedChunk:
    """What was measured of a chunk whose KV lies in its pages now; sums over its tokens, means of layers and heads."""

    inter: tuple[float, ...]
    intra: float
    token_inter: tuple[float, ...]

    def plus(self, other: CapturedChunk) -> CapturedChunk:
        """Return the sum of two workers' figures, each of its own heads."""
        return CapturedChunk(
            tuple(a + b for a, b in zip(self.inter, other.inter, strict=True)),
            self.intra + other.intra,
            tuple(a + b for a, b in zip(self.token_inter, other.token_inter, strict=True)),
        )

    def over(self, num_workers: int) -> CapturedChunk:
        """Return the mean of what ``num_workers`` measured."""
        if num_workers == 1:
            return self
        return CapturedChunk(
            tuple(a / num_workers for a in self.inter),
            self.intra / num_workers,
            tuple(a / num_workers for a in self.token_inter),
        )


@dataclass(slots=True)
class ChunkReport:
    """What workers did in a step.

    ``num_captured`` and ``captured`` are the chunks whose KV was kept, by how many workers, and the sums of what they
    measured; ``num_loaded`` says of how many workers the tiers below have brought a request's exact tokens.
    ``computed_rows`` are the rows that jobs that ended have computed, those of dropped rows in part.
    """

    num_captured: Counter[CaptureId] = field(default_factory=Counter)
    captured: dict[CaptureId, CapturedChunk] = field(default_factory=dict)
    num_loaded: Counter[str] = field(default_factory=Counter)
    computed_rows: dict[str, float] = field(default_factory=dict)
    memory: MemoryReport = field(default_factory=MemoryReport)

    def __bool__(self) -> bool:
        return bool(self.num_captured or self.num_loaded or self.computed_rows or self.memory)

    def merged(self, other: ChunkReport) -> ChunkReport:
        """Return the reports of two workers as one."""
        return ChunkReport(
            self.num_captured + other.num_captured,
            _summed(self.captured, other.captured),
            self.num_loaded + other.num_loaded,
            {**self.computed_rows, **other.computed_rows},
            self.memory.merged(other.memory),
        )


def _summed(
    first: Mapping[CaptureId, CapturedChunk], second: Mapping[CaptureId, CapturedChunk]
) -> dict[CaptureId, CapturedChunk]:
    summed = dict(first)
    for name, chunk in second.items():
        summed[name] = summed[name].plus(chunk) if name in summed else chunk
    return summed
