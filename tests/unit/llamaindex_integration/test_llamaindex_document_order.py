"""Documents in the order whose beginning is cached the furthest after the very prompt that will show them."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever
from tests.support.cached_orders import keep_cached
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage

pytestmark = pytest.mark.usefixtures("idle")

MINE, OTHER = (PromptLayout(static_prefix=f"You are {who}.") for who in ("brief", "an old friend who likes to talk"))


def query_engine(llm: RAGCacheLLM, layout: PromptLayout, *stages: Stage, **settings: Any) -> RAGCacheQueryEngine:
    return RAGCacheQueryEngine(RAGCacheRetriever(ScriptedSource(stages), llm.engine, **settings), llm, layout=layout)


@pytest.fixture
def cached(llm: RAGCacheLLM, scripted: Engine, server: ScriptedServer, generations: Any) -> None:
    """Much of ``moon sun`` is cached after the other prompt, a little of ``sun moon`` after mine."""
    for layout in (MINE, OTHER):
        query_engine(llm, layout, Stage("mars")).query(QUESTION)
    mine, other = generations()
    keep_cached(server, scripted, (mine, "sun moon", 10), (other, "moon sun", 100))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("layout", "order"), [(MINE, ["sun", "moon"]), (OTHER, ["moon", "sun"])])
async def test_a_query_engine_goes_by_its_own_prompt(
    layout: PromptLayout, order: list[str], is_async: bool, llm: RAGCacheLLM, scripted: Engine, generations: Any
) -> None:
    scripted.bind_prompt(OTHER)
    asked = query_engine(llm, layout, Stage("moon sun"), document_order="cache_aware")
    num_before = len(generations())
    _ = await asked.aquery(QUESTION) if is_async else asked.query(QUESTION)
    (seen,) = generations()[num_before:]
    assert [d["id"] for d in seen.documents] == order


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("how", ["its own", "the engine's"])
def test_a_retriever_goes_by_the_prompt_that_is_bound(how: str, scripted: Engine) -> None:
    bound = scripted.bind_prompt(MINE, is_default=how == "the engine's")
    retriever = RAGCacheRetriever(
        ScriptedSource((Stage("moon sun"),)),
        scripted,
        document_order="cache_aware",
        prompt=bound if how == "its own" else None,
    )
    assert [n.node.node_id for n in retriever.retrieve(QUESTION)] == ["sun", "moon"]
