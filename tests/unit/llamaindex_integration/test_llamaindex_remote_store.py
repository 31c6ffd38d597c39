"""A store that is served elsewhere, wherever LlamaIndex's side takes a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery

from ragcache_core.errors import ConfigError, StoreError
from ragcache_core.retrieval import MMR, DocumentStore, PrecomputedEmbedder, RemoteStore, StoreService, TfidfSvdEmbedder
from ragcache_integrations.llamaindex import RAGCacheRetriever, StagedFAISSVectorStore

TEXTS = ["The sun is a star.", "The moon is a moon.", "Mars is a red planet.", "A star shines in the night."]
QUESTION = "Which star shines?"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store", embedder=TfidfSvdEmbedder(), index="flat", metric="ip") as store:
        StagedFAISSVectorStore(store).add(
            [TextNode(id_="abcd"[i], text=text, metadata={"n": i}) for i, text in enumerate(TEXTS)]
        )
        yield store


@pytest.fixture
def remote(local: DocumentStore) -> Iterator[RemoteStore]:
    with StoreService(local) as service, RemoteStore(service.url) as store:
        yield store


async def test_a_retriever_returns_what_it_returns_of_the_store_itself(
    local: DocumentStore, remote: RemoteStore
) -> None:
    filters = MetadataFilters(filters=[MetadataFilter(key="n", value=1, operator=">=")])
    for settings in ({}, {"filters": filters}, {"mmr": MMR(4, 0.2)}, {"similarity_top_k": 99}):
        here, there = (RAGCacheRetriever(store, **settings) for store in (local, remote))
        assert there.retrieve(QUESTION) == here.retrieve(QUESTION)
        assert await there.aretrieve(QUESTION) == await here.aretrieve(QUESTION)


async def test_a_vector_store_over_a_service_reads_and_does_not_change(
    local: DocumentStore, remote: RemoteStore
) -> None:
    here, there = StagedFAISSVectorStore(local), StagedFAISSVectorStore(remote)
    for query in (
        VectorStoreQuery(query_str=QUESTION, similarity_top_k=3),
        VectorStoreQuery(query_embedding=local.embedder.embed_query(QUESTION).tolist(), similarity_top_k=3),
    ):
        assert there.query(query) == here.query(query)
        assert await there.aquery(query) == await here.aquery(query)
    assert there.get_nodes(["b", "a"]) == here.get_nodes(["b", "a"])
    assert there.get_nodes() == here.get_nodes()
    with pytest.raises(StoreError, match="is only read"):
        there.add([TextNode(text="new")])
    with pytest.raises(StoreError, match="is only read"):
        there.clear()
    there.close()  # the store stays its owner's
    assert len(remote.search(QUESTION, 1).documents) == 1


def test_a_service_whose_store_embeds_nothing_says_so_with_its_address(tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path / "vectors", embedder=PrecomputedEmbedder(), index="flat") as store:
        StagedFAISSVectorStore(store).add([TextNode(text="a", embedding=[1.0, 0.0])])
        with StoreService(store) as service, RemoteStore(service.url) as remote:
            with pytest.raises(ConfigError, match=f"{service.url} cannot embed a query"):
                RAGCacheRetriever(remote).retrieve(QUESTION)
