"""Chunk reuse through LlamaIndex: of an LLM, of a call, of a query engine and its speculation, and as an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms.mock import MockLLM
from llama_index.core.schema import QueryBundle

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.stats import ChunkReuseStats
from ragcache_integrations.llamaindex import CacheStatsEvent, CacheStatsEventHandler, RAGCacheLLM, RAGCacheQueryEngine
from tests.support.scripted_server import THREE_TIERS, ScriptedServer
from tests.support.scripted_source import Stage
from tests.unit.llamaindex_integration.conftest import EventLog
from tests.unit.llamaindex_integration.ways import MESSAGES, QUESTION, Ask, every_way

REUSE = {
    "num_chunks": 2, "num_reused_tokens": 20, "num_recomputed_tokens": 9, "num_computed_tokens": 0,
    "fix_overhead": 0.25, "variants": [0, 7],
}  # fmt: skip


@every_way
@pytest.mark.parametrize("option", [None, True, False, "store", {"alpha": 2.0}])
async def test_an_llm_says_how_chunks_are_reused_in_every_way_to_ask(
    ask: Ask, scripted: Engine, server: ScriptedServer, option: Any
) -> None:
    await ask(RAGCacheLLM(scripted, max_tokens=20, chunk_reuse=option))
    assert server.requests[-1].chunk_reuse == option
    assert "chunk_reuse" not in server.requests[-1].body


def test_a_call_wins_over_its_llm(scripted: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(scripted, max_tokens=20, chunk_reuse=True)
    llm.chat(MESSAGES, chunk_reuse=False)
    assert server.requests[-1].chunk_reuse is False
    list(llm.stream_chat(MESSAGES, chunk_reuse={"alpha": 2.0}))
    assert server.requests[-1].chunk_reuse == {"alpha": 2.0}
    llm.complete(QUESTION, use_chat_completions=False, chunk_reuse=True)
    assert "chunk_reuse" not in server.requests[-1].body


def test_what_cannot_be_is_refused_when_it_is_made(scripted: Engine, llm: RAGCacheLLM) -> None:
    with pytest.raises(ConfigError, match="alpha is -1"):
        RAGCacheLLM(scripted, chunk_reuse={"alpha": -1})
    with pytest.raises(ConfigError, match="alpha is -1"):
        RAGCacheQueryEngine(None, llm, chunk_reuse={"alpha": -1})  # type: ignore[arg-type]  # refused before it is looked at
    with pytest.raises(ConfigError, match="MockLLM cannot do"):
        RAGCacheQueryEngine(None, MockLLM(), chunk_reuse=True)  # type: ignore[arg-type]  # refused before it is looked at


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_query_engine_and_its_speculation_say_the_same(
    make_engine: Callable[..., RAGCacheQueryEngine], generations: Any, streaming: bool
) -> None:
    stages = (Stage("moon sun"), Stage("moon sun", once=lambda: bool(generations())))
    query_engine = make_engine(*stages, chunk_reuse={"max_recompute": 0.3}, streaming=streaming)
    response: Any = await query_engine.aquery(QUESTION)
    if streaming:
        assert [token async for token in response.async_response_gen()]
    [seen] = generations()
    assert seen.speculation is not None
    assert seen.chunk_reuse == {"max_recompute": 0.3}


def test_a_query_engine_says_it_where_it_only_synthesizes(
    make_engine: Callable[..., RAGCacheQueryEngine], server: ScriptedServer
) -> None:
    query_engine = make_engine(Stage("moon sun"), chunk_reuse=False)
    query_engine.synthesize(QUESTION, query_engine.retrieve(QueryBundle(QUESTION)))
    assert server.requests[-1].chunk_reuse is False


def test_the_event_says_what_was_reused_and_the_handler_sums_it_up(
    llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    server.cache, server.reuse = THREE_TIERS, REUSE
    response = llm.chat(MESSAGES, chunk_reuse=True)
    [event] = event_log.of(CacheStatsEvent)
    assert event.chunk_reuse == event.stats.chunk_reuse == ChunkReuseStats(2, 20, 9, 0, 0.25, (0, 7))
    assert response.additional_kwargs["ragcache"]["chunk_reuse"]["fix_overhead"] == 0.25
    handler = CacheStatsEventHandler()
    handler.handle(event)
    summary = handler.summary()
    assert (summary.num_reused_chunks, summary.num_reused_tokens, summary.num_recomputed_tokens) == (2, 20, 9)
