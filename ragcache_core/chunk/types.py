"""Types of chunk reuse: chunks, their statistics, their cached versions, and plans."""

from __future__ import annotations

import array
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragcache_core.errors import PromptError

ChunkKey = bytes
"""SHA-256 of a chunk's token ids and of the static prefix, independent of its position."""


ContextKey = bytes
"""SHA-256 of everything before a chunk: the static prefix, other chunks, and separators."""


def chunk_key(token_ids: Sequence[int], *, behind: ChunkKey = b"") -> ChunkKey:
    """Return the key of a chunk: SHA-256 over its token ids, eight bytes each.

    ``behind`` is the key of what stands before all chunks, a system prompt for one. Every chunk looks at that, and
    neither overlap nor CFO knows of it: so a chunk behind another static prefix is another chunk.
    """
    return hashlib.sha256(behind + array.array("q", token_ids).tobytes()).digest()


def chunk_spans(token_ids: Sequence[int], places: Sequence[tuple[int, int]]) -> list[ChunkSpan]:
    """Return the chunks of a prompt at ``places``, ``[start, end)`` each, in order.

    Raises:
        PromptError: one holds no token.
    """
    if not places:
        return []
    static = context = chunk_key(token_ids[: places[0][0]])
    spans: list[ChunkSpan] = []
    for start, end in places:
        if spans:
            context = context_behind(spans[-1], token_ids[spans[-1].end : start])
        spans.append(ChunkSpan(start, end, chunk_key(token_ids[start:end], behind=static), context))
    return spans


def context_behind(span: ChunkSpan, between: Sequence[int] = ()) -> ContextKey:
    """Return the context of the next chunk, after ``span`` and the tokens ``between``."""
    return chunk_key(between, behind=span.context + span.key)


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """The attention statistics of a chunk at its capture, with its prefix then (Cache-Craft §3.1).

    Masses are sums of softmaxed attention, averaged over layers and heads, so a row of the attention matrix adds up to
    1 over everything that the row sees.

    Raises:
        ValueError: the lengths do not match, or a mass is negative or not finite.
    """

    prefix: tuple[ChunkKey, ...]
    """The chunks that stood before it, in order; the static prefix is not among them."""

    prefix_lengths: tuple[int, ...]
    """How many tokens each of ``prefix`` has, which Eq. 9 divides by."""

    inter: tuple[float, ...]
    """Eq. 3: the attention of the chunk's tokens to each chunk of ``prefix``, parallel to it."""

    intra: float
    """Eq. 4: attention of the chunk's tokens to its earlier tokens, without each token's own."""

    token_inter: tuple[float, ...]
    """For Eq. 14: each token's attention to all the chunks of ``prefix``, one for every token of the chunk."""

    inherited: float = 0.0
    """In [0, 1], how much of the chunk's attention went to chunks that had lost their own context: 0 where all before
    it was as a prefill makes it. See :func:`~ragcache_core.chunk.scores.lost_context`."""

    context: ContextKey = field(kw_only=True)
    """Its context at capture, with the text between ``prefix``: it identifies a variant."""

    def __post_init__(self) -> None:
        if not len(self.inter) == len(self.prefix_lengths) == len(self.prefix):
            counts = f"{len(self.inter)} scores and {len(self.prefix_lengths)} lengths"
            raise ValueError(f"{counts} for a prefix of {len(self.prefix)} chunks: one of each for every chunk")
        masses = (*self.inter, self.intra, *self.token_inter, self.inherited)
        if not (min(masses) >= 0.0 and math.isfinite(sum(masses))):
            raise ValueError("attention that is negative or not finite: this capture must not be kept")


@dataclass(frozen=True, slots=True)
class ChunkVariant:
    """One cached version of a chunk. ``number`` is unique for its ``key``, and never reused."""

    key: ChunkKey
    number: int
    num_tokens: int
    statistics: ChunkStatistics

    @property
    def name(self) -> tuple[ChunkKey, int, ContextKey]:
        """Its unique name, also across engines."""
        return self.key, self.number, self.statistics.context

    def __post_init__(self) -> None:
        if len(self.statistics.token_inter) != self.num_tokens:
            measured = len(self.statistics.token_inter)
            raise ValueError(f"statistics of {measured} tokens for a chunk of {self.num_tokens}: one for each token")


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk at tokens ``[start, end)`` of a prompt, with its context."""

    start: int
    end: int
    key: ChunkKey
    context: ContextKey

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise PromptError(f"a chunk at tokens [{self.start}, {self.end}): it must hold at least one token")

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk whose stored KV is used: its version, the tokens to recompute, and the reason of their number.

    ``recomputed`` are positions in the prompt, sorted. ``lost`` is how much of its context the chosen variant has lost,
    ``overhead`` its CFO (Eq. 12): the fraction of the chunk that should be recomputed; rounding, ``max_recompute`` and
    the plan's borders may make the actual one differ. Tokens of the span outside the plan's ``[start, end)`` are
    not this plan's: they are cached exactly, or computed by others.
    """

    span: ChunkSpan
    variant: ChunkVariant
    recomputed: tuple[int, ...]
    lost: float
    overhead: float


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The plan for tokens ``[start, end)`` of a prompt: read from stored chunks, or computed.

    ``recomputed`` are all positions to compute, sorted: between chunks, in chunks that are not stored, and the
    selected tokens of the chunks that are reused. Every other position of ``[start, end)`` lies in exactly one chunk
    of ``reused``.
    """

    start: int
    end: int
    reused: tuple[PlannedChunk, ...]
    recomputed: tuple[int, ...]

    def num_kept(self, chunk: PlannedChunk) -> int:
        """Return the number of tokens of one of ``reused`` that are not recomputed."""
        return min(chunk.span.end, self.end) - max(chunk.span.start, self.start) - len(chunk.recomputed)

    @property
    def read(self) -> tuple[PlannedChunk, ...]:
        """The chunks of ``reused`` with some stored KV in use; others are recomputed completely."""
        return tuple(chunk for chunk in self.reused if self.num_kept(chunk))

    @property
    def num_reused_tokens(self) -> int:
        """Number of tokens whose KV is not recomputed."""
        return self.end - self.start - len(self.recomputed)
