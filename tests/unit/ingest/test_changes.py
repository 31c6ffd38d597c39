from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.ingest import compare
from ragcache_core.types import Document


class Stored:
    """Documents in memory, as ``compare`` wants them."""

    def __init__(self, *documents: Document) -> None:
        self.documents = {document.doc_id: document for document in documents}

    def ids(self) -> list[str]:
        return list(self.documents)

    def get(self, doc_ids: Sequence[str]) -> list[Document]:
        return [self.documents[doc_id] for doc_id in doc_ids]


def test_new_changed_and_unchanged_documents_are_distinguished() -> None:
    stored = Stored(Document("a.md", "one"), Document("b.md", "two"), Document("c.md", "three", {"title": "old"}))
    read = [Document("a.md", "one"), Document("b.md", "TWO"), Document("c.md", "three", {"title": "new"})]
    read.append(Document("d.md", "four"))
    changes = compare(read, stored)
    assert changes.new == (read[3],)
    assert changes.changed == (read[1], read[2])
    assert changes.num_unchanged == 1
    assert changes.left_over == ()


def test_what_the_same_files_do_not_hold_any_more_is_left_over() -> None:
    stored = Stored(*(Document(doc_id, "one") for doc_id in ("a.md#0", "a.md#1", "b.md", "other.md")))
    read = [Document("a.md", "one"), Document("b.md", "one")]
    changes = compare(read, stored, former=["a.md#0", "a.md#1", "b.md", "deleted meanwhile"])
    assert changes.left_over == ("a.md#0", "a.md#1")
    assert changes.replaced == changes.left_over
    assert [d.doc_id for d in changes.new] == ["a.md"]


def test_documents_of_other_files_are_left_alone() -> None:
    stored = Stored(Document("gone.md", "one"), Document("a.md#3", "one"), Document("faq-7", "seven"))
    changes = compare([Document("a.md", "one")], stored)
    assert changes.replaced == ()
