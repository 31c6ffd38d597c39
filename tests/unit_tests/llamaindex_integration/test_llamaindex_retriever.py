"""RAGCacheRetriever over document stores and vector stores: nodes, stages, events, and what the engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import (
    RAGCacheLLM,
    RAGCacheQueryEngine,
    RAGCacheRetriever,
    RetrievalStageEvent,
    StagedFAISSVectorStore,
    TfidfSvdEmbedding,
)
from tests.scripted_server import ScriptedServer
from tests.unit_tests.llamaindex_integration.conftest import EventLog

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


async def test_retrieves_the_nearest_documents_as_nodes(store: DocumentStore) -> None:
    first, second = await both_ways(RAGCacheRetriever(store), "Who is a pilot born in Nalna?")
    assert (first.node.node_id, first.node.get_content()) == ("mel", TEXTS["mel"])
    assert first.node.metadata == {"page": 1}
    assert first.score is not None
    assert second.score is not None
    assert first.score > second.score
    assert store.search("Who is a pilot born in Nalna?", 2).scores == (first.score, second.score)


async def test_fewer_documents_than_asked_for_are_all_returned(store: DocumentStore, tmp_path: Path) -> None:
    assert len(await both_ways(RAGCacheRetriever(store, similarity_top_k=10), "sea")) == 3
    with DocumentStore.create(tmp_path / "empty") as empty:
        assert await both_ways(RAGCacheRetriever(empty), "sea") == []


def test_impossible_settings_and_questions_say_why(store: DocumentStore) -> None:
    with pytest.raises(ConfigError, match="similarity_top_k is 0"):
        RAGCacheRetriever(store, similarity_top_k=0)
    with pytest.raises(SearchError, match="ask something"):
        RAGCacheRetriever(store).retrieve(" ")
    with pytest.raises(SearchError, match="stages"):
        RAGCacheRetriever(store, stages=(0.5, 0.2)).retrieve("sea")


async def test_every_stage_is_published(tmp_path: Path, event_log: EventLog) -> None:
    rng = np.random.default_rng(0)
    with DocumentStore.create(
        tmp_path / "big", index="flat", embedder=TfidfSvdEmbedding(list(TEXTS.values()))
    ) as store:
        vectors = rng.standard_normal((4000, 128)).astype(np.float32)
        store.add([Document(f"d{i}", f"document {i}") for i in range(4000)], embeddings=vectors)
        retriever = RAGCacheRetriever(store, similarity_top_k=5, stages=4)
        for is_async in (False, True):
            event_log.events.clear()
            query = QueryBundle("which?", embedding=vectors[17].tolist())
            nodes = await retriever.aretrieve(query) if is_async else retriever.retrieve(query)
            stages = event_log.of(RetrievalStageEvent)
            assert [e.stage for e in stages] == [0, 1, 2, 3]
            assert [e.is_final for e in stages] == [False, False, False, True]
            assert all(len(e.document_ids) == len(e.scores) <= 5 and e.query == "which?" for e in stages)
            assert list(stages[-1].document_ids) == [n.node.node_id for n in nodes]
            assert nodes[0].node.node_id == "d17"
            assert len({e.span_id for e in stages}) == 1
            assert stages[0].span_id is not None
            (start,), (end,) = event_log.of(RetrievalStartEvent), event_log.of(RetrievalEndEvent)
            order = [event_log.events.index(e) for e in (start, *stages, end)]
            assert order == sorted(order)


def test_engine_recognises_what_was_retrieved(
    store: DocumentStore, scripted: Engine, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    nodes = RAGCacheRetriever(store, scripted).retrieve("Who is a pilot born in Nalna?")
    llm.complete(f"{nodes[0].node.get_content()} {nodes[1].node.get_content()} So who is a pilot?")
    assert [d["id"] for d in server.requests[-1].documents] == [n.node.node_id for n in nodes]


def test_engine_recognises_documents_in_llamaindexes_own_query_engine(
    store: DocumentStore, scripted: Engine, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    retriever = RAGCacheRetriever(store, scripted, similarity_top_k=3)
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=ResponseMode.COMPACT)
    engine.query("Who is a pilot?")
    (request,) = server.requests
    assert {d["id"] for d in request.documents} == set(TEXTS)


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
