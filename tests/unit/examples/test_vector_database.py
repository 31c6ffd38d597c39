"""A vector database as the retrieval service: stores are copied into it and searched in stages, by both frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from examples._shared import demo_documents, demo_questions
from examples.vector_database import copy_store
from ragcache_core import Document, DocumentStore, GrowingEffort, RetrievalUpdate, TfidfSvdEmbedder, pgvector_stages
from tests.support.postgres import pgvector_server

QUESTIONS = [question["question"] for question in demo_questions("single")[:5]]
DOCUMENTS = [
    Document(document.doc_id, document.text, {"half": i % 2, "title": document.doc_id.removesuffix(".md")})
    for i, document in enumerate(demo_documents())
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pgvector_server() as started:
        yield started


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentStore]:
    embedder = TfidfSvdEmbedder(64).fit([document.text for document in DOCUMENTS])
    folder = tmp_path_factory.mktemp("all") / "store"
    with DocumentStore.create(folder, embedder=embedder, index="flat", word_weight=0.0) as made:
        made.add(DOCUMENTS)
        yield made


@pytest.fixture
def table(address: str, tmp_path: Path, store: DocumentStore) -> Iterator[str]:
    """A table with the documents of two stores."""
    with psycopg.connect(address) as connection:
        for half in (0, 1):
            folder = tmp_path / f"half-{half}"
            with DocumentStore.create(folder, embedder=store.embedder, word_weight=0.0) as part:
                part.add([document for document in DOCUMENTS if document.metadata["half"] == half])
                assert copy_store(part, connection, "docs") == len(DOCUMENTS) // 2
        connection.commit()
        yield "docs"
        connection.execute("DROP TABLE docs")


def source_of(address: str, table: str, store: DocumentStore, **settings: Any) -> GrowingEffort[Any]:
    efforts = settings.pop("efforts", (5, "exact"))
    return pgvector_stages(
        lambda: psycopg.connect(address), table, store.embedder, efforts=efforts, metadata_column="metadata", **settings
    )


async def updates_of(source: GrowingEffort[Any], question: str, k: int) -> list[RetrievalUpdate]:
    return [update async for update in source.stages(question, k)]


async def test_copied_stores_are_searched_as_one_and_end_with_what_a_store_of_all_finds(
    address: str, table: str, store: DocumentStore
) -> None:
    source = source_of(address, table, store)
    for question in QUESTIONS:
        *_, last = await updates_of(source, question, 4)
        assert last.is_final
        assert last.documents == store.search(question, 4).documents


async def test_a_document_that_is_copied_again_is_replaced(
    address: str, table: str, store: DocumentStore, tmp_path: Path
) -> None:
    changed = Document(DOCUMENTS[0].doc_id, "Another text about Zebulon.", {"half": 7})
    with DocumentStore.create(tmp_path / "changed", embedder=store.embedder) as part:
        part.add([changed])
        with psycopg.connect(address) as connection:
            assert copy_store(part, connection, table) == 1
    everything = (await updates_of(source_of(address, table, store), changed.text, len(DOCUMENTS) + 9))[-1].documents
    assert len(everything) == len(DOCUMENTS)
    assert [document for document in everything if document.doc_id == changed.doc_id] == [changed]
