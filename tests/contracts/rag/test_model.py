"""A model of both frameworks: its statistics, the documents of its prompts, its errors, and streams that are left."""

from __future__ import annotations

import asyncio
import gc
import pickle
from typing import Any

import openai
import pytest

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    EngineAuthError,
    EngineDiedError,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    PromptTooLongError,
    RAGCacheError,
    RequestRejectedError,
)
from ragcache_core.stats import request_stats_from_dict
from tests.contracts.rag.frameworks import Framework
from tests.support.scripted_server import ENGINE_DEAD, THREE_TIERS, Refusal, Reply, ScriptedServer, rest_of
from tests.support.waiting import until

QUESTION = "Who keeps the lighthouse of Zor when the winter storms come over the northern sea again?"
STORMS = Document("storms", "the winter storms come over the northern sea")
ENDLESS = Reply("word " * 1000, token_wait_s=0.01)


async def plain(framework: Framework, model: Any, prompt: Any = QUESTION, **call: Any) -> Any:
    return await framework.ask(next(iter(framework.asks)), model, prompt, **call)


# Statistics


async def test_an_answer_reports_the_statistics_of_its_request(
    framework: Framework, ask: str, server: ScriptedServer
) -> None:
    framework.engine.remember_documents([STORMS])
    cold = request_stats_from_dict((await framework.ask(ask, framework.model(), QUESTION)).stats)
    assert cold.num_cached_tokens == 0
    answer = await framework.ask(ask, framework.model(), QUESTION)
    assert answer.text == f"You said: {QUESTION}"
    warm = request_stats_from_dict(answer.stats)
    assert 0 < warm.num_cached_tokens < warm.num_prompt_tokens == cold.num_prompt_tokens
    assert warm.num_output_tokens > 0
    assert 0 < (warm.ttft_s or 1e-9) <= warm.total_s
    (document,) = server.requests[-1].documents
    assert document == {"id": "storms", "text": STORMS.text}
    (stats,) = warm.documents
    assert stats.doc_id == "storms"
    assert abs(stats.num_tokens - len(framework.engine.tokenizer.encode(STORMS.text).token_ids)) <= 1
    assert 0 < stats.num_cached_tokens <= stats.num_tokens


async def test_plain_vllm_answers_with_the_statistics_of_its_usage_alone(
    framework: Framework, ask: str, server: ScriptedServer
) -> None:
    server.cache, server.finds_documents = None, False
    with Engine.connect(server.url) as engine:
        engine.remember_documents([STORMS])
        await framework.ask(ask, framework.model(engine=engine), QUESTION)
        answer = await framework.ask(ask, framework.model(engine=engine), QUESTION)
    warm = request_stats_from_dict(answer.stats)
    assert 0 < warm.num_cached_tokens < warm.num_prompt_tokens
    assert (warm.ttft_s is not None) == ("stream" in ask)
    assert (warm.num_gpu_tokens, warm.num_loaded_bytes, warm.queue_s, warm.documents) == (None, None, None, ())
    assert "kv_transfer_params" not in server.requests[-1].body
    assert set(server.cache_questions) == {"stats", "tokenizer"}


async def test_an_answer_reports_which_tier_its_tokens_came_from(
    framework: Framework, ask: str, server: ScriptedServer
) -> None:
    server.cache = THREE_TIERS
    model = framework.model()
    await framework.ask(ask, model, QUESTION)
    stats = request_stats_from_dict((await framework.ask(ask, model, QUESTION)).stats)
    quarter = stats.num_cached_tokens // 4
    by_tier = (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens)
    assert by_tier == (stats.num_cached_tokens - 2 * quarter, quarter, quarter)
    assert stats.num_loaded_bytes == 2 * quarter * 1024 > 0
    assert stats.num_stored_bytes == stats.num_computed_tokens * 1024
    assert stats.queue_s == 0.001
    assert (stats.ttft_s == 0.002) == ("stream" not in ask)
    assert len(server.cache_questions) == 1 + len(server.requests)


async def test_waiting_for_the_engines_statistics_holds_up_no_event_loop(
    framework: Framework, server: ScriptedServer
) -> None:
    server.cache, server.cache_wait_s = THREE_TIERS, 0.2
    for way in [name for name in framework.asks if name in ("ainvoke", "astream", "achat", "astream_complete")]:
        server.cache_questions.clear()
        asking, num_turns = asyncio.ensure_future(framework.ask(way, framework.model(), QUESTION)), 0
        while not asking.done():
            num_turns += bool(server.cache_questions)
            await asyncio.sleep(0.01)
        assert (await asking).stats["num_gpu_tokens"] is not None
        assert num_turns > 3


async def test_the_handler_sums_up_the_requests(framework: Framework, server: ScriptedServer) -> None:
    server.cache = THREE_TIERS
    framework.engine.remember_documents([STORMS])
    model, ways = framework.model(), list(framework.asks)[:4]
    stats = [request_stats_from_dict((await framework.ask(way, model, QUESTION)).stats) for way in ways]
    summary = framework.summary()
    assert summary.num_requests == len(stats) == 4
    for name in ("prompt", "cached", "computed", "output", "gpu", "host", "disk"):
        assert getattr(summary, f"num_{name}_tokens") == sum(getattr(each, f"num_{name}_tokens") for each in stats) > 0
    assert summary.num_loaded_bytes == sum(each.num_loaded_bytes or 0 for each in stats)
    assert summary.hit_rate == summary.num_cached_tokens / summary.num_prompt_tokens
    assert summary.queue_s == (0.001,) * 4
    assert summary.mean_ttft_s is not None
    assert summary.documents["storms"].num_requests == 4
    assert "4 requests" in str(summary)
    server.script(Refusal(400, "no"))
    with pytest.raises(RAGCacheError):
        await plain(framework, model)
    assert framework.summary().num_requests == 4


async def test_tools_are_called_and_counted(framework: Framework) -> None:
    for is_streamed in (False, True):
        calls, stats = framework.tool_calls(framework.model(), is_streamed=is_streamed)
        assert calls == [("add", {"first": 3, "second": 4})]
        assert stats["num_prompt_tokens"] > 0
        assert stats["ttft_s"] is not None


# Settings


async def test_a_model_needs_an_engine_or_an_address_and_not_both(
    framework: Framework, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGCACHE_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_BASE", "http://somewhere.else")
    with pytest.raises(ConfigError, match="RAGCACHE_BASE_URL"):
        framework.model(engine=None)
    with pytest.raises(ConfigError, match="both given"):
        framework.model(engine=framework.engine, base_url="http://elsewhere:8000/v1")
    for no_engine in ("http://127.0.0.1:8000", 5):
        with pytest.raises(ConfigError, match="engine is .*: pass Engine.launch"):
            framework.model(engine=no_engine)
    monkeypatch.setenv("RAGCACHE_BASE_URL", server.base_url)
    model = framework.model(engine=None)
    assert (await plain(framework, model, "hello")).text == "You said: hello"
    model.close()


async def test_a_model_closes_the_connection_that_it_opened_and_no_other(
    framework: Framework, server: ScriptedServer
) -> None:
    for url in (server.url, server.base_url):
        model = framework.model(base_url=url, api_key="anything")
        assert (await plain(framework, model, "hello")).text
        model.close()
        with pytest.raises(EngineError):
            await plain(framework, model, "hello")
    shared = framework.model()
    shared.close()
    assert (await plain(framework, shared, "hello")).text


async def test_a_key_is_never_shown_and_openais_never_sent(
    framework: Framework, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.delenv("RAGCACHE_API_KEY", raising=False)
    model = framework.model(base_url=server.url)
    await plain(framework, model, "hello")
    assert "sk-secret" not in str(server.requests[-1].authorization)
    model.close()
    with Engine.connect(server.url, api_key="the-secret-key") as engine:
        model = framework.model(engine=engine)
        assert not any("the-secret-key" in shown for shown in (repr(model), str(model)))
        with pytest.raises(TypeError, match="holds an engine"):
            pickle.dumps(model)


async def test_a_late_first_token_of_an_address_is_asked_for_once_more(
    framework: Framework, server: ScriptedServer
) -> None:
    model = framework.model(base_url=server.url, first_token_timeout_s=0.3)
    server.script(Reply("late", wait_s=60), Reply("in time"))
    (way,) = [name for name in framework.asks if name in ("stream", "stream_chat")]
    assert (await framework.ask(way, model, "hello")).text == "in time"
    model.close()


# Streams that are left


@pytest.mark.parametrize("how", ["closed", "left", "unread"])
async def test_leaving_a_stream_ends_its_request(framework: Framework, how: str, server: ScriptedServer) -> None:
    for is_async in (False, True):
        server.clear()
        server.script(ENDLESS)
        gc.disable()  # closing must not depend on the collector
        try:
            stream = framework.open_stream(framework.model(), "count", is_async=is_async)
            if how != "unread":
                _ = await anext(stream) if is_async else next(stream)
                assert server.num_running == 1
            if how == "left":
                del stream
            elif is_async:
                await stream.aclose()
            else:
                stream.close()
            assert await asyncio.to_thread(until, lambda: server.num_running == 0)
        finally:
            gc.enable()
        assert framework.summary().num_requests == 0
        assert len(server.requests) == (0 if how == "unread" else 1)
    server.clear()
    assert (await plain(framework, framework.model(), "hello")).text == "You said: hello"


async def test_cancelling_a_task_ends_its_request(framework: Framework, server: ScriptedServer) -> None:
    for way in [name for name in framework.asks if name in ("ainvoke", "astream", "acomplete", "astream_chat")]:
        server.script(Reply("late", wait_s=60))
        task = asyncio.create_task(framework.ask(way, framework.model(), "count"))
        assert await asyncio.to_thread(until, lambda: server.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(until, lambda: server.num_running == 0)


# Errors


ANSWERS: dict[str, tuple[Reply | Refusal, type[RAGCacheError], type[Exception]]] = {
    "a wrong key": (Refusal(401, "Unauthorized"), EngineAuthError, openai.AuthenticationError),
    "a refused request": (Refusal(400, "top_k must be positive"), RequestRejectedError, openai.BadRequestError),
    "an unknown model": (Refusal(404, "no model"), RequestRejectedError, openai.NotFoundError),
    "an engine that failed": (Refusal(500, "a bug"), EngineError, openai.InternalServerError),
    "an engine that died": (ENGINE_DEAD, RAGCacheError, openai.OpenAIError),
    "a prompt that the server finds too long": (
        Refusal(400, "This model's maximum context length is 8 tokens. However, your prompt contains 9"),
        PromptTooLongError,
        openai.BadRequestError,
    ),
    "an answer that does not fit": (
        Refusal(400, "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens."),
        PromptTooLongError,
        openai.BadRequestError,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_errors_of_requests_are_ours_and_the_openai_sdks(
    framework: Framework, name: str, server: ScriptedServer
) -> None:
    answer, ours, theirs = ANSWERS[name]
    for way in list(framework.asks)[:4]:
        server.rules = [lambda _: answer]
        with pytest.raises(ours) as raised:
            await framework.ask(way, framework.model(), QUESTION)
        assert isinstance(raised.value, theirs)
        assert isinstance(pickle.loads(pickle.dumps(raised.value)), ours)
        if name == "an answer that does not fit":
            assert "Lower max_tokens" in str(raised.value)


@pytest.mark.parametrize(("temperature", "end"), [(0.0, "four"), (0.7, "five")])
async def test_a_stream_that_lost_its_engine_continues_and_reports_it(
    framework: Framework, stream: str, server: ScriptedServer, temperature: float, end: str
) -> None:
    server.names_tokens, server.rules = True, [rest_of(f"one two three {end}")]
    model = framework.model(temperature=temperature)
    whole = await framework.ask(stream, model, QUESTION)
    server.script(Reply("one two three four", cut_after_tokens=2))
    again = await framework.ask(stream, model, QUESTION)
    assert again.text == whole.text == f"one two three {end}"
    assert (again.stats["num_resumes"], again.stats["is_resampled"]) == (1, temperature > 0)
    assert again.stats["num_output_tokens"] == whole.stats["num_output_tokens"] == 4
    assert (whole.stats["num_resumes"], whole.stats["is_resampled"]) == (0, False)
    assert len(server.requests) == 3


@pytest.mark.parametrize("setting", [{"n": 2}, {"response_format": {"type": "json_object"}}, {"logprobs": True}])
async def test_a_stream_that_cannot_continue_is_an_error_and_no_other_answer(
    framework: Framework, server: ScriptedServer, setting: dict[str, Any]
) -> None:
    server.names_tokens = True
    server.script(Reply("one two three four", cut_after_tokens=2))
    (way,) = [name for name in framework.asks if name in ("stream", "stream_chat")]
    with pytest.raises(EngineDiedError):
        await framework.ask(way, framework.model(), "hello", **setting)
    assert len(server.requests) == 1


async def test_a_prompt_that_does_not_fit_is_an_error_of_ours(
    framework: Framework, ask: str, server: ScriptedServer
) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        await framework.ask(ask, framework.model(), "word " * 4000)


async def test_a_server_that_is_gone_or_slow_is_named(framework: Framework, server: ScriptedServer) -> None:
    with ScriptedServer() as gone:
        with Engine.connect(gone.url, tokenizer=False, restart_timeout_s=0) as engine:
            model = framework.model(engine=engine)
            gone.__exit__()
            with pytest.raises(EngineUnreachableError, match=gone.url) as raised:
                await plain(framework, model, "hello")
            assert isinstance(raised.value, openai.APIConnectionError)
    server.script(Reply("late", wait_s=60))
    with pytest.raises(EngineTimeoutError) as slow:
        await plain(framework, framework.model(timeout=0.05), "hello")
    assert isinstance(slow.value, openai.APITimeoutError)


async def test_one_model_serves_several_event_loops(framework: Framework) -> None:
    model, ways = framework.model(), list(framework.asks)

    def in_a_new_loop() -> Any:
        return asyncio.run(framework.ask(ways[1], model, "hello"))

    answers = [await framework.ask(ways[1], model, "hello"), *[await asyncio.to_thread(in_a_new_loop) for _ in "ab"]]
    assert {answer.text for answer in answers} == {"You said: hello"}
