"""What every source of stages promises, whatever finds the documents."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval import (
    DocumentStore,
    Embedder,
    GrowingEffort,
    StageSource,
    TfidfSvdEmbedder,
    as_source,
    lancedb_stages,
    one_stage,
    pgvector_stages,
    qdrant_stages,
)
from ragcache_core.retrieval.base import IndexKind
from ragcache_core.retrieval.remote.pgvector import PgvectorIndex
from ragcache_core.types import Document, RetrievalUpdate
from tests.support.postgres import pgvector_server

DOCUMENTS = [Document(f"doc-{i}", f"Person{i} keeps the lighthouse of Town{i % 7}.") for i in range(300)]
QUERY = "Who keeps the lighthouse of Town3?"


class OtherRetriever:
    """A retriever of another make: it only knows a list of documents."""

    async def find(self, k: int) -> list[Document]:
        await asyncio.sleep(0)  # it really waits
        return DOCUMENTS[:k]

    def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        return one_stage(lambda: self.find(k))


def growing(embedder: Embedder) -> StageSource:
    """Return stages of a search by words, whose effort is how many documents it looks at."""

    def find(vector: Any, k: int, effort: int) -> list[tuple[Document, float]]:
        rows = embedder.embed_documents([d.text for d in DOCUMENTS[:effort]])
        products = (rows @ vector).tolist()
        best = sorted(range(len(rows)), key=lambda i: -products[i])[:k]
        return [(DOCUMENTS[i], products[i]) for i in best]

    return GrowingEffort(find, (50, 300), embed=embedder.embed_query)


def qdrant(embedder: Embedder, stack: ExitStack) -> StageSource:
    qdrant_client = pytest.importorskip("qdrant_client")
    models = qdrant_client.models
    client = qdrant_client.QdrantClient(":memory:")
    stack.callback(client.close)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "Local mode")  # it is exact, and says so
    size = embedder.embed_query(QUERY).shape[0]
    client.create_collection("docs", vectors_config=models.VectorParams(size=size, distance=models.Distance.COSINE))
    rows = embedder.embed_documents([d.text for d in DOCUMENTS]).tolist()
    points = [
        models.PointStruct(id=i, vector=rows[i], payload={"page_content": d.text}) for i, d in enumerate(DOCUMENTS)
    ]
    client.upsert("docs", points)
    return qdrant_stages(client, "docs", embedder, efforts=(16, 128, "exact"))


def lancedb(embedder: Embedder, folder: Path) -> StageSource:
    database = pytest.importorskip("lancedb").connect(folder / "lance")
    rows = embedder.embed_documents([d.text for d in DOCUMENTS]).tolist()
    table = database.create_table(
        "docs", [{"id": d.doc_id, "text": d.text, "vector": row} for d, row in zip(DOCUMENTS, rows, strict=True)]
    )
    return lancedb_stages(table, embedder, efforts=(1, 20))


@pytest.fixture(scope="module")
def pgvector_address() -> Iterator[str]:
    with pgvector_server() as address:
        yield address


def pgvector(embedder: Embedder, address: str, index: PgvectorIndex) -> StageSource:
    import psycopg

    rows = embedder.embed_documents([d.text for d in DOCUMENTS]).tolist()
    with psycopg.connect(address) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS docs")
        cursor.execute(f"CREATE TABLE docs (id text, text text, town jsonb, embedding vector({len(rows[0])}))")
        table = [(d.doc_id, d.text, f'{{"town": {i % 7}}}', str(rows[i])) for i, d in enumerate(DOCUMENTS)]
        cursor.executemany("INSERT INTO docs VALUES (%s, %s, %s, %s)", table)
        lists = "WITH (lists = 10)" if index == "ivfflat" else ""
        cursor.execute(f"CREATE INDEX ON docs USING {index} (embedding vector_cosine_ops) {lists}".encode())
    efforts = (1, 10) if index == "ivfflat" else (4, 100, "exact")
    return pgvector_stages(lambda: psycopg.connect(address), "docs", embedder, index=index, efforts=efforts)


KINDS = [
    *("flat", "ivf", "hnsw", "cut", "other", "growing", "qdrant", "lancedb", "pgvector-hnsw", "pgvector-ivfflat"),
]


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StageSource]:
    embedder = TfidfSvdEmbedder(16).fit([d.text for d in DOCUMENTS])
    with ExitStack() as stack:

        def make(name: str, documents: list[Document], index: IndexKind = "flat") -> DocumentStore:
            store = DocumentStore.create(tmp_path / name, embedder=embedder, index=index)
            stack.enter_context(store).add(documents)
            return store

        def address() -> str:
            started: str = request.getfixturevalue("pgvector_address")
            return started

        kinds: dict[str, Callable[[], StageSource]] = {
            "cut": lambda: as_source(make("store", DOCUMENTS), stages=4),
            "other": lambda: as_source(OtherRetriever()),
            "growing": lambda: as_source(growing(embedder)),
            "qdrant": lambda: as_source(qdrant(embedder, stack)),
            "lancedb": lambda: as_source(lancedb(embedder, tmp_path)),
            "pgvector-hnsw": lambda: as_source(pgvector(embedder, address(), "hnsw")),
            "pgvector-ivfflat": lambda: as_source(pgvector(embedder, address(), "ivfflat")),
        }
        yield kinds.get(request.param, lambda: as_source(make("store", DOCUMENTS, request.param)))()


def test_the_last_update_and_no_other_is_final_and_stages_are_counted(source: StageSource) -> None:
    async def scenario() -> list[RetrievalUpdate]:
        return [update async for update in source.stages(QUERY, 4)]

    updates = asyncio.run(scenario())
    assert [u.is_final for u in updates] == [False] * (len(updates) - 1) + [True]
    assert [u.stage for u in updates] == list(range(len(updates)))
    assert len(updates[-1].documents) == 4
    for update in updates:
        assert len(update.scores) == len(update.documents) == len({d.doc_id for d in update.documents}) <= 4


def test_a_search_that_is_left_early_leaves_no_task(source: StageSource) -> None:
    async def scenario() -> None:
        async with aclosing(source.stages(QUERY, 4)) as updates:
            await anext(updates)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_two_searches_at_once_find_what_each_finds_alone(source: StageSource) -> None:
    async def last(query: str) -> RetrievalUpdate:
        return [update async for update in source.stages(query, 3)][-1]

    async def both() -> list[RetrievalUpdate]:
        return list(await asyncio.gather(last(QUERY), last("Person7")))

    together = asyncio.run(both())
    alone = [asyncio.run(last(QUERY)), asyncio.run(last("Person7"))]
    assert [u.documents for u in together] == [u.documents for u in alone]


def test_a_source_is_returned_as_it_is() -> None:
    retriever = OtherRetriever()
    assert as_source(retriever) is retriever


@pytest.mark.parametrize("other", ["a string", 3, None, DocumentStore, object()], ids=lambda it: type(it).__name__)
def test_what_has_no_stages_is_refused(other: object) -> None:
    with pytest.raises(ConfigError, match="is not a staged retriever: pass a DocumentStore"):
        as_source(other)


def test_pgvector_looks_at_as_much_as_it_is_asked_to_and_where_its_condition_holds(pgvector_address: str) -> None:
    import psycopg

    embedder = TfidfSvdEmbedder(16).fit([d.text for d in DOCUMENTS])
    pgvector(embedder, pgvector_address, "ivfflat")

    def found(**settings: Any) -> RetrievalUpdate:
        with psycopg.connect(pgvector_address, autocommit=True) as connection:
            connection.execute("SET enable_seqscan = off")  # so few rows are not worth an index to Postgres
            source = pgvector_stages(lambda: nullcontext(connection), "public.docs", embedder, **settings)
            updates = asyncio.run(_all(source.stages(QUERY, 60)))
            assert connection.execute("SHOW ivfflat.probes").fetchone() == ("1",)
        return updates[-1]

    few, all_of_them = found(index="ivfflat", efforts=(1,)), found(efforts=("exact",))
    assert len(few.documents) < 60 == len(all_of_them.documents)
    assert found(index="ivfflat", efforts=(10,)).documents == all_of_them.documents
    assert list(all_of_them.scores) == sorted(all_of_them.scores)
    asked = {"where": "(town->>'town')::int = %(town)s", "params": {"town": 3}, "metadata_column": "town"}
    of_town = found(efforts=("exact",), **asked)
    assert {document.metadata["town"] for document in of_town.documents} == {3}
    assert len(of_town.documents) == 43


async def _all(updates: AsyncGenerator[RetrievalUpdate, None]) -> list[RetrievalUpdate]:
    return [update async for update in updates]
