"""Retrievers of other makes, in unchanged chains: their documents are known, or a hint says how they are."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from ragcache_integrations.langchain import ChatRAGCache, TfidfSvdEmbeddings
from tests.support.moons import QUESTION, TEXTS


@pytest.fixture
def store() -> InMemoryVectorStore:
    store = InMemoryVectorStore(TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8))
    store.add_documents([Document(id=doc_id, page_content=text) for doc_id, text in TEXTS.items()])
    return store


def shown_as_is(documents: Sequence[Document]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def chain_of(search: Any, llm: ChatRAGCache) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\nQuestion: {question}")
    return {"context": search, "question": RunnablePassthrough()} | prompt | llm


def named(answer: Any) -> set[str]:
    return {d["doc_id"] for d in answer.response_metadata["ragcache"]["documents"]}


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
