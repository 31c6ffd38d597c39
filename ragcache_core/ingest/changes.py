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
    read_texts = {_whole(doc_id) for doc_id in read_ids}
    stored_ids = set(stored.ids())
    before = {d.doc_id: d for d in stored.get([d.doc_id for d in documents if d.doc_id in stored_ids])}
    new = tuple(document for document in documents if document.doc_id not in stored_ids)
    changed = tuple(d for d in documents if d.doc_id in before and not _same(d, before[d.doc_id]))
    left_over = sorted(doc_id for doc_id in stored_ids - read_ids if _whole(doc_id) in read_texts)
    return Changes(new, changed, tuple(left_over), len(documents) - len(new) - len(changed))


def _whole(doc_id: DocId) -> DocId:
    """Return the id that the text of a chunk would have as one document."""
    return _CHUNK.sub("", doc_id)


def _same(one: Document, other: Document) -> bool:
    return one.text == other.text and dict(one.metadata) == dict(other.metadata)
