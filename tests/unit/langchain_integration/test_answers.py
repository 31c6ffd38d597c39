"""A semantic cache of answers in ordinary chains: what it gives again, marks, counts apart and drops."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import BaseCache
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_tests.integration_tests import AsyncCacheTestSuite, SyncCacheTestSuite

from ragcache_core.client import Engine
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import read_trace
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    SemanticAnswerCache,
    SpeculativeRAG,
    StagedFAISS,
    TfidfSvdEmbeddings,
    TraceCallbackHandler,
    format_documents,
    prompt_from_layout,
)
from tests.support.scripted_server import Reply, ScriptedServer

TEXTS = {
    "ganymede": "Ganymede is the largest moon of Jupiter, larger than the planet Mercury.",
    "titan": "Titan is a moon of Saturn with seas of methane and a thick orange sky.",
    "ceres": "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.",
}
QUESTION = "Which moon has seas of methane?"
NEAR = "Which moon has the seas of methane?"
EMBEDDING = TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8)


@pytest.fixture(autouse=True)
def _nothing_retrieved() -> Iterator[None]:
    RETRIEVED.clear()
    yield
    RETRIEVED.clear()


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


def mark_of(answer: Any) -> Any:
    return answer.response_metadata["ragcache"].get("answer_cache")


class TestSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self) -> BaseCache:
        return SemanticAnswerCache()


class TestAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self) -> BaseCache:
        return SemanticAnswerCache()


async def test_a_near_question_about_the_same_documents_asks_no_engine(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    chain = chain_of(store, ChatRAGCache(engine=engine, cache=answers))
    first = chain.invoke(QUESTION)
    stats = CacheStatsCallbackHandler()
    near = await chain.ainvoke(NEAR, {"callbacks": [stats]})
    assert near.content == first.content
    assert len(server.requests) == 1
    assert mark_of(first) is None
    assert mark_of(near)["question"] == QUESTION
    assert 0.92 <= mark_of(near)["similarity"] <= 1
    assert near.id != first.id
    summary = stats.summary()
    assert (summary.num_kept_answers, summary.num_requests, summary.num_unfinished) == (1, 0, 0)
    assert "1 answer kept from before" in str(stats)


def test_other_questions_documents_and_settings_ask_the_engine(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    llm = ChatRAGCache(engine=engine, cache=answers)
    chain_of(store, llm).invoke(QUESTION)
    chain_of(store, llm).invoke("Who found Ceres?")
    chain_of(store, llm.bind(max_tokens=7)).invoke(QUESTION)
    chain_of(store, ChatRAGCache(engine=engine, cache=answers, temperature=0.5)).invoke(QUESTION)
    assert len(server.requests) == len(answers) == 4


def test_tenants_with_a_salt_of_their_own_share_no_answers(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    llm = ChatRAGCache(engine=engine, cache=answers)
    for salt in ("a", "b", "b"):
        chain_of(store, ChatRAGCache(engine=engine, cache=answers, extra_body={"cache_salt": salt})).invoke(QUESTION)
        chain_of(store, llm.bind(extra_body={"cache_salt": salt}, max_tokens=9)).invoke(QUESTION)
    assert len(server.requests) == len(answers) == 4


def test_a_changed_document_is_asked_about_again_and_its_former_answer_is_gone(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    chain = chain_of(store, ChatRAGCache(engine=engine, cache=answers))
    chain.invoke(QUESTION)
    store.add_texts([TEXTS["titan"].replace("thick orange", "dense orange")], ids=["titan"])
    server.script(Reply("Titan, where Huygens landed."))
    assert chain.invoke(NEAR).content == "Titan, where Huygens landed."
    assert len(answers) == 1
    assert answers.forget_outdated(store) == 0
    store.delete(["titan"])
    assert answers.forget_outdated(store) == 1


def test_a_document_that_is_forgotten_while_it_is_answered_from_leaves_nothing(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    forgotten = []

    def forget(_: object) -> None:
        forgotten.append(answers.forget(["titan"]))

    server.rules = (forget,)
    chain_of(store, ChatRAGCache(engine=engine, cache=answers)).invoke(QUESTION)
    assert forgotten == [0]
    assert len(answers) == 0


def test_ids_and_statistics_of_earlier_messages_are_not_part_of_a_prompt(
    engine: Engine, answers: SemanticAnswerCache, server: ScriptedServer
) -> None:
    llm = ChatRAGCache(engine=engine, cache=answers)
    for cost in (1, 2):
        said = AIMessage("Hello.", id=f"run-{cost}", response_metadata={"ragcache": {"total_s": cost}})
        llm.invoke([HumanMessage("Hi."), said, HumanMessage("And now?")])
    assert len(server.requests) == 1


def test_what_no_retriever_was_asked_gets_its_own_answer_alone(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache
) -> None:
    llm = ChatRAGCache(engine=engine, cache=answers)
    for question in (QUESTION, QUESTION, NEAR):
        llm.invoke(question)
    assert len(server.requests) == 2


def test_answers_that_call_tools_are_not_kept(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache
) -> None:
    server.script(Reply(tool_calls=(("search", {"input": "Titan"}),)))
    ChatRAGCache(engine=engine, cache=answers).invoke(
        QUESTION, tools=[{"type": "function", "function": {"name": "search"}}]
    )
    assert len(answers) == 0


def test_a_speculative_chain_reports_its_search_beside_a_kept_answer(
    server: ScriptedServer, engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    retriever = RAGCacheRetriever(store=store, engine=engine, k=1)
    llm = ChatRAGCache(engine=engine, cache=answers)
    rag = SpeculativeRAG(retriever=retriever, prompt=prompt_from_layout(), llm=llm)
    rag.invoke(QUESTION)
    stats = CacheStatsCallbackHandler()
    kept = rag.invoke(NEAR, {"callbacks": [stats]})
    assert mark_of(kept)["question"] == QUESTION
    assert kept.response_metadata["ragcache"]["pipeline"]["search_s"] > 0
    assert stats.summary().num_kept_answers == 1


def test_kept_answers_are_not_recorded_as_requests(
    engine: Engine, answers: SemanticAnswerCache, store: StagedFAISS, tmp_path: Path
) -> None:
    chain = chain_of(store, ChatRAGCache(engine=engine, cache=answers))
    with TraceCallbackHandler(tmp_path / "trace.jsonl") as recording:
        for _ in range(2):
            chain.invoke(QUESTION, {"callbacks": [recording]})
    assert len(list(read_trace(tmp_path / "trace.jsonl"))) == 1


def test_answers_come_back_from_a_folder(engine: Engine, store: StagedFAISS, tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        with SemanticAnswerCache(folder=tmp_path) as answers:
            said.append(chain_of(store, ChatRAGCache(engine=engine, cache=answers)).invoke(QUESTION))
            assert len(answers) == 1
    assert mark_of(said[1])["similarity"] == 1
    assert said[0].content == said[1].content


def test_a_kept_answer_that_cannot_be_read_is_a_miss(engine: Engine, store: StagedFAISS, tmp_path: Path) -> None:
    import sqlite3

    with SemanticAnswerCache(folder=tmp_path) as answers:
        chain_of(store, ChatRAGCache(engine=engine, cache=answers)).invoke(QUESTION)
    evil = (
        '[{"lc": 1, "type": "constructor", "id": ["langchain", "prompts", "prompt", "PromptTemplate"], "kwargs": {}}]'
    )
    with sqlite3.connect(tmp_path / "answers.sqlite") as db:
        db.execute("UPDATE answers SET answer = ?", (evil,))
    with SemanticAnswerCache(folder=tmp_path) as answers:
        assert mark_of(chain_of(store, ChatRAGCache(engine=engine, cache=answers)).invoke(QUESTION)) is None


def test_an_llm_of_another_make_and_many_threads_may_share_one(
    answers: SemanticAnswerCache, store: StagedFAISS
) -> None:
    llm = FakeListLLM(responses=[f"answer {i}" for i in range(50)], cache=answers)
    chain = chain_of(store, llm)
    first = chain.invoke(QUESTION)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(chain.invoke, [QUESTION, NEAR] * 10)) == {first}


def test_an_embedding_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="int is not an embedding model"):
        SemanticAnswerCache(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["embedding", "store"])
def test_the_built_in_embedder_which_takes_who_for_when_is_refused(kind: str, store: StagedFAISS) -> None:
    with StagedFAISS.from_documents([Document(page_content=text) for text in TEXTS.values()]) as built_in:
        with pytest.raises(ConfigError, match="leave it out to compare questions by their words"):
            SemanticAnswerCache(EMBEDDING if kind == "embedding" else built_in)
