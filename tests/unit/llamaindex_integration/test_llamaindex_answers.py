"""A cache of answers in LlamaIndex's LLM: what it gives again, in every way to ask, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.tools import FunctionTool

from ragcache_core import DocumentStore
from ragcache_core.client import Engine
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.errors import ConfigError
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import (
    AnswerCache,
    CacheStatsEventHandler,
    KeptAnswerEvent,
    RAGCacheLLM,
    RAGCacheQueryEngine,
    RAGCacheRetriever,
    TfidfSvdEmbedding,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog
from tests.unit.llamaindex_integration.ways import Ask, every_way

TEXTS = {
    "ganymede": "Ganymede is the largest moon of Jupiter, larger than the planet Mercury.",
    "titan": "Titan is a moon of Saturn with seas of methane and a thick orange sky.",
    "ceres": "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.",
}
QUESTION = "Which moon has seas of methane?"
NEAR = "Which moon has the seas of methane?"
EMBEDDING = TfidfSvdEmbedding(list(TEXTS.values()), dimension=8)


@pytest.fixture(autouse=True)
def _nothing_retrieved() -> Iterator[None]:
    RETRIEVED.clear()
    yield
    RETRIEVED.clear()


@pytest.fixture
def answers() -> AnswerCache:
    return AnswerCache()


@pytest.fixture
def llm(scripted: Engine, answers: AnswerCache) -> RAGCacheLLM:
    return RAGCacheLLM(scripted, temperature=0, max_tokens=200, answer_cache=answers)


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
    kept = event_log.of(KeptAnswerEvent)
    assert [event.question for event in kept] == [QUESTION] * 2
    assert all(0.92 <= event.similarity <= 1 for event in kept)
    handler = CacheStatsEventHandler()
    for event in event_log.events:
        handler.handle(event)
    assert (handler.summary().num_kept_answers, handler.summary().num_requests) == (2, 1)
    query_engine.query("Who found Ceres?")
    assert len(server.requests) == 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_query_engine_names_the_kept_answer_in_its_metadata(
    streaming: bool, scripted: Engine, llm: RAGCacheLLM, answers: AnswerCache, server: ScriptedServer, tmp_path: str
) -> None:
    with DocumentStore.create(tmp_path, embedder=EMBEDDING) as store:
        store.add([Document(doc_id, text) for doc_id, text in TEXTS.items()])
        retriever = RAGCacheRetriever(store, scripted, similarity_top_k=1)
        query_engine = RAGCacheQueryEngine(retriever, llm, streaming=streaming)
        first = str(query_engine.query(QUESTION))
        num_asked = len([r for r in server.requests if r.speculation is None])
        near = query_engine.query(NEAR)
        assert str(near) == first
        assert near.metadata["ragcache"]["answer_cache"]["question"] == QUESTION  # type: ignore[index]
        assert len([r for r in server.requests if r.speculation is None]) == num_asked
        assert len(answers) == 1
        assert answers.forget(["titan"]) == 1


@every_way
async def test_every_way_to_ask_looks_before_it_asks_and_keeps_what_it_got(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    text, told = await ask(llm)
    assert "answer_cache" not in told["ragcache"]
    again, told = await ask(llm)
    assert again == text
    assert told["ragcache"]["answer_cache"]["similarity"] == 1
    assert len(server.requests) == 1


def test_a_stream_that_is_left_is_not_kept(llm: RAGCacheLLM, answers: AnswerCache) -> None:
    stream = llm.stream_complete(QUESTION)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert len(answers) == 0


def test_tenants_with_a_salt_of_their_own_share_no_answers(
    scripted: Engine, answers: AnswerCache, server: ScriptedServer
) -> None:
    for salt in ("a", "b", "b"):
        settings = {"extra_body": {"cache_salt": salt}}
        RAGCacheLLM(scripted, answer_cache=answers, additional_kwargs=settings).complete(QUESTION)
        RAGCacheLLM(scripted, answer_cache=answers).complete(NEAR, **settings)
    assert len(server.requests) == len(answers) == 4


def test_a_salt_of_the_llm_counts_beside_a_body_of_the_call(
    scripted: Engine, answers: AnswerCache, server: ScriptedServer
) -> None:
    for salt in ("a", "b"):
        settings = {"extra_body": {"cache_salt": salt}}
        llm = RAGCacheLLM(scripted, answer_cache=answers, additional_kwargs=settings)
        llm.complete(QUESTION, extra_body={"top_k": 1})
    assert [request.body["cache_salt"] for request in server.requests] == ["a", "b"]


def test_what_the_llm_is_set_to_counts_as_what_a_call_says(
    scripted: Engine, answers: AnswerCache, server: ScriptedServer
) -> None:
    for settings in ({}, {"deduplicate": True}, {"ttft_slo": 0.5}):
        RAGCacheLLM(scripted, answer_cache=answers, **settings).complete(QUESTION)
        RAGCacheLLM(scripted, answer_cache=answers).complete(QUESTION, **settings)
    assert len(server.requests) == len(answers) == 3


def test_chats_with_tools_and_other_settings_are_asked(
    llm: RAGCacheLLM, answers: AnswerCache, server: ScriptedServer
) -> None:
    tool = FunctionTool.from_defaults(lambda query: query, name="search", description="Searches.")
    server.script(Reply("No need to search."))
    llm.chat_with_tools([tool], user_msg=QUESTION)
    assert len(answers) == 0
    for settings in ({}, {"temperature": 0.5}, {"chunk_reuse": False}, {}):
        llm.complete(QUESTION, **settings)
    assert len(answers) == 3
    assert len(server.requests) == 4


def test_the_built_in_embedder_which_takes_who_for_when_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out to compare questions by their words"):
        AnswerCache(EMBEDDING)
