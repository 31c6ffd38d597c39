"""What reading a directory again means for a store: which documents are new, changed, unchanged or left over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.types import DocId, Document


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

    ``left_over`` are stored documents that the same files do not hold any more: chunks of a text that is cut
    differently now, a row that was taken out of a table.
    """

    new: tuple[Document, ...]
    changed: tuple[Document, ...]
    left_over: tuple[DocId, ...]
    num_unchanged: int

    @property
    def replaced(self) -> tuple[DocId, ...]:
        """Ids in the store that an update takes out."""
        return (*(document.doc_id for document in self.changed), *self.left_over)


def compare(documents: Iterable[Document], stored: StoredDocuments, former: Collection[DocId] = ()) -> Changes:
    """Return what ``documents`` change in a store; ``former`` are those that came out of the same files before.

    Stored documents of other files are none of their business.
    """
    documents = tuple(documents)
    read_ids = {document.doc_id for document in documents}
    stored_ids = set(stored.ids())
    before = {d.doc_id: d for d in stored.get([d.doc_id for d in documents if d.doc_id in stored_ids])}
    new = tuple(document for document in documents if document.doc_id not in stored_ids)
    changed = tuple(d for d in documents if d.doc_id in before and not _same(d, before[d.doc_id]))
    left_over = tuple(sorted((stored_ids & set(former)) - read_ids))
    return Changes(new, changed, left_over, len(documents) - len(new) - len(changed))


def _same(one: Document, other: Document) -> bool:
    return one.text == other.text and dict(one.metadata) == dict(other.metadata)
