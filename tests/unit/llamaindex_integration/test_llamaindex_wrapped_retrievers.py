"""LlamaIndex's retrievers and query engines around ours and those of others: their nodes are known in the prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.tools import QueryEngineTool

from ragcache_core.client import Engine
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM, RAGCacheRetriever, TfidfSvdEmbedding
from tests.support.moons import QUESTION, TEXTS
from tests.support.scripted_server import Reply, ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog

pytestmark = pytest.mark.usefixtures("idle")

EMBEDDING = TfidfSvdEmbedding(list(TEXTS.values()), dimension=8)


@pytest.fixture(params=["ours", "others"])
def inner(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[BaseRetriever]:
    if request.param == "ours":
        with DocumentStore.create(tmp_path, embedder=EMBEDDING) as store:
            store.add([Document(doc_id, text) for doc_id, text in TEXTS.items()])
            yield RAGCacheRetriever(store, engine, similarity_top_k=2)
    else:
        documents = [LlamaDocument(id_=name, text=text) for name, text in TEXTS.items()]
        index = VectorStoreIndex.from_documents(documents, embed_model=EMBEDDING)
        yield index.as_retriever(similarity_top_k=2)


def named(log: EventLog) -> list[list[str]]:
    return [[d.doc_id for d in event.documents] for event in log.of(CacheStatsEvent)]


def tool_of(retriever: BaseRetriever, llm: RAGCacheLLM, name: str) -> QueryEngineTool:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
    return QueryEngineTool.from_defaults(engine, name=name, description=f"Knows {name}.")


@pytest.mark.parametrize("use_async", [False, True])
def test_nodes_that_are_fused_of_several_queries_are_known(
    use_async: bool, inner: BaseRetriever, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    server.script(Reply("Where are seas of methane?"))
    fusion = QueryFusionRetriever(
        [inner], llm=llm, num_queries=2, similarity_top_k=2, mode="reciprocal_rerank", use_async=use_async
    )
    response = RetrieverQueryEngine.from_args(fusion, llm=llm).query(QUESTION)
    found = [n.node.node_id for n in response.source_nodes]
    assert len(found) == 2
    assert named(event_log) == [[], found]


@pytest.mark.parametrize("use_async", [False, True])
def test_the_nodes_of_each_sub_question_are_known(
    use_async: bool, inner: BaseRetriever, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    asked = [QUESTION, "What is the largest moon of Jupiter?"]
    items = [{"sub_question": question, "tool_name": "moons"} for question in asked]
    server.script(Reply(json.dumps({"items": items})), Reply("Titan."), Reply("Ganymede."))
    engine = SubQuestionQueryEngine.from_defaults(
        [tool_of(inner, llm, "moons")],
        llm=llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        verbose=False,
        use_async=use_async,
    )
    engine.query("Which moons are these?")
    found = [[n.node.node_id for n in inner.retrieve(question)] for question in asked]
    questions, *sub, whole = named(event_log)
    assert (questions, whole) == ([], [])  # the last one makes nodes of the answers
    assert sorted(sub) == sorted(found)
