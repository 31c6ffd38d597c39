"""A semantic cache of answers in ordinary chains: what it gives again, marks, counts apart and drops."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_tests.integration_tests import AsyncCacheTestSuite, SyncCacheTestSuite

from ragcache_core.client import Engine
from ragcache_integrations.langchain import (
    ChatRAGCache,
    SemanticAnswerCache,
    StagedFAISS,
    TfidfSvdEmbeddings,
    format_documents,
    prompt_from_layout,
)
from tests.support.moons import NEAR, QUESTION, TEXTS
from tests.support.scripted_server import ScriptedServer

EMBEDDING = TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8)


@pytest.fixture
def answers() -> Iterator[SemanticAnswerCache]:
    with SemanticAnswerCache() as answers:
        yield answers


@pytest.fixture
def store() -> Iterator[StagedFAISS]:
    documents = [Document(id=doc_id, page_content=text) for doc_id, text in TEXTS.items()]
    with StagedFAISS.from_documents(documents, EMBEDDING) as store:
        yield store


def chain_of(store: StagedFAISS, llm: Any) -> Runnable[str, Any]:
    search = store.as_retriever(search_kwargs={"k": 1}) | format_documents
    return {"context": search, "question": RunnablePassthrough()} | prompt_from_layout() | llm


class TestSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self) -> BaseCache:
        return SemanticAnswerCache()


class TestAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self) -> BaseCache:
        return SemanticAnswerCache()


def test_ids_and_statistics_of_earlier_messages_are_not_part_of_a_prompt(
    engine: Engine, answers: SemanticAnswerCache, server: ScriptedServer
) -> None:
    llm = ChatRAGCache(engine=engine, cache=answers)
    for cost in (1, 2):
        said = AIMessage("Hello.", id=f"run-{cost}", response_metadata={"ragcache": {"total_s": cost}})
        llm.invoke([HumanMessage("Hi."), said, HumanMessage("And now?")])
    assert len(server.requests) == 1


def test_an_llm_of_another_make_and_many_threads_may_share_one(
    answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    llm = FakeListLLM(responses=[f"answer {i}" for i in range(50)], cache=answers)
    chain = chain_of(store, llm)
    first = chain.invoke(QUESTION)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(chain.invoke, [QUESTION, NEAR] * 10)) == {first}


@pytest.mark.parametrize(
    ("name", "values"), [("chunk_reuse", (None, True, False, {"alpha": 2})), ("deduplicate", (False, True))]
)
def test_langchains_own_cache_distinguishes_settings(
    engine: Engine, server: ScriptedServer, name: str, values: tuple[Any, ...]
) -> None:
    cache = InMemoryCache()
    for value in values * 2:
        ChatRAGCache(engine=engine, cache=cache, streaming=False, **{name: value}).invoke(QUESTION)
    assert len(server.requests) == len(values)
