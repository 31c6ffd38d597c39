"""A store tells engines of documents that change or go, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from ragcache_core.errors import StoreError, UnknownDocumentError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import DocId, Document

from .conftest import make_documents


class Recording:
    """An engine that notes what it is told, and what the store said then."""

    def __init__(self, store: DocumentStore) -> None:
        self.store = store
        self.told: list[tuple[str, list[str]]] = []
        self.prompts: list[Any] = []

    def forget(self, doc_ids: Iterable[DocId]) -> None:
        self.told.append(("forget", list(doc_ids)))

    def warm(self, documents: Iterable[Document], prompt: Callable[[Document], Any] | None = None) -> None:
        given = list(documents)
        assert self.store.get([document.doc_id for document in given]) == given, "the change is there before"
        self.told.append(("warm", [document.doc_id for document in given]))
        self.prompts += [prompt and prompt(document) for document in given]


def test_what_is_replaced_or_deleted_is_forgotten_and_what_is_new_or_unchanged_is_not(store: DocumentStore) -> None:
    engine = Recording(store)
    store.bind(engine)
    first, second, *_ = store.get(["doc-0", "doc-1"])
    store.add(make_documents(1, first=30))
    store.put([first])
    assert engine.told == []
    store.put([replace(first, text="Another text."), second, *make_documents(1, first=31)])
    store.replace(replace(second, metadata={"town": "elsewhere"}))  # a prompt may show it
    store.delete(["doc-2", "doc-3"])
    assert engine.told == [("forget", ["doc-0"]), ("forget", ["doc-1"]), ("forget", ["doc-2", "doc-3"])]


def test_new_versions_are_prefilled_where_that_is_requested(store: DocumentStore) -> None:
    plain, own = Recording(store), Recording(store)
    store.bind(plain, warm=True)
    store.bind(own, warm=lambda document: f"about {document.text}")
    store.replace(Document("doc-0", "A new text."))
    store.delete("doc-1")
    assert plain.told == own.told == [("forget", ["doc-0"]), ("warm", ["doc-0"]), ("forget", ["doc-1"])]
    assert (plain.prompts, own.prompts) == ([None], ["about A new text."])
    store.unbind(plain)
    store.delete("doc-2")
    assert len(plain.told) == 3
    assert own.told[-1] == ("forget", ["doc-2"])


def test_an_engine_that_fails_undoes_no_change_and_a_change_that_fails_is_not_told(store: DocumentStore) -> None:
    class Gone(Recording):
        def forget(self, doc_ids: Iterable[DocId]) -> None:
            raise ConnectionError("the engine is away")

    engine = Recording(store)
    store.bind(engine)
    store.bind(Gone(store))
    with pytest.raises(ConnectionError, match="away"):
        store.delete(["doc-0"])
    assert "doc-0" not in store
    assert engine.told == [("forget", ["doc-0"])]
    with pytest.raises(UnknownDocumentError):
        store.delete(["doc-1", "absent"])
    assert engine.told == [("forget", ["doc-0"])]
    store.close()
    with pytest.raises(StoreError):
        store.bind(engine)
