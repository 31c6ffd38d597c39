"""Search and answer at the same time on the real engine: the same tokens, earlier, and nothing left behind."""

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnablePassthrough

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    SpeculativeRAG,
    format_documents,
    prompt_from_layout,
)
from tests.engine.search_scene import QUESTION, SlowSource, becomes_idle, documents
from tests.support.traced import Traced, traced

__all__ = ["traced"]


@pytest.fixture
def llm(engine: Engine) -> ChatRAGCache:
    return ChatRAGCache(engine=engine, max_tokens=16, temperature=0)


def rag_over(engine: Engine, llm: ChatRAGCache, *found: tuple[Document, ...]) -> SpeculativeRAG:
    retriever = RAGCacheRetriever(store=SlowSource(found), engine=engine)
    return SpeculativeRAG(retriever=retriever, prompt=prompt_from_layout(), llm=llm)


def chain_over(engine: Engine, llm: ChatRAGCache, *found: tuple[Document, ...]) -> Runnable[str, AIMessage]:
    retriever = RAGCacheRetriever(store=SlowSource(found), engine=engine)
    return {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt_from_layout() | llm


def merged(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


async def answer(rag: Runnable[str, AIMessage], way: str) -> AIMessage:
    match way:
        case "invoke":
            return await asyncio.to_thread(rag.invoke, QUESTION)
        case "ainvoke":
            return await rag.ainvoke(QUESTION)
        case "stream":
            return merged(await asyncio.to_thread(lambda: list(rag.stream(QUESTION))))
        case _:
            return merged([chunk async for chunk in rag.astream(QUESTION)])


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_the_answer_is_under_way_before_the_search_has_ended(way: str, engine: Engine, llm: ChatRAGCache) -> None:
    wrong, right = documents(2), documents(3)
    before = engine.stats()
    said = await answer(rag_over(engine, llm, wrong, right, right), way)
    report = said.response_metadata["ragcache"]["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 1, True)
    assert report["search_s"] > 1.0
    assert 0 <= report["hidden_search_s"] < report["search_s"]
    usage = said.usage_metadata
    assert usage is not None
    plain = await answer(chain_over(engine, llm, right), way)
    assert said.content == plain.content != ""
    assert plain.usage_metadata is not None
    assert usage["input_tokens"] == plain.usage_metadata["input_tokens"]
    after = engine.stats()  # counted in the engine's next step: the plain request made it take one
    assert after.num_speculative_requests == before.num_speculative_requests + 2
    assert after.num_confirmed_speculations == before.num_confirmed_speculations + 1
    assert becomes_idle(engine)


async def test_the_trace_has_the_engines_phases_below_what_was_asked_ahead(
    engine: Engine, llm: ChatRAGCache, traced: Traced
) -> None:
    wrong, right = documents(2), documents(3)
    with traced.tracer.start_as_current_span("application"):
        said = await answer(rag_over(engine, llm, wrong, right, right), "ainvoke")
    stats = said.response_metadata["ragcache"]
    cancelled, confirmed = await asyncio.to_thread(traced.await_spans, "ragcache.speculation", 2)
    outcomes = [(span.attributes or {})["ragcache.speculation.outcome"] for span in (cancelled, confirmed)]
    assert outcomes in (["cancelled", "confirmed"], ["unused", "confirmed"]), "it may have ended before"
    assert traced.tree(confirmed) == {"ragcache.queue": {}, "ragcache.prefill": {}}
    assert list(traced.tree()["application"]) == ["ragcache.search", f"chat {engine.model}"]  # type: ignore[call-overload]  # a tree is of trees
    (queue,), (prefill,) = traced.named("ragcache.queue"), traced.named("ragcache.prefill")
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(stats["queue_s"] * 1e9, abs=1e3)
    assert (prefill.attributes or {})["ragcache.computed_tokens"] == stats["num_computed_tokens"]
    assert confirmed.start_time == queue.start_time <= queue.end_time == prefill.start_time < prefill.end_time
    assert prefill.end_time <= confirmed.end_time
    assert right[0].text not in traced.texts()
    assert becomes_idle(engine)


@pytest.mark.alone
async def test_what_the_engine_did_during_the_search_is_told_as_hidden(engine: Engine, llm: ChatRAGCache) -> None:
    for _ in range(3):  # a busy engine may tell too late when it began
        found = documents(3)
        said = await answer(rag_over(engine, llm, found, found, found), "astream")
        hidden_s = said.response_metadata["ragcache"]["pipeline"]["hidden_search_s"]
        if hidden_s > 0.5:
            return
    pytest.fail(f"{hidden_s:.3f} s of 1.0 s were hidden")


async def test_candidates_that_never_settle_change_nothing(engine: Engine, llm: ChatRAGCache) -> None:
    right = documents(3)
    said = await answer(rag_over(engine, llm, documents(2), documents(2), right), "astream")
    report = said.response_metadata["ragcache"]["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 2, False)
    assert report["hidden_search_s"] == 0
    plain = await answer(chain_over(engine, llm, right), "astream")
    assert said.content == plain.content
    assert becomes_idle(engine)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["bound", "learned"])
async def test_an_ordinary_chain_finds_its_documents_prefilled(
    how: str, engine: Engine, llm: ChatRAGCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "bound":
        engine.bind_prompt(prompt_from_layout(), format_documents)
    else:
        monkeypatch.setattr(engine.integration.prompts, "_bound", None)
        await answer(chain_over(engine, llm, documents(3)), "ainvoke")
    right, handler = documents(3), CacheStatsCallbackHandler()
    chain = chain_over(engine, llm, right, right)
    await (chain | StrOutputParser()).ainvoke(QUESTION, {"callbacks": [handler]})
    ((_, stats),) = handler.runs
    assert handler.summary().num_confirmed_speculations == 1
    assert handler.summary().hidden_search_s > 0.3
    assert stats.num_cached_tokens > 0.8 * stats.num_prompt_tokens


async def test_leaving_the_stream_leaves_no_request(engine: Engine) -> None:
    llm = ChatRAGCache(engine=engine, max_tokens=1500, temperature=0, extra_body={"ignore_eos": True})
    right = documents(2)
    chunks = rag_over(engine, llm, right, right).astream(QUESTION)
    async for chunk in chunks:
        if chunk.content:
            break
    await chunks.aclose()
    assert await asyncio.to_thread(becomes_idle, engine)

    task = asyncio.ensure_future(rag_over(engine, llm, right, right, right).ainvoke(QUESTION))
    await asyncio.sleep(0.3)  # in the middle of the search
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(becomes_idle, engine)
