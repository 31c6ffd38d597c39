"""A cache of answers in LlamaIndex's LLM: what it gives again, in every way to ask, and what it leaves alone."""

from __future__ import annotations

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex

from ragcache_core.client import Engine
from ragcache_integrations.llamaindex import (
    AnswerCache,
    CachedAnswerEvent,
    CacheStatsEventHandler,
    RAGCacheLLM,
    TfidfSvdEmbedding,
)
from tests.support.moons import NEAR, QUESTION, TEXTS
from tests.support.scripted_server import ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog

EMBEDDING = TfidfSvdEmbedding(list(TEXTS.values()), dimension=8)


@pytest.fixture
def answers() -> AnswerCache:
    return AnswerCache()


@pytest.fixture
def llm(engine: Engine, answers: AnswerCache) -> RAGCacheLLM:
    return RAGCacheLLM(engine, temperature=0, max_tokens=200, answer_cache=answers)


@pytest.fixture
def index() -> VectorStoreIndex:
    """An index in LlamaIndex's own store, with metadata that prompts show."""
    documents = [LlamaDocument(id_=name, text=text, metadata={"found": "long ago"}) for name, text in TEXTS.items()]
    return VectorStoreIndex.from_documents(documents, embed_model=EMBEDDING)


async def test_a_near_query_about_the_same_nodes_asks_no_engine(
    index: VectorStoreIndex, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=1)
    said = [str(query_engine.query(QUESTION)), str(await query_engine.aquery(NEAR)), str(query_engine.query(NEAR))]
    assert len(set(said)) == len(server.requests) == 1
    kept = event_log.of(CachedAnswerEvent)
    assert [event.question for event in kept] == [QUESTION] * 2
    assert all(0.92 <= event.similarity <= 1 for event in kept)
    handler = CacheStatsEventHandler()
    for event in event_log.events:
        handler.handle(event)
    assert (handler.summary().num_cached_answers, handler.summary().num_requests) == (2, 1)
    query_engine.query("Who found Ceres?")
    assert len(server.requests) == 2


def test_a_salt_of_the_llm_counts_beside_a_body_of_the_call(
    engine: Engine, answers: AnswerCache, server: ScriptedServer
) -> None:
    for salt in ("a", "b"):
        settings = {"extra_body": {"cache_salt": salt}}
        llm = RAGCacheLLM(engine, answer_cache=answers, additional_kwargs=settings)
        llm.complete(QUESTION, extra_body={"top_k": 1})
    assert [request.body["cache_salt"] for request in server.requests] == ["a", "b"]
