"""What reading a directory again means for a store: which documents are new, changed, unchanged or left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.types import DocId, Document

_CHUNK = re.compile(r"#\d+$")


class StoredDocuments(Protocol):
    """What is asked of a store."""

    def ids(self) -> list[DocId]:
        """Return the ids of all documents."""
        ...

    def get(self, doc_ids: Sequence[DocId]) -> list[Document]:
        """Return documents by id, in the order of ``doc_ids``."""
        ...


@dataclass(frozen=True, slots=True)
class Changes:
    """Documents that were read, compared with those in a store.

    ``left_over`` are stored chunks of a text that was read and is cut differently now.
    """

    new: tuple[Document, ...]
    changed: tuple[Document, ...]
    left_over: tuple[DocId, ...]
    num_unchanged: int

    @property
    def replaced(self) -> tuple[DocId, ...]:
        """Ids in the store that an update takes out."""
        return (*(document.doc_id for document in self.changed), *self.left_over)


def compare(documents: Iterable[Document], stored: StoredDocuments) -> Changes:
    """Return what ``documents`` change in a store. Stored documents of other files are none of their business."""
    documents = tuple(documents)
    read_ids = {document.doc_id for document in documents}
    read_texts = {_text_of(document) for document in documents}
    stored_ids = set(stored.ids())
    before = {d.doc_id: d for d in stored.get([d.doc_id for d in documents if d.doc_id in stored_ids])}
    new = tuple(document for document in documents if document.doc_id not in stored_ids)
    changed = tuple(d for d in documents if d.doc_id in before and not _same(d, before[d.doc_id]))
    names = {name for _, name in read_texts}
    suspects = sorted(i for i in stored_ids - read_ids if i in names or _CHUNK.sub("", i) in names)
    left_over = [d.doc_id for d in stored.get(suspects) if _text_of(d) in read_texts]
    return Changes(new, changed, tuple(left_over), len(documents) - len(new) - len(changed))


def _text_of(document: Document) -> tuple[object, DocId]:
    """Return which text a document is a chunk of: its file, and the id that the text has as one document.

    An id may end in ``#7`` by itself: the chunk's own number tells.
    """
    number = document.metadata.get("chunk")
    suffix = f"#{number}"
    name = document.doc_id.removesuffix(suffix) if number is not None else document.doc_id
    return document.metadata.get("source"), name


def _same(one: Document, other: Document) -> bool:
    return one.text == other.text and dict(one.metadata) == dict(other.metadata)
