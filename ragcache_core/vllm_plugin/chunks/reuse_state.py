"""What is known of a request with chunk reuse on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ragcache_core.chunk.scores import LEAST_LOST
from ragcache_core.chunk.types import ChunkSpan, ChunkStatistics, ReusePlan
from ragcache_core.stats import ChunkReuseStats
from ragcache_core.vllm_plugin.chunks.manager.entries import Reservation
from ragcache_core.vllm_plugin.chunks.messages import Capture, CapturedChunk, CaptureId


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """A request's chunk-reuse settings, with all defaults filled in.

    ``focus`` is the window of :class:`~ragcache_core.chunk.focus.FocusedChunks`; with 0 no rows are dropped. Without
    ``reuses`` a request is answered exactly, and its chunks are still captured. ``expected_uses`` is a forecast of the
    uses of its chunks.
    """

    selection: str
    alpha: float
    max_recompute: float
    focus: int = 3
    reuses: bool = True
    expected_uses: int = 0


@dataclass(slots=True)
class ReuseFigures:
    """What chunk reuse does for a request; see :class:`~ragcache_core.stats.ChunkReuseStats`.

    ``num_computed_rows`` are all that were computed for it, those that left on the way counted in part. ``overheads``
    are the CFOs of the chunks whose stored KV was considered, those that are computed wholly for it among them.
    """

    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_tokens: int = 0
    num_computed_rows: float = 0.0
    overheads: list[float] = field(default_factory=list)
    variants: list[int] = field(default_factory=list)

    def to_stats(self) -> ChunkReuseStats:
        """Return them as they are told; the answer is approximate."""
        return ChunkReuseStats(
            num_chunks=len(self.overheads),
            num_reused_tokens=self.num_reused_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_computed_tokens=round(self.num_computed_rows),
            fix_overhead=sum(self.overheads) / max(len(self.overheads), 1),
            variants=tuple(self.variants),
            num_prefix_tokens=self.num_prefix_tokens,
        )


@dataclass(slots=True)
class OpenCapture:
    """A chunk of a request that is to be kept once it is computed."""

    capture: Capture
    reservation: Reservation
    before: tuple[ChunkSpan, ...]
    """The chunks before it."""
    lost: tuple[float, ...]
    """How much context each of them has lost."""
    is_awaited: bool = False


@dataclass(slots=True)
class ReuseState:
    """A request with chunk reuse on, and where it stands."""

    token_ids: Sequence[int]
    spans: tuple[ChunkSpan, ...]
    options: ReuseOptions
    namespace: bytes = b""
    """Shared by the requests that hit each other's approximate KV."""
    documents: tuple[str, ...] = ()
    """Digests of the documents of ``spans``."""
    is_forgotten: bool = False
    """A document of it was deleted; none of its KV is kept."""
    figures: ReuseFigures = field(default_factory=ReuseFigures)
    offered: ReusePlan | None = None
    waits_since_s: float | None = None
    """Since when it could begin, but for what is read from disk."""
    computes_missing: bool = False
    """It has waited long enough; what is not there is computed."""
    is_tried: bool = False
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """What its job computes, sorted."""
    num_rows_left: int = 0
    num_question_tokens: int = 0
    """Tokens of the question, which look on in every slice; 0 if none does."""
    num_spare_runs: int = 0
    """Runs by which a slice may have more than its rows: the question's, and what is left around dropped chunks."""
    is_running: bool = False
    num_to_load: int = 0
    """Workers whose exact tokens from below are still to come."""
    is_finished: bool = False
    lost: list[float] = field(default_factory=list)
    """How much context each of its chunks has lost, see :func:`~ragcache_core.chunk.recompute.losses`."""
    open: dict[CaptureId, OpenCapture] = field(default_factory=dict)

    def next_rows(self, num_rows: int, num_runs: int) -> tuple[int, int]:
        """Return how many of its next ``num_rows`` rows lie in ``num_runs`` runs at most, and in how many.

        A run of neighbours is a sequence to vLLM.
        """
        first = len(self.positions) - self.num_rows_left
        begins = np.flatnonzero(np.diff(self.positions[first : first + num_rows], prepend=-2) != 1)
        if len(begins) > num_runs:
            return int(begins[num_runs]), num_runs
        return num_rows, len(begins)

    def __post_init__(self) -> None:
        self.lost = [0.0] * len(self.spans)

    @property
    def awaits_capture(self) -> bool:
        """Whether workers keep a chunk of it now, and will say so."""
        return any(each.is_awaited for each in self.open.values())


def statistics_of(each: OpenCapture, captured: CapturedChunk) -> ChunkStatistics | None:
    """Return a chunk's statistics; None if what was measured is not what attention can be."""
    try:
        off = math.fsum(mass * lost for mass, lost in zip(captured.inter, each.lost, strict=True))
        off = max(off / each.reservation.num_tokens, LEAST_LOST if any(each.lost) else 0.0)
        return ChunkStatistics(
            tuple(span.key for span in each.before),
            tuple(span.num_tokens for span in each.before),
            captured.inter,
            captured.intra,
            captured.token_inter,
            inherited=min(1.0, off),
            context=each.reservation.context,
        )
    except ValueError:
        return None
