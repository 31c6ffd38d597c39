"""Documents in the order whose beginning is cached the furthest after the very prompt that will show them."""

from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, format_documents
from tests.support.cached_orders import keep_cached
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage

pytestmark = pytest.mark.usefixtures("idle")

MINE, OTHER = (
    ChatPromptTemplate.from_messages([("system", f"You are {who}."), ("human", "{context}\n\nQuestion: {question}")])
    for who in ("brief", "an old friend who likes to talk")
)


def pair(engine: Engine, prompt: ChatPromptTemplate, *stages: Stage, **settings: Any) -> SpeculativeRAG:
    retriever = RAGCacheRetriever(store=ScriptedSource(stages), engine=engine, k=2, **settings)
    return SpeculativeRAG(retriever=retriever, prompt=prompt, llm=ChatRAGCache(engine=engine))


@pytest.fixture
def cached(engine: Engine, server: ScriptedServer, generations: Any) -> None:
    """Much of ``moon sun`` is cached after the other prompt, a little of ``sun moon`` after mine."""
    for prompt in (MINE, OTHER):
        pair(engine, prompt, Stage("mars")).invoke(QUESTION)
    mine, other = generations()
    keep_cached(server, engine, (mine, "sun moon", 10), (other, "moon sun", 100))


def test_a_fused_pair_knows_what_its_prompt_shows_before_the_context(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are {persona}."), ("human", "{context}\n\nQuestion: {question}")]
    )
    rag = pair(engine, prompt, Stage("moon sun"), document_order="cache_aware")
    rag.invoke({"question": QUESTION, "persona": "brief"})
    assert rag._bound is not None
    assert "before the documents" not in caplog.text
    engine.bind_prompt(prompt, format_documents)
    assert "'persona' before the documents" in caplog.text


@pytest.mark.usefixtures("cached")
def test_where_no_prompt_is_known_that_of_any_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.integration.prompts), "bound_prompt", None)
    source = ScriptedSource((Stage("sun moon"),))
    retriever = RAGCacheRetriever(store=source, engine=engine, k=2, document_order="cache_aware")
    assert [d.id for d in retriever.invoke(QUESTION)] == ["moon", "sun"]
