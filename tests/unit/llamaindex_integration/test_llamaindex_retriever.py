"""RAGCacheRetriever over document stores and vector stores: nodes, stages, events, and what the engine is told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval import MMR, DocumentStore
from ragcache_core.types import Document, RetrievalUpdate
from ragcache_integrations.llamaindex import (
    RAGCacheLLM,
    RAGCacheQueryEngine,
    RAGCacheRetriever,
    StagedFAISSVectorStore,
    TfidfSvdEmbedding,
)
from tests.support.scripted_source import ScriptedSource

TEXTS = {
    "zor": "The lighthouse of Zor is kept by Mel Anvik since the great flood came over the northern cape.",
    "mel": "Mel Anvik is a pilot who was born in Nalna and keeps birds on the roof of the old harbour house.",
    "sea": "The sea around the cape is rough in winter and no boat leaves the harbour before the month of May.",
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store", metric="ip") as store:
        store.add(Document(name, text, {"page": i}) for i, (name, text) in enumerate(TEXTS.items()))
        yield store


async def both_ways(retriever: RAGCacheRetriever, query: str | QueryBundle) -> list[NodeWithScore]:
    """Return the retrieved nodes; sync (also under a running loop) and async find the same."""
    nodes = await retriever.aretrieve(query)
    assert retriever.retrieve(query) == nodes
    assert await asyncio.to_thread(retriever.retrieve, query) == nodes
    return nodes


async def test_filters_select_the_found_nodes(store: DocumentStore) -> None:
    last = MetadataFilters(filters=[MetadataFilter(key="page", operator=FilterOperator.GT, value=1)])
    for query in ("Who is a pilot?", QueryBundle("Who?", embedding=store.embedder.embed_query("pilot").tolist())):
        retriever = RAGCacheRetriever(store, filters=last, similarity_top_k=3)
        assert [n.node.node_id for n in await both_ways(retriever, query)] == ["sea"]
    with pytest.raises(ConfigError, match="ScriptedSource.* is no store"):
        RAGCacheRetriever(ScriptedSource(()), filters=last)
    (best,) = await both_ways(RAGCacheRetriever(store, mmr=MMR(fetch_k=1), similarity_top_k=1), "Who is a pilot?")
    assert best.node.node_id == "mel"
    with pytest.raises(ConfigError, match="mmr is given, but ScriptedSource.* is no store"):
        RAGCacheRetriever(ScriptedSource(()), mmr=MMR())
    with pytest.raises(ConfigError, match="pass LlamaIndex's MetadataFilters"):
        RAGCacheRetriever(store, filters={"page": 1})


async def test_nodes_that_llamaindex_embedded_are_found_with_its_model(tmp_path: Path, llm: RAGCacheLLM) -> None:
    embed_model = TfidfSvdEmbedding(list(TEXTS.values()), dimension=16)
    vector_store = StagedFAISSVectorStore(tmp_path / "store")
    VectorStoreIndex(
        [TextNode(id_=name, text=text, metadata={"kind": "x"}) for name, text in TEXTS.items()],
        storage_context=StorageContext.from_defaults(vector_store=vector_store),
        embed_model=embed_model,
    )
    retriever = RAGCacheRetriever(vector_store, embed_model=embed_model)
    nodes = await both_ways(retriever, "Who is a pilot born in Nalna?")
    assert nodes[0].node.node_id == "mel"
    assert nodes[0].node.metadata == {"kind": "x"}
    with pytest.raises(ConfigError, match="embed_model"):
        RAGCacheRetriever(vector_store).retrieve("pilot")
    response = await RAGCacheQueryEngine(retriever, llm).aquery("Who is a pilot born in Nalna?")
    assert "Document: kind: x\n\nMel Anvik is a pilot" in str(response)
    vector_store.close()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [((0.0, 1.0), [1.0, 0.5]), ((3.0, 2.0), [3.0, 2.0]), ((math.nan, math.nan), [None, None]), ((), [None, None])],
)
async def test_any_source_of_stages_is_searched_and_its_scores_grow_with_nearness(
    scores: tuple[float, ...], expected: list[float | None]
) -> None:
    class Source:
        async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
            yield RetrievalUpdate((Document("a", query), Document("b", str(k))), scores, 0, is_final=True)

    nodes = await both_ways(RAGCacheRetriever(Source(), similarity_top_k=7), "Who?")
    assert [n.node.get_content() for n in nodes] == ["Who?", "7"]
    assert [n.score for n in nodes] == expected


pytestmark = pytest.mark.usefixtures("idle")
