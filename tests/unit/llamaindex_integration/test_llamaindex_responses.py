"""What a response of LlamaIndex's own query engines says of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.llms.mock import MockLLM
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from ragcache_core.errors import RAGCacheError
from ragcache_integrations.llamaindex import (
    CacheStatsEvent,
    RAGCacheLLM,
    RAGCacheQueryEngine,
    RAGCacheRetriever,
    TfidfSvdEmbedding,
)
from tests.support.scripted_server import Refusal, ScriptedServer
from tests.support.scripted_source import ScriptedSource
from tests.unit.llamaindex_integration.conftest import EventLog

TEXTS = ["The lighthouse of Zor is kept by Mel Anvik.", "The sea around the cape is rough in winter."]
QUESTION = "Who keeps the lighthouse?"


@pytest.fixture
def index() -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        [LlamaDocument(text=text) for text in TEXTS], embed_model=TfidfSvdEmbedding(TEXTS, dimension=16)
    )


@pytest.fixture
def default_llm(llm: RAGCacheLLM) -> Iterator[RAGCacheLLM]:
    before = Settings._llm
    Settings.llm = llm
    yield llm
    Settings._llm = before


def told(response: Any) -> Any:
    return response.metadata["ragcache"]


async def test_the_statistics_are_in_the_metadata(
    index: VectorStoreIndex, llm: RAGCacheLLM, event_log: EventLog
) -> None:
    query_engine = index.as_query_engine(llm=llm)
    responses = [query_engine.query(QUESTION), await query_engine.aquery(QUESTION)]
    assert [told(response) for response in responses] == [e.stats.to_dict() for e in event_log.of(CacheStatsEvent)]
    assert told(responses[1])["num_cached_tokens"] > 0
    assert len(responses[0].metadata or ()) == 3  # with those of two nodes


async def test_a_stream_has_them_when_it_has_ended(
    index: VectorStoreIndex, llm: RAGCacheLLM, event_log: EventLog
) -> None:
    response: Any = index.as_query_engine(llm=llm, streaming=True).query(QUESTION)
    assert "ragcache" not in response.metadata
    assert "lighthouse" in "".join(response.response_gen)
    assert told(response) == event_log.of(CacheStatsEvent)[-1].stats.to_dict()

    response = await index.as_query_engine(llm=llm, streaming=True).aquery(QUESTION)
    assert "lighthouse" in "".join([text async for text in response.async_response_gen()])
    assert told(response) == event_log.of(CacheStatsEvent)[-1].stats.to_dict()


@pytest.mark.parametrize("mode", [ResponseMode.REFINE, ResponseMode.ACCUMULATE])
def test_several_requests_of_a_response_are_summed(llm: RAGCacheLLM, event_log: EventLog, mode: ResponseMode) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]
    response = get_response_synthesizer(llm=llm, response_mode=mode).synthesize(QUESTION, nodes)
    stats = [event.stats for event in event_log.of(CacheStatsEvent)]
    assert len(stats) == 2
    assert told(response)["num_prompt_tokens"] == sum(each.num_prompt_tokens for each in stats)
    assert told(response)["total_s"] == pytest.approx(sum(each.total_s for each in stats))


async def test_each_response_has_its_own(
    index: VectorStoreIndex, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    query_engine = index.as_query_engine(llm=llm)
    server.script(Refusal(400, "no"))
    with pytest.raises(RAGCacheError):
        query_engine.query(QUESTION)
    llm.complete("A request of no response " * 20)
    questions = ["Who?", "Who keeps the lighthouse of Zor, which stands on the cape?"]
    responses = await asyncio.gather(*map(query_engine.aquery, questions))
    other, *lengths = [event.num_prompt_tokens for event in event_log.of(CacheStatsEvent)]
    assert other not in lengths
    assert [told(response)["num_prompt_tokens"] for response in responses] == sorted(lengths)


async def test_a_query_engine_answers_with_the_default_llm(default_llm: RAGCacheLLM) -> None:
    retriever = RAGCacheRetriever(ScriptedSource([]), default_llm.engine)
    assert RAGCacheQueryEngine(retriever).llm is default_llm
    query_engine = RAGCacheQueryEngine.from_args(retriever, streaming=True)
    assert isinstance(query_engine, RAGCacheQueryEngine)
    assert query_engine.llm is default_llm
    other = MockLLM()
    assert RAGCacheQueryEngine.from_args(retriever, llm=other).llm is other
    assert RAGCacheQueryEngine.from_args(retriever, other).retriever is retriever
