"""What the scheduler's side of chunk reuse tells the workers in a step, and what they answer.

Everything that decides is in here: which positions are computed, which slices run in which step. So all workers of a
tensor-parallel model do the same in the same step, each with its own heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ragcache_core.chunk.types import ChunkKey

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
    fence: int = 0
    """Reported at the end of the step, from which on no worker writes to the pages of what was forgotten before it."""


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

    def mean_of(self, num_workers: int) -> CapturedChunk:
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
    ``computed_rows`` are the rows that jobs that ended have computed, those of dropped rows in part. ``fence`` is the
    step's.
    """

    num_captured: Counter[CaptureId] = field(default_factory=Counter)
    captured: dict[CaptureId, CapturedChunk] = field(default_factory=dict)
    num_loaded: Counter[str] = field(default_factory=Counter)
    computed_rows: dict[str, float] = field(default_factory=dict)
    fence: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_captured or self.num_loaded or self.computed_rows or self.fence)

    def merged(self, other: ChunkReport) -> ChunkReport:
        """Return the reports of two workers as one."""
        return ChunkReport(
            self.num_captured + other.num_captured,
            _summed(self.captured, other.captured),
            self.num_loaded + other.num_loaded,
            {**self.computed_rows, **other.computed_rows},
            max(self.fence, other.fence),
        )


def _summed(
    first: Mapping[CaptureId, CapturedChunk], second: Mapping[CaptureId, CapturedChunk]
) -> dict[CaptureId, CapturedChunk]:
    summed = dict(first)
    for name, chunk in second.items():
        summed[name] = summed[name].plus(chunk) if name in summed else chunk
    return summed
