"""Types shared by all packages: documents, retrieval updates and prompt segments."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ragcache_core.errors import ConfigError

DocId = str
"""Identifies a document across retrieval, prompt and cache. It never decides what is *correct* (token hashes do),
only what is kept."""

ACL = "acl"
"""The name of a document's groups in its metadata."""
_MAX_GROUPS = 1024
_MAX_GROUP_CHARS = 256
MAX_LABEL_CHARS = 200
_SOURCES = ("source", "file_path")  # LangChain's name in the metadata, and LlamaIndex's
_UNREADABLE_ID = re.compile(
    r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}|text-[0-9a-f]{24}|[0-9a-f]{40}|[0-9a-f]{64}"
)
_NO_METADATA: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Document:
    """A retrieved piece of text: a chunk of a file, or a whole short file.

    ``doc_id`` is unique in its store. ``metadata`` is plain JSON data and is not interpreted, except that the words of
    ``title``, ``source`` and the id are searched.

    ``acl`` are the groups that may read it; ``None`` means all users. The metadata hold it too (``acl``), so that
    stores and frameworks keep it; it is read from there if it is not given. It restricts no search: it decides which
    requests share the KV of prompts that show the document.

    Raises:
        ConfigError: ``acl`` is no list of groups, or the metadata say another.
    """

    doc_id: DocId
    text: str
    metadata: Mapping[str, object] = field(default_factory=lambda: _NO_METADATA)
    acl: Sequence[str] | None = None

    def __post_init__(self) -> None:
        declared = self.metadata.get(ACL) if isinstance(self.metadata, Mapping) else None
        if self.acl is None and declared is None:
            return
        acl = read_acl(declared if self.acl is None else self.acl, self.doc_id)
        object.__setattr__(self, "acl", acl)
        if declared is None:
            object.__setattr__(self, "metadata", {**self.metadata, ACL: list(acl)})
        elif read_acl(declared, self.doc_id) != acl:
            raise ConfigError(
                f"document {self.doc_id!r:.80} has the acl {list(acl)!r:.80}, its metadata say {declared!r:.80}: "
                "give one of them"
            )

    @property
    def label(self) -> str | None:
        """A readable name if the id is a UUID or a hash: the end of the document's source."""
        if _UNREADABLE_ID.fullmatch(self.doc_id) is None or not isinstance(self.metadata, Mapping):
            return None
        sources = (self.metadata.get(name) for name in _SOURCES)
        source = next((each for each in sources if isinstance(each, str) and each.strip()), "")
        return source[-MAX_LABEL_CHARS:].encode("utf-8", "replace").decode() or None


def read_acl(value: object, doc_id: object) -> tuple[str, ...]:
    """Return the groups that may read a document, sorted, each once.

    Raises:
        ConfigError: it is no list of groups.
    """
    groups = value if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes) else ()
    if not 0 < len(groups) <= _MAX_GROUPS or not all(
        isinstance(group, str) and 0 < len(group) <= _MAX_GROUP_CHARS for group in groups
    ):
        raise ConfigError(
            f"the acl of document {doc_id!r:.80} is {value!r:.80}; it must be a list of 1 to {_MAX_GROUPS} names of "
            f"groups of 1 to {_MAX_GROUP_CHARS} characters: leave it out where everybody may read the document"
        )
    return tuple(sorted(set(groups)))


@dataclass(frozen=True, slots=True)
class Swap:
    """A document shown in place of a near-tied one, so that more of the prompt is cached.

    ``score_loss`` is the share of the score of ``doc_out`` that ``doc_in`` lacks.
    """

    doc_out: DocId
    doc_in: DocId
    score_loss: float


@dataclass(frozen=True, slots=True)
class RetrievalUpdate:
    """The documents of one stage of a search (RAGCache §5.3, Algorithm 2, "D_temp").

    ``documents`` are ordered best first and ``scores`` are parallel to them: squared L2 distances (ascending) or
    inner products (descending), by the store's metric. ``stage`` counts from 0; -1 is the result of
    the last search for the same question. The update with ``is_final`` is the answer of the unmodified index, combined
    with the words where a store searches both; earlier ones are candidates. ``swaps`` are the substituted documents; a
    new document has the place of the old one.
    """

    documents: tuple[Document, ...]
    scores: tuple[float, ...]
    stage: int
    is_final: bool
    swaps: tuple[Swap, ...] = ()


class SegmentKind(enum.StrEnum):
    """Kind of a prompt segment."""

    PREFIX = "prefix"
    """Static text before the first document: chat template, system prompt. The root of the knowledge tree."""
    DOCUMENT = "document"
    QUESTION = "question"
    """Everything after the last document."""


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens ``[start, end)`` of a prompt with their kind. Segments cover a prompt without gaps.

    ``text_end`` is where a document's own tokens end, and what separates it from the next one begins; ``None`` is
    ``end``. ``label`` is a document's readable name, where its id is none.
    """

    kind: SegmentKind
    start: int
    end: int
    doc_id: DocId | None = None
    text_end: int | None = field(default=None, compare=False)
    label: str | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return self.end - self.start


class Tier(enum.IntEnum):
    """Tiers of KV, the fastest first (RAGCache §5.1; the disk is an additional tier)."""

    GPU = 0
    """The engine's own KV memory; main memory on a machine without a GPU."""
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """The name in statistics and metrics: ``gpu``, ``host``, ``disk``."""
        return self.name.lower()


class Origin(enum.IntEnum):
    """Source of cached prompt tokens: a tier of the engine, or a shared store."""

    GPU = Tier.GPU
    HOST = Tier.HOST
    DISK = Tier.DISK
    SHARED = 3

    @property
    def label(self) -> str:
        """The name in statistics and metrics: a tier's, or ``shared``."""
        return self.name.lower()


QuestionFormat = Literal[
    "auto", "ragcache", "squad", "hotpotqa", "musique", "2wikimultihopqa", "longbench", "drop", "cnn_dailymail", "xsum"
]
"""Format of a file of questions: JSON lines, or a published set's; see ``quality/published.py``."""

SelectionName = Literal["cache_craft", "whole_chunks"]
"""Which tokens of reused chunks are computed all the same; see ``chunk/selection.py``."""

DEFAULT_ALPHA: Mapping[SelectionName, float] = MappingProxyType({"cache_craft": 1.0, "whole_chunks": 1.7})
"""Eq. 12's factor by default. With 1.7, ``whole_chunks`` computes a chunk that has lost 1 / 1.7 of what it
looked at."""
