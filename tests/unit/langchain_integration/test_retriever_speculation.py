"""An ordinary chain whose prompt is prefilled while its retriever searches."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from examples.vector_database import copy_store
from ragcache_core.client import Engine
from ragcache_core.retrieval import DocumentStore, TfidfSvdEmbedder, pgvector_stages
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, RAGCacheRetriever
from tests.support.postgres import pgvector_server
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("idle")

STATIC = "Answer the question from the documents, and say no more than they do. Be brief, and do not guess."
PROMPT = ChatPromptTemplate.from_messages([("system", STATIC), ("human", "{context}\n\nQuestion: {question}")])


def format_docs(documents: list[LangChainDocument]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def chain_of(retriever: RAGCacheRetriever, llm: ChatRAGCache) -> Runnable[str, str]:
    """Return a chain with nothing in it but LangChain's own words."""
    parts = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return parts | PROMPT | llm | StrOutputParser()


def test_what_stands_before_a_question_is_prefilled_and_hides_nothing_of_the_search(
    make: Any, engine: Engine, warmed: Any, num_begun: Any
) -> None:
    asked_first = ChatPromptTemplate.from_messages([("system", STATIC), ("human", "Question: {question}\n\n{context}")])
    engine.bind_prompt(asked_first, format_docs)
    handler = CacheStatsCallbackHandler()
    make(Stage("moon"), Stage("moon", once=lambda: num_begun() == 1)).invoke(QUESTION, {"callbacks": [handler]})
    (warm,) = warmed()
    assert warm.documents == []
    assert (handler.summary().num_confirmed_speculations, handler.summary().overlapped_search_s) == (1, 0)


async def test_what_a_vector_database_finds_with_little_effort_is_prefilled_before_its_last_answer(
    tmp_path: Path, llm: ChatRAGCache, engine: Engine, warmed: Any, server: ScriptedServer
) -> None:
    class LateConnection(psycopg.Connection[Any]):
        """Holds the exact search back until the engine has prefilled documents."""

        def execute(self, query: Any, params: Any = None, **settings: Any) -> psycopg.Cursor[Any]:
            if params == ("enable_indexscan", "off"):
                assert until(lambda: bool(warmed()))
            return super().execute(query, params, **settings)

    embedder = TfidfSvdEmbedder(8).fit([document.text for document in DOCUMENTS.values()])
    with pgvector_server() as address:
        with (
            DocumentStore.create(tmp_path / "store", embedder=embedder, word_weight=0.0) as store,
            psycopg.connect(address) as connection,
        ):
            store.add(DOCUMENTS.values())
            copy_store(store, connection, "docs")
            expected = [document.doc_id for document in store.search(QUESTION, 2).documents]
        source = pgvector_stages(lambda: LateConnection.connect(address), "docs", embedder, efforts=(10, "exact"))
        engine.bind_prompt(PROMPT, format_docs)
        await chain_of(RAGCacheRetriever(store=source, engine=engine, k=2), llm).ainvoke(QUESTION)
    (warm,) = warmed()
    assert [document["id"] for document in warm.documents] == expected
    assert await asyncio.to_thread(until, lambda: server.confirmed == [warm.speculation])
