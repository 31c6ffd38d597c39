"""A deadline through LangChain: of a model, of a call, through a speculative chain, and in the statistics."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, SpeculativeRAG
from tests.support.scripted_server import IDLE, ScriptedServer
from tests.support.scripted_source import QUESTION, Stage
from tests.unit.langchain_integration.ways import answered, each_way

ASKED = [HumanMessage("The sun is a star. What is the sun?")]
TIMES = PrefillCostModel((0, 1000), (1, 1001), ((0.001, 1.001), (0.001, 1.001)))


@pytest.fixture(autouse=True)
def measured(server: ScriptedServer) -> None:
    server.costs, server.load = {"prefill": TIMES.to_dict(), "chunk_reuse": None}, IDLE


@each_way
async def test_a_call_and_a_model_say_by_when_and_are_told_what_was_done(
    way: Any, llm: ChatRAGCache, engine: Engine, server: ScriptedServer
) -> None:
    for deadline_s, is_in_time in ((5.0, True), (0.0001, False)):
        for model in (llm.bind(ttft_slo=deadline_s), ChatRAGCache(engine=engine, ttft_slo=deadline_s)):
            handler = CacheStatsCallbackHandler()
            await answered(way, model.with_config(callbacks=[handler]), ASKED)
            told = handler.runs[0][1].deadline
            assert told is not None
            assert (told.ttft_slo_s, told.choice, told.is_in_time) == (deadline_s, "exact", is_in_time)
            assert told.exact_ttft_s == told.options[0].ttft_s
            assert "ttft_slo" not in server.requests[-1].body


def test_an_answer_holds_the_report(llm: ChatRAGCache) -> None:
    told = llm.invoke(ASKED, ttft_slo=5).response_metadata["ragcache"]["deadline"]
    assert (told["ttft_slo_s"], told["choice"], told["is_in_time"]) == (5.0, "exact", True)
    assert told["options"][0]["num_new_tokens"] > 0


def test_a_deadline_is_refused_when_it_is_none(llm: ChatRAGCache, engine: Engine) -> None:
    with pytest.raises(ValidationError, match="ttft_slo is 0"):
        ChatRAGCache(engine=engine, ttft_slo=0)
    with pytest.raises(ConfigError, match="ttft_slo is -1"):
        llm.invoke(ASKED, ttft_slo=-1)


@pytest.mark.usefixtures("idle")
async def test_a_fused_pair_joins_what_it_asked_ahead_with_the_same_deadline(
    llm: ChatRAGCache, make_rag: Any, generations: Any, server: ScriptedServer
) -> None:
    stages = (Stage("moon sun"), Stage("moon sun", once=lambda: bool(generations())))
    rag: SpeculativeRAG = make_rag(*stages, llm=llm.bind(ttft_slo=5.0))
    answer = await rag.ainvoke(QUESTION)
    (seen,) = generations()
    assert seen.speculation is not None
    told = answer.response_metadata["ragcache"]
    assert told["pipeline"]["is_confirmed"]
    assert told["deadline"]["is_in_time"]
