"""RAGCacheLLM when its reader leaves early, and when the server does not answer as it should."""

from __future__ import annotations

import asyncio
import gc
import socket
import time

import pytest
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.tools import FunctionTool

from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    EngineAuthError,
    EngineDiedError,
    EngineUnreachableError,
    PromptTooLongError,
    RequestRejectedError,
)
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM
from tests.support.scripted_server import ENGINE_DEAD, Refusal, Reply, ScriptedServer, rest_of
from tests.unit.llamaindex_integration.conftest import EventLog
from tests.unit.llamaindex_integration.ways import (
    MESSAGES,
    QUESTION,
    STREAMED,
    Ask,
    acomplete,
    astream_chat,
    every_way,
    wait_until_idle,
)


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


LONG_ANSWER = Reply("word " * 1000, token_wait_s=0.01)


async def test_how_long_a_request_waits_for_its_server_is_a_setting(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "is_healthy", False)
    monkeypatch.setattr(server, "rules", [lambda _: ENGINE_DEAD])
    began_s = time.monotonic()
    for timeout_s in (0, 0.3):
        llm = RAGCacheLLM(api_base=server.url, api_key="the-key", restart_timeout_s=timeout_s, hang_timeout_s=None)
        with pytest.raises(EngineUnreachableError):
            llm.complete(QUESTION)
        llm.close()
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("setting", ["restart_timeout_s", "hang_timeout_s", "first_token_timeout_s"])
async def test_a_time_to_recover_belongs_to_an_address_and_must_be_one(scripted: Engine, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine= and {setting}= were both given"):
        RAGCacheLLM(scripted, **{setting: 5.0})
    with pytest.raises(ConfigError, match=f"{setting} is -1"):
        RAGCacheLLM(api_base="http://127.0.0.1:1", **{setting: -1.0})


async def test_closing_a_stream_early_cancels_the_request(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    for stream in (llm.stream_chat(MESSAGES), llm.stream_complete(QUESTION)):
        server.script(LONG_ANSWER)
        gc.disable()  # closing must not depend on the collector
        try:
            next(stream)
            assert server.num_running == 1
            stream.close()
            wait_until_idle(server)
        finally:
            gc.enable()


async def test_closing_an_async_stream_early_cancels_the_request(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    for stream in (await llm.astream_chat(MESSAGES), await llm.astream_complete(QUESTION)):
        server.script(LONG_ANSWER)
        gc.disable()
        try:
            await anext(stream)
            assert server.num_running == 1
            await stream.aclose()
            wait_until_idle(server)
        finally:
            gc.enable()


async def test_reader_that_walks_away_cancels_the_request(
    llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    server.script(LONG_ANSWER)
    for _ in llm.stream_chat(MESSAGES):
        break
    wait_until_idle(server)
    assert event_log.of(ExceptionEvent)  # the log holds the stream's frames, and the request was cancelled all the same
    assert not event_log.of(CacheStatsEvent)


async def test_async_reader_that_walks_away_cancels_the_request(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.script(LONG_ANSWER)
    async for _ in await llm.astream_chat(MESSAGES):
        break
    async with asyncio.timeout(5):
        while server.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_cancelled_task_cancels_the_request(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    for ask in (acomplete, astream_chat):
        server.script(Reply("late", wait_s=5))
        asking = asyncio.create_task(ask(llm))
        async with asyncio.timeout(5):
            while not server.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        wait_until_idle(server)


async def test_next_request_works_after_a_cancelled_one(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.script(LONG_ANSWER)
    stream = await llm.astream_chat(MESSAGES)
    await anext(stream)
    await stream.aclose()
    assert (await astream_chat(llm))[0] == f"You said: {QUESTION}"


async def test_stream_that_nobody_reads_asks_nothing(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    llm.stream_chat(MESSAGES).close()
    await (await llm.astream_chat(MESSAGES)).aclose()
    assert not server.requests


@every_way
async def test_server_that_is_gone_is_reported_as_unreachable(ask: Ask, llm: RAGCacheLLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    llm.api_base = address
    with pytest.raises(EngineUnreachableError, match=address.removesuffix("/v1")):
        await ask(llm)


@every_way
async def test_wrong_key_is_reported(ask: Ask, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.api_key = "another"
    with pytest.raises(EngineAuthError):
        await ask(llm)


@every_way
async def test_refusal_is_reported_in_the_servers_words(ask: Ask, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.script(Refusal(400, "temperature must be lower than the sun's"))
    with pytest.raises(RequestRejectedError, match="lower than the sun's"):
        await ask(llm)


async def test_prompt_that_is_too_long_is_refused_before_it_is_sent(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        llm.complete("word " * 3000)
    assert not server.requests


async def test_prompt_with_tools_that_is_too_long_is_refused_by_the_server(llm: RAGCacheLLM) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="word " * 3000)


@pytest.mark.parametrize("ask", STREAMED)
async def test_connection_that_breaks_in_an_answer_is_reported(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    server.script(Reply("one two three four", cut_after_tokens=2))
    with pytest.raises(EngineDiedError):
        await ask(llm)


@pytest.mark.parametrize("ask", STREAMED)
async def test_a_greedy_stream_that_lost_its_engine_goes_on_as_if_nothing_had_happened(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    server.names_tokens, server.rules, llm.temperature = True, [rest_of("one two three four")], 0.0
    expected = await ask(llm)
    server.script(Reply("one two three four", cut_after_tokens=2))
    answer = await ask(llm)
    assert answer[0] == expected[0] == "one two three four"
    assert len(server.requests) == 3
    assert (answer[1]["ragcache"]["num_resumes"], answer[1]["ragcache"]["is_resampled"]) == (1, False)


@pytest.mark.parametrize("ask", STREAMED)
async def test_a_sampled_stream_that_lost_its_engine_continues_and_says_so(
    ask: Ask, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    server.names_tokens, server.rules, llm.temperature = True, [rest_of("one two three five")], 0.7
    server.script(Reply("one two three four", cut_after_tokens=2))
    text, said = await ask(llm)
    assert text == "one two three five"
    assert (said["ragcache"]["num_resumes"], said["ragcache"]["is_resampled"]) == (1, True)
    (event,) = event_log.of(CacheStatsEvent)
    assert (event.stats.num_resumes, event.stats.is_resampled) == (1, True)
    assert (await ask(llm))[1]["ragcache"]["num_resumes"] == 0


# What there is not


@every_way
async def test_a_setting_that_there_is_not_is_refused_with_the_cure(
    ask: Ask, llm: RAGCacheLLM, scripted: Engine, server: ScriptedServer
) -> None:
    for name in ("cache_salt", "temprature"):
        with pytest.raises(ConfigError, match=rf"no setting '{name}': .* extra_body="):
            await ask(RAGCacheLLM(scripted, additional_kwargs={name: 0}))
    with pytest.raises(ConfigError, match="no setting 'top_k'"):
        llm.chat(MESSAGES, top_k=3)
    assert server.requests == []


@pytest.mark.parametrize("name", ["temprature", "top_k", "stop", "extra_body"])
def test_an_argument_that_would_be_without_effect_is_refused(name: str, scripted: Engine) -> None:
    with pytest.raises(ConfigError, match=f"RAGCacheLLM knows no '{name}': .* additional_kwargs="):
        RAGCacheLLM(scripted, **{name: {"cache_salt": "tenant-a"}})


async def test_what_openai_like_knows_is_taken(scripted: Engine, server: ScriptedServer) -> None:
    llm = RAGCacheLLM(
        scripted,
        system_prompt="Be brief.",
        reuse_client=True,
        default_headers={"x-a": "b"},
        additional_kwargs={"stop": ["zz"], "extra_body": {"cache_salt": "tenant-a"}},
    )
    llm.chat(MESSAGES, seed=1)
    sent = server.requests[-1].body
    assert (sent["stop"], sent["cache_salt"], sent["seed"]) == (["zz"], "tenant-a", 1)


def test_a_name_in_the_place_of_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine is 'my-model': pass Engine.launch"):
        RAGCacheLLM("my-model")  # type: ignore[arg-type]
