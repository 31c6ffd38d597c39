"""What a response of LlamaIndex's own query engines says of its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex

from ragcache_core.errors import RAGCacheError
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM, TfidfSvdEmbedding
from tests.support.scripted_server import Refusal, ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog

TEXTS = ["The lighthouse of Zor is kept by Mel Anvik.", "The sea around the cape is rough in winter."]
QUESTION = "Who keeps the lighthouse?"


@pytest.fixture
def index() -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        [LlamaDocument(text=text) for text in TEXTS], embed_model=TfidfSvdEmbedding(TEXTS, dimension=16)
    )


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
