"""Retrievers of other makes, in chains that nobody changed: their documents are known, or a hint says how they are."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, TfidfSvdEmbeddings
from tests.support.scripted_server import ScriptedServer

TEXTS = {
    "ganymede": "Ganymede is the largest moon of Jupiter, larger than the planet Mercury.",
    "titan": "Titan is a moon of Saturn with seas of methane and a thick orange sky.",
    "ceres": "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.",
}
QUESTION = "Which moon has seas of methane?"


@pytest.fixture(autouse=True)
def _nothing_retrieved() -> Iterator[None]:
    RETRIEVED.clear()
    yield
    RETRIEVED.clear()


@pytest.fixture
def store() -> InMemoryVectorStore:
    store = InMemoryVectorStore(TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8))
    store.add_documents([Document(id=doc_id, page_content=text) for doc_id, text in TEXTS.items()])
    return store


def shown_as_is(documents: Sequence[Document]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def shown_in_capitals(documents: Sequence[Document]) -> str:
    return shown_as_is(documents).upper() * 10


def chain_of(search: Any, llm: ChatRAGCache) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\nQuestion: {question}")
    return {"context": search, "question": RunnablePassthrough()} | prompt | llm


def named(answer: Any) -> set[str]:
    return {d["doc_id"] for d in answer.response_metadata["ragcache"]["documents"]}


async def test_documents_of_any_retriever_are_known_to_any_chat_model(
    server: ScriptedServer, store: InMemoryVectorStore
) -> None:
    llm = ChatRAGCache(base_url=server.base_url, api_key="test-key")  # connects after the first retrieval
    chain = chain_of(store.as_retriever(search_kwargs={"k": 2}) | shown_as_is, llm)
    found = {d.id for d in store.similarity_search(QUESTION, 2)}
    assert found > {"titan"}
    answers = [chain.invoke(QUESTION), await chain.ainvoke(QUESTION), *chain.batch([QUESTION] * 2)]
    assert [named(answer) for answer in answers] == [found] * 4

    stats = CacheStatsCallbackHandler()
    "".join((chain | StrOutputParser()).stream(QUESTION, {"callbacks": [stats]}))
    "".join([part async for part in (chain | StrOutputParser()).astream(QUESTION, {"callbacks": [stats]})])
    assert set(stats.summary().documents) == found
    assert {d["id"] for d in server.requests[-1].documents} == found
    llm.close()


def test_documents_are_known_in_a_prompt_of_content_blocks(llm: ChatRAGCache, store: InMemoryVectorStore) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", [{"type": "text", "text": "{context}\n\n{question}"}])])
    search = {"context": store.as_retriever(search_kwargs={"k": 2}) | shown_as_is, "question": RunnablePassthrough()}
    assert named((search | prompt | llm).invoke(QUESTION)) > {"titan"}


class Listed(BaseRetriever):
    """Returns what it was given."""

    found: list[Any]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Any]:
        return self.found


def test_documents_without_ids_are_named_by_their_text(llm: ChatRAGCache) -> None:
    chain = chain_of(Listed(found=[Document(page_content=TEXTS["titan"])]) | shown_as_is, llm)
    (name,) = named(chain.invoke(QUESTION))
    assert name.startswith("text-")
    assert named(chain.invoke(QUESTION)) == {name}


@pytest.mark.parametrize("way", ["altered text", "no retriever"])
def test_where_documents_cannot_be_known_one_hint_names_the_way(
    way: str, llm: ChatRAGCache, store: InMemoryVectorStore, caplog: pytest.LogCaptureFixture
) -> None:
    def search(question: str) -> str:
        return shown_as_is(store.similarity_search(question, 3) * 4)

    chain = chain_of(store.as_retriever() | shown_in_capitals if way == "altered text" else search, llm)
    with caplog.at_level(logging.WARNING, "ragcache_core"):
        assert [named(chain.invoke(QUESTION)) for _ in range(6)] == [set()] * 6
    (hint,) = caplog.messages
    assert "no known document" in hint
    assert "as_retriever()" in hint
    assert "llm.bind(documents=" in hint


def test_a_chain_whose_documents_are_known_gets_no_hint(
    llm: ChatRAGCache, store: InMemoryVectorStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain_of(store.as_retriever() | shown_as_is, llm).invoke(QUESTION)
    for _ in range(4):
        llm.invoke("a chat of many words " * 100)
    assert caplog.messages == []


def test_a_chain_that_shows_documents_in_other_words_is_told_though_another_did_not(
    llm: ChatRAGCache, store: InMemoryVectorStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain_of(store.as_retriever() | shown_as_is, llm).invoke(QUESTION)
    shouting = chain_of(store.as_retriever() | (lambda found: shown_as_is(found).upper() * 4), llm)
    for _ in range(4):
        shouting.invoke(QUESTION)
    (told,) = caplog.messages
    assert "page_content unchanged" in told


def test_a_retriever_that_returns_no_documents_harms_nothing(llm: ChatRAGCache) -> None:
    chain = chain_of(Listed(found=["no document"]) | (lambda found: found[0]), llm)
    assert named(chain.invoke(QUESTION)) == set()
