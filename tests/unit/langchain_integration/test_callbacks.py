import asyncio
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessageChunk

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.errors import RAGCacheError
from ragcache_core.sim.traces.trace import read_trace
from ragcache_integrations.langchain import CacheStatsCallbackHandler, CacheSummary, ChatRAGCache, TraceCallbackHandler
from tests.support.scripted_server import THREE_TIERS, Refusal, ScriptedServer

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
QUESTIONS = [f"{SUN.text} What is planet number {i}?" for i in range(8)]


def config(*handlers: CacheStatsCallbackHandler) -> Any:
    return {"callbacks": list(handlers)}


def test_the_usage_handler_of_langchain_sums_cached_tokens(llm: ChatRAGCache) -> None:
    handler, usage = CacheStatsCallbackHandler(), UsageMetadataCallbackHandler()
    llm.invoke(QUESTIONS[0], {"callbacks": [handler, usage]})
    list(llm.stream(QUESTIONS[1], {"callbacks": [handler, usage]}))
    summed = usage.usage_metadata["scripted-model"]
    assert summed["input_token_details"]["cache_read"] == handler.summary().num_cached_tokens > 0
    assert summed["input_tokens"] == handler.summary().num_prompt_tokens


def test_one_handler_may_be_shared_by_threads_and_event_loops(llm: ChatRAGCache) -> None:
    handler = CacheStatsCallbackHandler()

    def ask(i: int) -> object:
        if i % 2:
            return asyncio.run(llm.ainvoke("hello", config(handler)))
        return llm.invoke("hello", config(handler))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    assert handler.summary().num_requests == 24


def test_failed_and_closed_runs_are_counted_apart(llm: ChatRAGCache, server: ScriptedServer) -> None:
    handler = CacheStatsCallbackHandler()
    server.script(Refusal(400, "no"))
    with pytest.raises(RAGCacheError):
        llm.invoke("hello", config(handler))
    chunks = cast("Generator[AIMessageChunk]", llm.stream("one two three four five", config(handler)))
    next(chunks)
    chunks.close()

    assert handler.summary() == CacheSummary(num_unfinished=2)


async def test_answers_of_langchains_own_cache_are_no_requests(
    engine: Engine, server: ScriptedServer, tmp_path: Path
) -> None:
    server.cache = THREE_TIERS
    llm, handler = ChatRAGCache(engine=engine, cache=InMemoryCache()), CacheStatsCallbackHandler()
    with TraceCallbackHandler(tmp_path / "mine.jsonl") as recording:
        asked: Any = {"callbacks": [handler, recording]}
        first = llm.invoke(QUESTIONS[0], asked)
        again = [llm.invoke(QUESTIONS[0], asked), await llm.ainvoke(QUESTIONS[0], asked)]
    summary = handler.summary()
    assert (summary.num_requests, summary.num_cached_answers, summary.num_unfinished) == (1, 2, 0)
    assert len(summary.ttft_s) == 1
    assert len(list(read_trace(tmp_path / "mine.jsonl"))) == 1
    assert "answer_cache" not in cast("Any", first.response_metadata["ragcache"])
    for each in again:
        assert each.content == first.content
        assert each.response_metadata["ragcache"] == {"answer_cache": {"question": None, "similarity": 1.0}}
