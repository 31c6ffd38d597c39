"""A deadline through LlamaIndex: of an LLM, of a call, of a query engine and its speculation, and as an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms.mock import MockLLM

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM, RAGCacheQueryEngine
from tests.support.scripted_server import IDLE, ScriptedServer
from tests.support.scripted_source import Stage
from tests.unit.llamaindex_integration.conftest import EventLog
from tests.unit.llamaindex_integration.ways import MESSAGES, QUESTION, Ask, every_way

TIMES = PrefillCostModel((0, 1000), (1, 1001), ((0.001, 1.001), (0.001, 1.001)))


@pytest.fixture(autouse=True)
def measured(server: ScriptedServer) -> None:
    server.costs, server.load = {"prefill": TIMES.to_dict(), "chunk_reuse": None}, IDLE


@every_way
async def test_an_llm_has_a_deadline_in_every_way_to_ask(
    ask: Ask, scripted: Engine, server: ScriptedServer, event_log: EventLog
) -> None:
    await ask(RAGCacheLLM(scripted, max_tokens=20, ttft_slo=5.0))
    assert "ttft_slo" not in server.requests[-1].body
    (event,) = event_log.of(CacheStatsEvent)
    if "messages" in server.requests[-1].body:  # of a text nothing is known
        assert (event.deadline.choice, event.deadline.is_in_time) == ("exact", True)


def test_a_call_wins_over_its_llm_and_is_told(scripted: Engine) -> None:
    response = RAGCacheLLM(scripted, max_tokens=20, ttft_slo=5.0).chat(MESSAGES, ttft_slo=0.0001)
    told = response.additional_kwargs["ragcache"]["deadline"]
    assert (told["ttft_slo_s"], told["is_in_time"]) == (0.0001, False)


def test_a_deadline_is_refused_when_it_is_none(scripted: Engine, llm: RAGCacheLLM) -> None:
    for make in (
        lambda: RAGCacheLLM(scripted, ttft_slo=0),
        lambda: RAGCacheQueryEngine(None, llm, ttft_slo=0),  # type: ignore[arg-type]  # refused before it is looked at
        lambda: llm.chat(MESSAGES, ttft_slo=0),
        lambda: llm.complete("What is the sun?", use_chat_completions=False, ttft_slo=0),
    ):
        with pytest.raises(ConfigError, match="ttft_slo is 0"):
            make()
    with pytest.raises(ConfigError, match="MockLLM cannot do"):
        RAGCacheQueryEngine(None, MockLLM(), ttft_slo=1.0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("idle")
async def test_a_query_engine_joins_what_it_asked_ahead_with_the_same_deadline(
    make_engine: Callable[..., RAGCacheQueryEngine], generations: Any
) -> None:
    stages = (Stage("moon sun"), Stage("moon sun", once=lambda: bool(generations())))
    response: Any = await make_engine(*stages, ttft_slo=5.0).aquery(QUESTION)
    (seen,) = generations()
    assert seen.speculation is not None
    assert response.metadata["ragcache"]["deadline"]["is_in_time"]


def test_a_completion_is_sent_as_it_is_and_says_why(llm: RAGCacheLLM) -> None:
    response = llm.complete("What is the sun?", use_chat_completions=False, ttft_slo=5)
    told = response.additional_kwargs["ragcache"]["deadline"]
    assert (told["choice"], told["is_in_time"]) == ("exact", None)
    assert "completions endpoint" in told["why"]
