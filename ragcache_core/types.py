"""The words that every room shares: documents, retrieval updates and prompt segments."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from ragcache_core.errors import ConfigError, quoted

DocId = str
"""Identifies a document across retrieval, prompt and cache. It never decides what is *correct* (token hashes do),
only what is kept."""

_NO_METADATA: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Document:
    """A retrieved piece of text: a chunk of a file, or a whole short file.

    ``doc_id`` is unique in its store. ``metadata`` is plain JSON data and is not interpreted, but for a ``title`` and a
    ``source``: their words are looked for, as those of the id are.
    """

    doc_id: DocId
    text: str
    metadata: Mapping[str, object] = field(default_factory=lambda: _NO_METADATA)


@dataclass(frozen=True, slots=True)
class RetrievalUpdate:
    """What a staged search knows after one stage (RAGCache §5.3, Algorithm 2, "D_temp").

    ``documents`` are ordered best first and ``scores`` are parallel to them: squared L2 distances (ascending) or
    inner products (descending), by the store's metric. ``stage`` counts from 0. The update with ``is_final`` is the
    answer of the unmodified index, or what a store that is searched by words as well makes of it; an earlier one is a
    guess.
    """

    documents: tuple[Document, ...]
    scores: tuple[float, ...]
    stage: int
    is_final: bool


class SegmentKind(enum.StrEnum):
    """What a run of prompt tokens is."""

    PREFIX = "prefix"
    """Static text before the first document: chat template, system prompt. The root of the knowledge tree."""
    DOCUMENT = "document"
    QUESTION = "question"
    """Everything after the last document."""


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens ``[start, end)`` of a prompt and what they are. The segments of a prompt tile it without gaps.

    ``text_end`` is where a document's own tokens end, and what separates it from the next one begins; ``None`` is
    ``end``.
    """

    kind: SegmentKind
    start: int
    end: int
    doc_id: DocId | None = None
    text_end: int | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return self.end - self.start


class Tier(enum.IntEnum):
    """Where a document's KV lies, the fastest first (RAGCache §5.1; the disk is the third tier of seed article 002)."""

    GPU = 0
    """The engine's own KV memory; main memory on a machine without a GPU."""
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """The name in statistics and metrics: ``gpu``, ``host``, ``disk``."""
        return self.name.lower()


SelectionName = Literal["cache_craft", "whole_chunks", "first_tokens", "question_driven", "random"]
"""Which tokens of reused chunks are computed all the same; see ``chunk/selection.py``."""

DEFAULT_ALPHA: Mapping[SelectionName, float] = MappingProxyType(
    {"cache_craft": 1.0, "whole_chunks": 1.7, "first_tokens": 1.0, "question_driven": 1.0, "random": 1.0}
)
"""Eq. 12's factor where nobody chose one. With 1.7, ``whole_chunks`` computes a chunk that has lost 1 / 1.7 of what it
looked at."""


@dataclass(frozen=True, slots=True)
class ChunkReuseRequest:
    """How one request wants the KV of its documents reused behind other documents. ``None``: as the engine does.

    ``quality`` is that of the answers, as ``ragcache calibrate`` measured it; ``alpha`` is Eq. 12's factor (Cache-Craft
    §3.2), in its stead. ``max_recompute`` is the largest share of a chunk that is computed.

    Raises:
        ConfigError: a value that cannot work, or both ``quality`` and ``alpha``.
    """

    selection: SelectionName | None = None
    quality: float | None = None
    alpha: float | None = None
    max_recompute: float | None = None

    def __post_init__(self) -> None:
        if self.selection is not None and self.selection not in get_args(SelectionName):
            known = ", ".join(get_args(SelectionName))
            raise ConfigError(f"chunk_reuse has selection {self.selection!r:.80}; choose one of {known}")
        for name, value, least, most in (
            ("quality", self.quality, math.ulp(0.0), 1.0),
            ("alpha", self.alpha, 0.0, sys.float_info.max),
            ("max_recompute", self.max_recompute, 0.0, 1.0),
        ):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and least <= value <= most):
                raise ConfigError(
                    f"chunk_reuse has {name} {quoted(value)}; it must be a number of {least:g} to {most:g}"
                )
        if self.quality is not None and self.alpha is not None:
            raise ConfigError(
                f"chunk_reuse has quality {self.quality:g} and alpha {self.alpha:g}: quality chooses alpha, so give one"
            )
