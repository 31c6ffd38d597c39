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


def chunk(doc_id: str, text: str, number: int) -> Document:
    """Return a chunk as the reader makes it."""
    return Document(doc_id, text, {"source": doc_id.partition("#")[0], "chunk": number})


def test_new_changed_and_unchanged_documents_are_told_apart() -> None:
    stored = Stored(Document("a.md", "one"), Document("b.md", "two"), Document("c.md", "three", {"title": "old"}))
    read = [Document("a.md", "one"), Document("b.md", "TWO"), Document("c.md", "three", {"title": "new"})]
    read.append(Document("d.md", "four"))
    changes = compare(read, stored)
    assert changes.new == (read[3],)
    assert changes.changed == (read[1], read[2])
    assert changes.num_unchanged == 1
    assert changes.left_over == ()


def test_a_text_that_is_cut_differently_leaves_its_former_chunks_over() -> None:
    stored = Stored(chunk("a.md#0", "one", 0), chunk("a.md#1", "two", 1), chunk("b.md", "three", 0))
    changes = compare([chunk("a.md", "one", 0), chunk("b.md#0", "three", 0), chunk("b.md#1", "four", 1)], stored)
    assert changes.left_over == ("a.md#0", "a.md#1", "b.md")
    assert changes.replaced == changes.left_over
    assert [d.doc_id for d in changes.new] == ["a.md", "b.md#0", "b.md#1"]


def test_records_whose_own_ids_look_like_chunks_are_left_alone() -> None:
    stored = Stored(Document("repo#12", "one", {"source": "a.jsonl", "chunk": 0}))
    changes = compare([Document("repo#13", "two", {"source": "b.jsonl", "chunk": 0})], stored)
    assert changes.replaced == ()
    same_file = Document("repo#13", "two", {"source": "a.jsonl", "chunk": 0})
    assert compare([same_file], stored).replaced == ()


def test_documents_of_other_files_are_left_alone() -> None:
    stored = Stored(Document("gone.md", "one"), Document("gone.md#3", "one"), Document("faq-7", "seven"))
    changes = compare([Document("a.md", "one")], stored)
    assert changes.left_over == ()
    assert changes.replaced == ()


def test_an_empty_store_makes_everything_new() -> None:
    documents = (Document("a.md", "one"), Document("b.md", "two"))
    assert compare(documents, Stored()).new == documents
