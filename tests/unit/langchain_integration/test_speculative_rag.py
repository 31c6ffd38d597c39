"""Whole answers that are under way before the search has ended, in every way a Runnable can be run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document as LangChainDocument
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from ragcache_core.client import Engine
from ragcache_core.types import RetrievalUpdate
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    SpeculativeRAG,
    format_documents,
    prompt_from_layout,
)
from tests.contracts.rag.frameworks import LANGCHAIN_WAYS
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, Stage
from tests.support.waiting import until

each_way = pytest.mark.parametrize("way", LANGCHAIN_WAYS)


pytestmark = pytest.mark.usefixtures("idle")


ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)


@each_way
async def test_the_answer_is_that_of_an_ordinary_chain(way: Any, make_rag: Any, llm: ChatRAGCache) -> None:
    rag = make_rag(Stage("moon sun"), Stage("sun moon"))
    context = rag.retriever | format_documents
    chain = {"context": context, "question": RunnablePassthrough()} | prompt_from_layout() | llm
    assert await way(rag, QUESTION, None) == await way(chain, QUESTION, None)


def report_of(message: AIMessage) -> dict[str, Any]:
    report = message.response_metadata["ragcache"]["pipeline"]
    assert isinstance(report, dict)
    return report


def merged(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


async def test_the_report_is_in_the_message_and_in_the_last_chunk_only(make_rag: Any, num_begun: Any) -> None:
    def script() -> SpeculativeRAG:
        num_before = num_begun()
        return make_rag(Stage("moon sun"), Stage("moon sun", once=lambda: num_begun() > num_before))

    whole = [script().invoke(QUESTION), await script().ainvoke(QUESTION)]
    for chunks in (list(script().stream(QUESTION)), [c async for c in script().astream(QUESTION)]):
        assert [c for c in chunks if "ragcache" in c.response_metadata] == chunks[-1:]
        whole.append(merged(chunks))
    for message in whole:
        report = report_of(message)
        assert (report["num_stages"], report["num_started"], report["num_cancelled"]) == (2, 1, 0)
        assert report["is_confirmed"]
        assert 0 < report["overlapped_search_s"] < report["search_s"]
        assert report["skipped_because"] is None
        assert message.response_metadata["ragcache"]["num_prompt_tokens"] > 0
        assert message.response_metadata["model_name"] == "scripted-model"


def test_overlapped_time_counts_once_the_start_time_is_reported(
    make_rag: Any, generations: Any, server: ScriptedServer, num_begun: Any
) -> None:
    handler = CacheStatsCallbackHandler()
    server.admits_after_s = 0.2
    server.script(Reply("The moon does.", wait_s=1.0))
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations())))
    report = report_of(rag.invoke(QUESTION, {"callbacks": [handler]}))
    assert num_begun() == 1
    assert report["is_confirmed"]
    assert report["overlapped_search_s"] == 0, "the search was over when it began"
    assert (handler.summary().num_confirmed_speculations, handler.summary().overlapped_search_s) == (1, 0)


@each_way
async def test_a_question_before_the_documents_is_as_good_as_one_behind_them(
    way: Any, make_rag: Any, generations: Any, llm: ChatRAGCache, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "Question: {question}\n\n{context}")])
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations())), prompt=prompt)
    text = DOCUMENTS["moon"].text
    assert text in await way(rag, QUESTION, None)
    assert len(generations()) == 1
    assert caplog.records == []
    chain = {"context": rag.retriever | format_documents, "question": RunnablePassthrough()} | prompt | llm
    assert text in await way(chain, QUESTION, None)
    assert ["put the context before the question" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("shows_metadata", [False, True])
def test_new_metadata_count_where_the_prompt_shows_them(
    make_rag: Any,
    generations: Any,
    num_begun: Any,
    engine: Engine,
    shows_metadata: bool,
    server: ScriptedServer,
) -> None:
    class Rescored:
        async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
            for stage in range(2):
                while num_begun() < stage:  # noqa: ASYNC110  (a server's thread makes it true)
                    await asyncio.sleep(0.002)
                document = replace(DOCUMENTS["moon"], metadata={"score": stage})
                yield RetrievalUpdate((document,), (0.0,), stage, is_final=stage == 1)

    def shown(documents: list[LangChainDocument]) -> str:
        scores = f" ({documents[0].metadata['score']})" if shows_metadata else ""
        return documents[0].page_content + scores

    rag = make_rag(retriever=RAGCacheRetriever(store=Rescored(), engine=engine, k=1), format_docs=shown)
    answer = rag.invoke(QUESTION)
    assert ("(1)" in answer.text) == shows_metadata
    assert len(generations()) == (2 if shows_metadata else 1)
    num_confirmed = 0 if shows_metadata else 1
    assert until(lambda: len(server.confirmed) == num_confirmed), "the engine is told of what was joined"
    assert report_of(answer)["is_confirmed"] == (not shows_metadata)
    if shows_metadata:
        assert report_of(answer)["overlapped_search_s"] == 0


def test_a_mapping_carries_the_other_variables_of_the_prompt(make_rag: Any, generations: Any) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "{facts}\n{ask} Answer in {language}.")])
    rag = make_rag(
        Stage("moon"),
        Stage("moon", once=lambda: bool(generations())),
        prompt=prompt,
        context_key="facts",
        question_key="ask",
        format_docs=lambda documents: "|".join(d.page_content for d in documents),
    )
    answer = rag.invoke({"ask": QUESTION, "language": "Latin"})
    assert answer.content == f"You said: {DOCUMENTS['moon'].text}\n{QUESTION} Answer in Latin."
    assert len(generations()) == 1


async def test_an_equal_request_may_join_either_speculation(
    make_rag: Any, generations: Any, server: ScriptedServer
) -> None:
    slow, fast = Reply("slow " * 200, token_wait_s=0.002), Reply("fast " * 200)
    server.script(slow, fast)
    is_joined = asyncio.Event()
    first = make_rag(Stage("moon"), Stage("moon", once=is_joined.is_set))
    second = make_rag(Stage("moon"), Stage("moon", once=lambda: len(generations()) == 2))

    async def ask_second() -> str:
        text = ""
        async for chunk in second.astream(QUESTION):
            text += chunk.content
            if text:
                is_joined.set()
        return text

    asked_first = asyncio.ensure_future(first.ainvoke(QUESTION))
    while not generations():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    streaming = asyncio.ensure_future(ask_second())
    assert {(await asked_first).content, await streaming} == {("slow " * 200).strip(), ("fast " * 200).strip()}


def test_an_answer_from_langchains_own_cache_leaves_no_request_behind(
    make_rag: Any, generations: Any, server: ScriptedServer
) -> None:
    set_llm_cache(InMemoryCache())
    try:
        first = make_rag(Stage("moon")).invoke(QUESTION)
        server.script(ENDLESS)
        rag = make_rag(Stage("moon"), Stage("moon", once=lambda: len(generations()) == 2))
        assert rag.invoke(QUESTION).content == first.content
    finally:
        set_llm_cache(None)
    assert until(lambda: server.num_running == 0)


async def test_a_speculation_that_the_request_does_not_match_ends_with_its_first_token(
    make_rag: Any, generations: Any, server: ScriptedServer
) -> None:
    server.rules = (lambda _: ENDLESS,)
    number = count()
    prompt = RunnableLambda(lambda values: StringPromptValue(text=f"{next(number)} {values['context']}"))
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations())), prompt=prompt)
    chunks = rag.astream(QUESTION)
    async for chunk in chunks:
        if chunk.content:
            break
    assert await asyncio.to_thread(until, lambda: server.num_running == 1)
    speculation, asked = generations()
    assert server.aborted == [speculation]
    assert asked.speculation is None
    await chunks.aclose()
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
