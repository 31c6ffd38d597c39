"""Chunk reuse through LangChain: of a model, of a call, through a speculative chain, and in the statistics."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from ragcache_core.client import Engine
from ragcache_core.stats import ChunkReuseStats, request_stats_from_dict
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache
from tests.support.scripted_server import THREE_TIERS, ScriptedServer
from tests.support.scripted_source import Stage
from tests.unit.langchain_integration.ways import answered, each_way

ASKED = [HumanMessage("The sun is a star. What is the sun?")]
REUSE = {
    "num_chunks": 2, "num_reused_tokens": 20, "num_recomputed_tokens": 9, "num_computed_tokens": 0,
    "num_prefix_tokens": 4,
    "fix_overhead": 0.25, "variants": [0, 7],
}  # fmt: skip


def test_a_model_says_nothing_of_chunk_reuse_by_itself(llm: ChatRAGCache, server: ScriptedServer) -> None:
    llm.invoke(ASKED)
    assert server.requests[-1].chunk_reuse is None


@each_way
@pytest.mark.parametrize("option", [True, False, "store", {"selection": "cache_craft", "max_recompute": 0.3}])
async def test_a_call_and_a_model_say_how_chunks_are_reused(
    way: Any, llm: ChatRAGCache, engine: Engine, server: ScriptedServer, option: Any
) -> None:
    await answered(way, llm.bind(chunk_reuse=option), ASKED)
    assert server.requests[-1].chunk_reuse == option
    await answered(way, ChatRAGCache(engine=engine, chunk_reuse=option), ASKED)
    assert server.requests[-1].chunk_reuse == option
    assert "chunk_reuse" not in server.requests[-1].body


def test_a_call_wins_over_its_model(engine: Engine, server: ScriptedServer) -> None:
    llm = ChatRAGCache(engine=engine, chunk_reuse=True)
    llm.invoke(ASKED, chunk_reuse=False)
    assert server.requests[-1].chunk_reuse is False


def test_what_cannot_be_is_refused_when_the_model_is_made(engine: Engine) -> None:
    with pytest.raises(ValidationError, match="max_recompute is 7"):
        ChatRAGCache(engine=engine, chunk_reuse={"max_recompute": 7})


def test_an_approximate_answer_is_never_taken_for_an_exact_one_by_langchains_cache(
    engine: Engine, server: ScriptedServer
) -> None:
    cache = InMemoryCache()
    for option in (None, True, False, True, None):
        ChatRAGCache(engine=engine, chunk_reuse=option, cache=cache, streaming=False).invoke(ASKED)
    assert [seen.chunk_reuse for seen in server.requests] == [None, True, False]
    ChatRAGCache(engine=engine, cache=cache, streaming=False).invoke(ASKED, chunk_reuse={"alpha": 2})
    assert server.requests[-1].chunk_reuse == {"alpha": 2}


@pytest.mark.usefixtures("idle")
@each_way
async def test_a_speculation_carries_the_same_wish_and_is_joined(
    way: Any, make_rag: Any, llm: ChatRAGCache, generations: Any
) -> None:
    rag = make_rag(
        Stage("moon sun"), Stage("moon sun", once=lambda: bool(generations())), llm=llm.bind(chunk_reuse=True)
    )
    await answered(way, rag)
    [seen] = generations()
    assert seen.speculation is not None
    assert seen.chunk_reuse is True


def test_an_answer_says_what_was_reused_and_the_handler_sums_it_up(llm: ChatRAGCache, server: ScriptedServer) -> None:
    server.cache, server.reuse = THREE_TIERS, REUSE
    handler = CacheStatsCallbackHandler()
    for _ in range(2):
        answer = llm.invoke(ASKED, {"callbacks": [handler]}, chunk_reuse=True)
    server.reuse = None
    assert answer.response_metadata["ragcache"]["chunk_reuse"] == REUSE
    stats = request_stats_from_dict(answer.response_metadata["ragcache"])
    assert stats.chunk_reuse == ChunkReuseStats(2, 20, 9, 0, 0.25, (0, 7), 4)
    summary = handler.summary()
    assert (summary.num_reused_chunks, summary.num_reused_tokens, summary.num_recomputed_tokens) == (4, 40, 18)
