"""Search and answer at the same time on the real engine: the same tokens, earlier, and nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever
from tests.engine.search_scene import QUESTION, SlowSource, becomes_idle, documents
from tests.support.waiting import until


@pytest.fixture
def llm(engine: Engine) -> RAGCacheLLM:
    return RAGCacheLLM(engine, temperature=0, max_tokens=16)


def query_engine(llm: RAGCacheLLM, *found: tuple[Document, ...], **settings: Any) -> RAGCacheQueryEngine:
    return RAGCacheQueryEngine(RAGCacheRetriever(SlowSource(found), llm.engine), llm, **settings)


async def answer(how: str, llm: RAGCacheLLM, *found: tuple[Document, ...]) -> tuple[str, dict[str, Any]]:
    asked = query_engine(llm, *found, streaming="stream" in how)
    match how:
        case "query" | "stream_query":
            response: Any = await asyncio.to_thread(asked.query, QUESTION)
        case "aquery" | "astream_query":
            response = await asked.aquery(QUESTION)
        case _:
            response = (await QueryEngineTool.from_defaults(asked, name="search").acall(QUESTION)).raw_output
    if isinstance(response, StreamingResponse):
        response = await asyncio.to_thread(response.get_response)
    elif isinstance(response, AsyncStreamingResponse):
        response = await response.get_response()
    return str(response), response.metadata


@pytest.mark.parametrize("how", ["query", "aquery", "stream_query", "astream_query", "tool"])
async def test_the_answer_is_under_way_before_the_search_has_ended(how: str, engine: Engine, llm: RAGCacheLLM) -> None:
    wrong, right = documents(2), documents(3)
    before = engine.stats()
    text, metadata = await answer(how, llm, wrong, right, right)
    report = metadata["ragcache"]["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 1, True)
    assert report["search_s"] > 1.0
    assert 0 <= report["hidden_search_s"] < report["search_s"]
    assert becomes_idle(engine)
    assert until(lambda: engine.stats().num_confirmed_speculations == before.num_confirmed_speculations + 1)
    plain, told = await answer(how, llm, right)
    assert text == plain != ""
    assert metadata["ragcache"]["num_prompt_tokens"] == told["ragcache"]["num_prompt_tokens"]
    assert told["ragcache"]["pipeline"]["num_started"] == 0
    assert engine.stats().num_speculative_requests == before.num_speculative_requests + 2


@pytest.mark.alone
async def test_what_the_engine_did_during_the_search_is_told_as_hidden(engine: Engine, llm: RAGCacheLLM) -> None:
    right = documents(3)
    _, metadata = await answer("astream_query", llm, right, right, right)
    assert metadata["ragcache"]["pipeline"]["hidden_search_s"] > 0.3


async def test_candidates_that_never_settle_change_nothing(engine: Engine, llm: RAGCacheLLM) -> None:
    right = documents(3)
    text, metadata = await answer("astream_query", llm, documents(2), documents(2), right)
    report = metadata["ragcache"]["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 2, False)
    assert report["hidden_search_s"] == 0
    assert text == (await answer("astream_query", llm, right))[0]
    assert becomes_idle(engine)


async def test_two_steps_find_their_documents_prefilled(engine: Engine, llm: RAGCacheLLM) -> None:
    engine.bind_prompt(PromptLayout())
    right = documents(3)
    asked = query_engine(llm, right, right)
    nodes = await asked.aretrieve(QueryBundle(QUESTION))
    response = await asked.asynthesize(QUESTION, nodes)
    assert response.metadata is not None
    stats = response.metadata["ragcache"]
    assert stats["num_cached_tokens"] > 0.8 * stats["num_prompt_tokens"]


async def test_leaving_leaves_no_request(engine: Engine) -> None:
    endless = RAGCacheLLM(
        engine, max_tokens=1500, temperature=0, additional_kwargs={"extra_body": {"ignore_eos": True}}
    )
    right = documents(2)
    response = await query_engine(endless, right, right, streaming=True).aquery(QUESTION)
    assert isinstance(response, AsyncStreamingResponse)
    await anext(response.response_gen)
    await response.response_gen.aclose()
    assert await asyncio.to_thread(becomes_idle, engine)

    task = asyncio.ensure_future(query_engine(endless, right, right, right).aquery(QUESTION))
    await asyncio.sleep(0.3)  # in the middle of the search
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(becomes_idle, engine)
