"""The engines that a store tells of its changes: what they have cached of a document that goes, goes as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ragcache_core.types import DocId, Document

Warming = bool | Callable[[Document], Any]
"""Whether a new version is prefilled, or a function that returns the prompt in which it is."""


class CachesDocuments(Protocol):
    """What is asked of an engine."""

    def forget(self, doc_ids: Iterable[DocId]) -> object:
        """Remove the KV of documents."""
        ...

    def warm(self, documents: Iterable[Document], prompt: Callable[[Document], Any] | None = None) -> object:
        """Prefill documents."""
        ...


class BoundEngines:
    """Engines, each with what it does about new versions."""

    def __init__(self) -> None:
        self._engines: list[tuple[CachesDocuments, Warming]] = []

    def __bool__(self) -> bool:
        return bool(self._engines)

    def add(self, engine: CachesDocuments, warm: Warming) -> None:
        """Tell an engine from now on."""
        self._engines.append((engine, warm))

    def remove(self, engine: CachesDocuments) -> None:
        """Tell an engine no more."""
        self._engines = [bound for bound in self._engines if bound[0] is not engine]

    def tell(self, gone: Sequence[DocId], new: Sequence[Document] = ()) -> None:
        """Tell them of documents whose stored versions are gone, and of their ``new`` ones."""
        for engine, warm in self._engines if gone else ():
            engine.forget(gone)
            if warm and new:
                engine.warm(new, None if warm is True else warm)


def outdated(stored: Iterable[Document], new: Iterable[Document]) -> list[DocId]:
    """Return which stored documents are others than the new ones of the same ids."""
    now = {document.doc_id: document for document in new}
    return [d.doc_id for d in stored if (d.text, dict(d.metadata)) != _content(now[d.doc_id])]


def _content(document: Document) -> tuple[str, dict[str, object]]:
    return document.text, dict(document.metadata)
