"""What a store's service and who asks it say to each other: JSON, and one line of it for each stage of a search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from ragcache_core import errors
from ragcache_core._version import __version__
from ragcache_core.errors import RAGCacheError, StoreError, StoreVersionError
from ragcache_core.retrieval.embedders.base import PrecomputedEmbedder
from ragcache_core.retrieval.storage.snapshot import Snapshot, StoreStats
from ragcache_core.types import DocId, Document, RetrievalUpdate

PROTOCOL = 1
"""Both sides speak the same one. Fields may be added to it, and are passed over by who does not know them."""
SERVICE = "ragcache-store"
MAX_IDS = 1000
"""Documents, or texts to embed, that one request may name."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a service says of its store as it is now."""

    stats: StoreStats
    word_weight: float
    embeds: bool
    """Whether it embeds questions, so that they may be texts."""
    squared_length: float = 1.0
    """The inner product of a typical stored vector with itself."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> StoreFacts:
        """Return what is to be said of a store in this state."""
        embeds = snapshot.manifest.embedder_name != PrecomputedEmbedder.name
        return cls(snapshot.stats(), snapshot.manifest.options.word_weight or 0.0, embeds, snapshot.squared_length)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> StoreFacts:
        """Return what was said.

        Raises:
            KeyError, TypeError: that is not what a service says.
        """
        stats = StoreStats(**{field.name: said["stats"][field.name] for field in fields(StoreStats)})
        if not isinstance(stats.num_documents, int):
            raise TypeError(f"num_documents is {stats.num_documents!r:.40}")
        return cls(
            stats,
            float(said["word_weight"]),
            bool(said["embeds"]),
            float(said.get("squared_length", 1.0)) or 1.0,
        )

    def said(self) -> dict[str, Any]:
        """Return this as JSON."""
        return asdict(self)


def hello(facts: StoreFacts, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return what a service says of itself."""
    return {
        "service": SERVICE,
        "protocol": PROTOCOL,
        "ragcache": __version__,
        "limits": dict(limits),
        "store": facts.said(),
    }


def check_protocol(said: Mapping[str, Any], url: str) -> None:
    """Refuse a service that speaks another protocol.

    Raises:
        StoreVersionError: with what to do.
    """
    if (protocol := said.get("protocol")) != PROTOCOL:
        version = f" (ragcache {said['ragcache']})" if "ragcache" in said else ""
        raise StoreVersionError(
            f"the store's service at {url}{version} speaks protocol {protocol!r:.20}, ragcache {__version__} speaks "
            f"{PROTOCOL}: install the same version on both sides"
        )


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Refuse what no service of a store says, where it is read.

    Raises:
        StoreError: with the address.
    """
    try:
        yield
    except RAGCacheError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(
            f"what answers at {url} says what no service of a store says ({error!r:.80}): check the address"
        ) from error


def line(data: Mapping[str, Any]) -> bytes:
    """Return a line of NDJSON."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def document_said(document: Document) -> dict[str, Any]:
    """Return a document as JSON."""
    return {"doc_id": document.doc_id, "text": document.text, "metadata": dict(document.metadata)}


def document_read(said: Mapping[str, Any]) -> Document:
    """Return a document that was said.

    Raises:
        KeyError, TypeError: it is none.
    """
    doc_id, text, metadata = said["doc_id"], said["text"], said["metadata"]
    if not (isinstance(doc_id, str) and isinstance(text, str) and isinstance(metadata, dict)):
        raise TypeError(f"a document of {doc_id!r:.20}, {text!r:.20} and {metadata!r:.20}")
    return Document(doc_id, text, metadata)


def stage_said(update: RetrievalUpdate, known: set[DocId]) -> dict[str, Any]:
    """Return a stage as JSON: documents that are not ``known`` yet with their texts, then all by their ids."""
    new = [document_said(document) for document in update.documents if document.doc_id not in known]
    known.update(document.doc_id for document in update.documents)
    return {
        "stage": update.stage,
        "is_final": update.is_final,
        "new": new,
        "ids": [document.doc_id for document in update.documents],
        "scores": list(update.scores),
    }


class StageReader:
    """Reads the stages of one search, whose documents come once."""

    def __init__(self) -> None:
        self._known: dict[DocId, Document] = {}

    def read(self, said: Mapping[str, Any]) -> RetrievalUpdate:
        """Return a stage.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        for new in said["new"]:
            self._known[new["doc_id"]] = document_read(new)
        documents = tuple(self._known[doc_id] for doc_id in said["ids"])
        scores = tuple(float(score) for score in said["scores"])
        if len(scores) != len(documents):
            raise ValueError(f"{len(scores)} scores of {len(documents)} documents")
        return RetrievalUpdate(documents, scores, int(said["stage"]), is_final=bool(said["is_final"]))


def error_said(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON. What is not ours is named, and no more: it may hold what is nobody's business."""
    if isinstance(error, RAGCacheError):
        kind = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
        return {"error": {"type": kind, "message": str(error)}}
    message = f"the search failed in the service ({type(error).__name__}): its log says more"
    return {"error": {"type": "StoreError", "message": message}}


def error_read(said: Mapping[str, Any]) -> RAGCacheError:
    """Return the error that a service speaks of: of its own kind, where that is one of a store or a search."""
    kind = getattr(errors, str(said.get("type")), None)
    is_known = isinstance(kind, type) and issubclass(kind, (StoreError, errors.SearchError, errors.DocumentError))
    if kind is errors.ConfigError or is_known:
        error: RAGCacheError = kind(str(said.get("message")))  # type: ignore[misc]
        return error
    return StoreError(str(said.get("message")))
