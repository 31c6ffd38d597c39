"""RAGCacheLLM against a scripted server: what is sent, what comes back, what is published, what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.tools import FunctionTool

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, RequestRejectedError
from ragcache_core.stats import request_stats_from_dict
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM
from tests.contracts.rag.frameworks import LlamaIndex
from tests.support.scripted_server import Refusal, Reply, ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog


async def test_llm_takes_model_limits_and_key_from_the_engine(llm: RAGCacheLLM, engine: Engine) -> None:
    assert llm.metadata.context_window == engine.max_model_len
    assert llm.metadata.model_name == engine.model
    assert llm.metadata.is_chat_model
    assert llm.metadata.is_function_calling_model
    assert llm.engine is engine


WAYS = [f"{prefix}{name}" for name in ("chat", "complete") for prefix in ("", "a", "stream_", "astream_")]


@pytest.mark.parametrize("ask", WAYS)
async def test_one_request_publishes_each_event_once(ask: str, llm: RAGCacheLLM, event_log: EventLog) -> None:
    stats = (await LlamaIndex(llm.engine).ask(ask, llm, QUESTION)).stats
    of_chat, of_text = (LLMChatStartEvent, LLMChatEndEvent), (LLMCompletionStartEvent, LLMCompletionEndEvent)
    kinds = of_chat if "chat" in ask else of_text
    assert len(event_log.of(*of_chat, *of_text)) == len(event_log.of(*kinds)) == 2
    (event,) = event_log.of(CacheStatsEvent)
    assert event.stats.to_dict() == stats
    assert event.model == llm.model
    assert event.span_id == event_log.of(*kinds)[0].span_id is not None


async def test_model_without_a_chat_template_is_asked_as_text(engine: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(engine, is_chat_model=False, max_tokens=40)
    asked = LlamaIndex(engine)
    await asked.ask("complete", llm, QUESTION)  # the prompt is in the cache from here on
    for way in ("complete", "acomplete", "stream_complete", "astream_complete"):
        answer = await asked.ask(way, llm, QUESTION)
        assert answer.text == f"You said: {QUESTION}"
        assert server.requests[-1].path == "/v1/completions"
        stats = request_stats_from_dict(answer.stats)
        assert 0 < stats.num_cached_tokens < stats.num_prompt_tokens
        assert stats.ttft_s is not None
        server.script(Refusal(400, "no"))
        with pytest.raises(RequestRejectedError):
            await asked.ask(way, llm, QUESTION)
    assert "You said" in str(llm.chat(MESSAGES).message.content)
    assert llm.complete("Hello?", use_chat_completions=True).text
    assert server.requests[-1].path == "/v1/chat/completions"


QUESTION = "Who keeps the lighthouse of Zor when the winter storms come over the northern sea again?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


ADD = FunctionTool.from_defaults(add)


async def test_calls_that_come_in_one_chunk_are_all_there(
    llm: RAGCacheLLM, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(_pieces: object, calls: list[Any], _is_chat: bool) -> Iterator[dict[str, Any]]:
        yield {"delta": {"tool_calls": [{**call, "index": i} for i, call in enumerate(calls)]}}

    monkeypatch.setattr("tests.support.scripted_server._deltas", at_once)
    server.script(Reply(tool_calls=(("add", {"first": 1, "second": 2}), ("add", {"first": 3, "second": 4}))))
    *_, last = llm.stream_chat_with_tools([ADD], user_msg="Both?", allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(last)
    assert [call.tool_kwargs for call in calls] == [{"first": 1, "second": 2}, {"first": 3, "second": 4}]
    assert len({call.tool_id for call in calls}) == 2


async def test_what_openai_like_knows_is_taken(engine: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(
        engine,
        system_prompt="Be brief.",
        reuse_client=True,
        default_headers={"x-a": "b"},
        additional_kwargs={"stop": ["zz"], "extra_body": {"cache_salt": "tenant-a"}},
    )
    llm.chat(MESSAGES, seed=1)
    sent = server.requests[-1].body
    assert (sent["stop"], sent["cache_salt"], sent["seed"]) == (["zz"], "tenant-a", 1)


@pytest.mark.parametrize("settings", [{"n": 2}, {"extra_body": {"n": 2}}])
async def test_several_answers_are_refused_where_one_text_is_returned(llm: RAGCacheLLM, settings: Any) -> None:
    of_llm = llm.model_copy(update={"additional_kwargs": settings})
    refused = "n is 2, but one text is returned"
    for each, of_call in ((llm, settings), (of_llm, {})):
        with pytest.raises(ConfigError, match=refused):
            each.chat(MESSAGES, **of_call)
        with pytest.raises(ConfigError, match=refused):
            await each.achat(MESSAGES, **of_call)
        with pytest.raises(ConfigError, match=refused):
            each.complete(QUESTION, **of_call)
        with pytest.raises(ConfigError, match=refused):
            await each.acomplete(QUESTION, **of_call)
