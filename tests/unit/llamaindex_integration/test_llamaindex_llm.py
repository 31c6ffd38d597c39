"""RAGCacheLLM against a scripted server: what is sent, what comes back, what is published, what goes wrong."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    EngineError,
    RequestRejectedError,
)
from ragcache_core.stats import request_stats_from_dict
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import CacheStatsEvent, CacheStatsEventHandler, CacheSummary, RAGCacheLLM
from tests.support.scripted_server import THREE_TIERS, Refusal, Reply, ScriptedServer
from tests.unit.llamaindex_integration.conftest import MODEL, EventLog
from tests.unit.llamaindex_integration.ways import (
    MESSAGES,
    QUESTION,
    STREAMED,
    WHOLE,
    Ask,
    achat,
    acomplete,
    astream_chat,
    astream_complete,
    chat,
    complete,
    every_way,
    stream_chat,
    stream_complete,
)


async def test_llm_takes_model_limits_and_key_from_the_engine(llm: RAGCacheLLM, scripted: Engine) -> None:
    assert llm.metadata.context_window == scripted.max_model_len
    assert llm.metadata.model_name == scripted.model
    assert llm.metadata.is_chat_model
    assert llm.metadata.is_function_calling_model
    assert llm.engine is scripted


async def test_needs_an_engine_or_an_address_and_not_both(scripted: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="or set RAGCACHE_BASE_URL"):
        RAGCacheLLM()
    with pytest.raises(ConfigError, match="both given"):
        RAGCacheLLM(scripted, api_base=scripted.base_url)


async def test_joins_the_server_that_the_environment_names_if_nobody_names_another(
    server: ScriptedServer, scripted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_BASE_URL", server.base_url)
    monkeypatch.setenv("RAGCACHE_API_KEY", "the-key")
    llm = RAGCacheLLM()
    assert (llm.engine.base_url, llm.engine.api_key) == (server.base_url, "the-key")
    llm.close()
    monkeypatch.setenv("RAGCACHE_BASE_URL", "http://127.0.0.1:1/v1")
    assert RAGCacheLLM(scripted).engine is scripted
    other = RAGCacheLLM(api_base=server.base_url, api_key="another")
    assert other.engine.api_key == "another"
    other.close()


async def test_connects_by_itself_to_an_address_and_closes_only_that(server: ScriptedServer, scripted: Engine) -> None:
    for llm in (RAGCacheLLM(api_base=server.base_url, api_key="anything"), RAGCacheLLM(base_url=server.url)):
        assert llm.metadata.model_name == server.model
        assert llm.complete("Hello?").text
        llm.close()
        with pytest.raises(EngineError):
            llm.complete("Hello?")

    shared = RAGCacheLLM(scripted)
    shared.close()
    assert shared.complete("Hello?").text


@every_way
async def test_answer_carries_what_the_request_cost(ask: Ask, llm: RAGCacheLLM) -> None:
    text, extra = await ask(llm)
    assert text == f"You said: {QUESTION}"
    stats = request_stats_from_dict(extra["ragcache"])
    assert stats.num_prompt_tokens == extra["prompt_tokens"] > 0
    assert stats.num_output_tokens == extra["completion_tokens"] > 0
    assert stats.num_cached_tokens == 0
    assert stats.total_s > 0


@every_way
async def test_second_time_finds_the_prompt_cached(ask: Ask, llm: RAGCacheLLM) -> None:
    await ask(llm)
    _, extra = await ask(llm)
    assert 0 < extra["ragcache"]["num_cached_tokens"] < extra["ragcache"]["num_prompt_tokens"]


@pytest.mark.parametrize("ask", STREAMED)
async def test_stream_measures_the_time_to_its_first_token(ask: Ask, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.script(Reply("one two three", wait_s=0.05, token_wait_s=0.02))
    _, extra = await ask(llm)
    stats = request_stats_from_dict(extra["ragcache"])
    assert stats.ttft_s is not None
    assert 0.05 <= stats.ttft_s < stats.total_s


@pytest.mark.parametrize("ask", WHOLE)
async def test_answer_that_is_not_streamed_has_no_time_to_first_token(ask: Ask, llm: RAGCacheLLM) -> None:
    _, extra = await ask(llm)
    assert extra["ragcache"]["ttft_s"] is None


@pytest.mark.parametrize("ask", [achat, acomplete, astream_chat, astream_complete])
async def test_waiting_for_the_engines_figures_holds_up_no_event_loop(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    server.cache, server.cache_wait_s = THREE_TIERS, 0.2
    asking, num_turns = asyncio.ensure_future(ask(llm)), 0
    while not asking.done():
        num_turns += bool(server.cache_questions)
        await asyncio.sleep(0.01)
    _, extra = await asking
    assert extra["ragcache"]["num_gpu_tokens"] is not None
    assert num_turns > 3


@pytest.mark.parametrize(
    ("ask", "is_chat_model"),
    [(ask, True) for ask in WHOLE + STREAMED]
    + [(ask, False) for ask in (complete, acomplete, stream_complete, astream_complete)],
)
async def test_answer_and_event_say_which_tier_the_tokens_came_from(
    ask: Ask, is_chat_model: bool, scripted: Engine, server: ScriptedServer, event_log: EventLog
) -> None:
    server.cache = THREE_TIERS
    llm = RAGCacheLLM(scripted, is_chat_model=is_chat_model, max_tokens=40)
    await ask(llm)
    _, extra = await ask(llm)
    stats = request_stats_from_dict(extra["ragcache"])
    quarter = stats.num_cached_tokens // 4
    by_tier = (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens)
    assert by_tier == (stats.num_cached_tokens - 2 * quarter, quarter, quarter)
    assert stats.num_loaded_bytes == 2 * quarter * 1024 > 0
    assert stats.num_stored_bytes == stats.num_computed_tokens * 1024
    assert stats.queue_s == 0.001
    assert (stats.ttft_s == 0.002) == (ask in WHOLE)
    event = event_log.of(CacheStatsEvent)[-1]
    assert event.stats == stats
    assert (event.num_disk_tokens, event.queue_s) == (quarter, 0.001)
    assert len(server.cache_questions) == 3


@every_way
async def test_answer_of_plain_vllm_says_nothing_of_tiers(ask: Ask, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    for _ in range(2):
        _, extra = await ask(llm)
        assert (extra["ragcache"]["num_gpu_tokens"], extra["ragcache"]["queue_s"]) == (None, None)
    assert server.cache_questions == ["stats"]


@every_way
async def test_one_request_publishes_each_event_once(ask: Ask, llm: RAGCacheLLM, event_log: EventLog) -> None:
    _, extra = await ask(llm)
    of_chat, of_text = (LLMChatStartEvent, LLMChatEndEvent), (LLMCompletionStartEvent, LLMCompletionEndEvent)
    kinds = of_chat if "chat" in ask.__name__ else of_text
    assert len(event_log.of(*of_chat, *of_text)) == len(event_log.of(*kinds)) == 2
    (event,) = event_log.of(CacheStatsEvent)
    assert event.stats.to_dict() == extra["ragcache"]
    assert event.model == llm.model
    assert event.span_id == event_log.of(*kinds)[0].span_id is not None


async def test_event_of_a_stream_comes_after_its_last_token(llm: RAGCacheLLM, event_log: EventLog) -> None:
    await astream_chat(llm)
    kinds = [type(e) for e in event_log.events]
    told = kinds.index(CacheStatsEvent)
    tokens = [e for e in event_log.of(LLMChatInProgressEvent) if e.response.delta]
    assert event_log.events.index(tokens[-1]) < told < kinds.index(LLMChatEndEvent)


async def test_stream_of_a_server_without_token_counts_still_ends_with_statistics(
    scripted: Engine, event_log: EventLog
) -> None:
    llm = RAGCacheLLM(scripted, additional_kwargs={"stream_options": {"include_usage": False}})
    text, extra = await stream_chat(llm)
    assert text == f"You said: {QUESTION}"
    assert extra["ragcache"]["ttft_s"] is not None
    assert len(event_log.of(CacheStatsEvent)) == 1
    assert (await astream_chat(llm))[0] == text


async def test_handler_sums_up_tokens_by_tier(llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog) -> None:
    handler = CacheStatsEventHandler()
    await chat(llm)
    server.cache = THREE_TIERS
    told = RAGCacheLLM(llm.engine)
    told.engine._cache_stats._is_there = None
    for ask in (chat, stream_chat):
        await ask(told)
    for event in event_log.events:
        handler.handle(event)
    first, *rest = (e.stats for e in event_log.of(CacheStatsEvent))
    assert first.num_gpu_tokens is None
    for name in ("num_gpu_tokens", "num_host_tokens", "num_disk_tokens", "num_loaded_bytes", "num_stored_bytes"):
        assert getattr(handler.summary(), name) == sum(getattr(stats, name) for stats in rest) > 0
    summary = handler.summary()
    assert (summary.num_requests, len(summary.queue_s)) == (3, 2)
    assert summary.mean_queue_s == 0.001
    assert CacheSummary().mean_queue_s is None


async def test_handler_sums_up_the_requests(llm: RAGCacheLLM, event_log: EventLog) -> None:
    await chat(llm)
    await stream_chat(llm)
    handler = CacheStatsEventHandler()
    for event in event_log.events:
        handler.handle(event)
    first, second = event_log.of(CacheStatsEvent)
    summary = handler.summary()
    assert summary.num_requests == 2
    assert summary.num_prompt_tokens == first.num_prompt_tokens + second.num_prompt_tokens
    assert summary.num_computed_tokens == first.num_computed_tokens + second.num_computed_tokens
    assert 0 < summary.hit_rate < 1
    assert summary.mean_ttft_s == second.ttft_s
    assert handler.last is second
    assert str(handler) == str(summary)
    handler.reset()
    assert handler.summary() == CacheSummary()
    assert CacheSummary().mean_ttft_s is None
    assert CacheSummary().hit_rate == 0


@every_way
async def test_documents_that_were_retrieved_reach_the_wire(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer, scripted: Engine
) -> None:
    scripted.remember_documents([Document("storms", "the winter storms come over the northern sea")])
    _, extra = await ask(llm)
    (document,) = server.requests[-1].documents
    assert document["id"] == "storms"
    assert document["end"] > document["start"] > 0
    (stats,) = extra["ragcache"]["documents"]
    assert stats["doc_id"] == "storms"
    assert stats["num_tokens"] >= document["end"] - document["start"]


async def test_prompt_is_sent_as_token_ids_beside_its_messages(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    llm.chat(MESSAGES)
    request = server.requests[-1]
    assert list(request.kv_transfer_params["prompt_token_ids"]) == llm.engine.tokenize(
        [{"role": "user", "content": QUESTION}]
    )
    assert [m["content"] for m in request.messages] == [QUESTION]


async def test_own_request_fields_are_kept(scripted: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(scripted, additional_kwargs={"extra_body": {"top_k": 5, "kv_transfer_params": {"a": 1, "b": 1}}})
    llm.chat(MESSAGES, extra_body={"min_p": 0.1, "kv_transfer_params": {"b": 2}})
    body = server.requests[-1].body
    assert body["top_k"] == 5
    assert body["min_p"] == 0.1
    assert {"a": 1, "b": 2}.items() <= body["kv_transfer_params"].items()
    assert "prompt_token_ids" in body["kv_transfer_params"]


@pytest.mark.parametrize(
    "setting", [{"tools": []}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
async def test_request_whose_prompt_the_server_renders_is_sent_without_token_ids(
    setting: dict[str, Any], llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    response = llm.chat(MESSAGES, **setting)
    assert "prompt_token_ids" not in server.requests[-1].kv_transfer_params
    assert response.additional_kwargs["ragcache"]["num_prompt_tokens"] > 0


async def test_model_without_a_chat_template_is_asked_as_text(scripted: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(scripted, is_chat_model=False, max_tokens=40)
    await complete(llm)  # the prompt is in the cache from here on
    for ask in (complete, acomplete, stream_complete, astream_complete):
        text, extra = await ask(llm)
        assert text == f"You said: {QUESTION}"
        assert server.requests[-1].path == "/v1/completions"
        stats = request_stats_from_dict(extra["ragcache"])
        assert 0 < stats.num_cached_tokens < stats.num_prompt_tokens
        assert (stats.ttft_s is not None) == (ask in STREAMED)
        server.script(Refusal(400, "no"))
        with pytest.raises(RequestRejectedError):
            await ask(llm)
    assert "You said" in (await chat(llm))[0]
    assert llm.complete("Hello?", use_chat_completions=True).text
    assert server.requests[-1].path == "/v1/chat/completions"


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


ADD = FunctionTool.from_defaults(add)


async def test_tools_are_called_in_every_way(llm: RAGCacheLLM) -> None:
    asked = "What is 3 and 4 together?"
    responses = [
        llm.chat_with_tools([ADD], user_msg=asked),
        await llm.achat_with_tools([ADD], user_msg=asked),
        list(llm.stream_chat_with_tools([ADD], user_msg=asked))[-1],
        [r async for r in await llm.astream_chat_with_tools([ADD], user_msg=asked)][-1],
    ]
    for response in responses:
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("add", {"first": 3, "second": 4})
        assert response.additional_kwargs["ragcache"]["num_prompt_tokens"] > 0
    assert responses[2].additional_kwargs["ragcache"]["ttft_s"] is not None


async def test_call_whose_name_and_arguments_come_in_one_chunk_is_whole(
    llm: RAGCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_vllm_does(_pieces: object, calls: list[Any], _is_chat: bool) -> Iterator[dict[str, Any]]:
        for i, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            opening = {"id": call["id"], "type": "function", "index": i, "function": {"name": call["function"]["name"]}}
            begin = {"index": i, "function": {"arguments": arguments[:5]}}
            yield {"delta": {"content": " " if i == 0 else None, "tool_calls": [opening, begin]}}
            yield {"delta": {"tool_calls": [{"index": i, "function": {"arguments": arguments[5:]}}]}}

    monkeypatch.setattr("tests.support.scripted_server._deltas", as_vllm_does)
    asked = "What is 3 and 4 together?"
    for response in (
        list(llm.stream_chat_with_tools([ADD], user_msg=asked))[-1],
        [r async for r in await llm.astream_chat_with_tools([ADD], user_msg=asked)][-1],
    ):
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("add", {"first": 3, "second": 4})
        assert response.message.content == " "


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


async def test_structured_output_follows_the_schema(llm: RAGCacheLLM) -> None:
    class Keeper(BaseModel):
        name: str
        age: int

    prompt = PromptTemplate("The keeper of Zor is 'Mel', {age} years old.")
    assert llm.structured_predict(Keeper, prompt, age=41) == Keeper(name="Mel", age=41)
    assert await llm.astructured_predict(Keeper, prompt, age=41) == Keeper(name="Mel", age=41)


async def test_key_is_neither_shown_nor_published(
    server: ScriptedServer, scripted: Engine, event_log: EventLog
) -> None:
    with Engine.connect(server.url, api_key="the-secret-key", tokenizer=MODEL) as engine:
        llm = RAGCacheLLM(engine)
        llm.complete("Hello?")
        shown = [repr(llm), str(llm.to_dict()), llm.to_json(), str(llm.to_payload()), str(event_log.events)]
    assert not any("the-secret-key" in text for text in shown)
    with pytest.raises(TypeError, match="engine"):
        pickle.dumps(llm)
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(event_log.of(CacheStatsEvent)))


def test_room_without_llamaindex_names_what_to_install() -> None:
    blocked = "import sys; sys.modules['llama_index.core'] = None; import ragcache_integrations.llamaindex"
    run = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "ConfigError: llama_index.core is not installed" in run.stderr
    assert 'pip install "ragcache[llamaindex]"' in run.stderr


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_a_request_that_cannot_be_sent_is_an_error_of_ours(llm: RAGCacheLLM, endpoint: str) -> None:
    is_chat = endpoint == "chat"
    for prompt, settings in (("Who\ud800?", {}), ("Who?", {"temperature": 10**400}), ("Who?", {"top_p": float("nan")})):
        with pytest.raises(ConfigError, match="surrogate pair|64 bits|must be finite"):
            llm.complete(prompt, use_chat_completions=is_chat, **settings)
