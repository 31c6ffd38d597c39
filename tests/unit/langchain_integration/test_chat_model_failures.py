"""Closed streams, cancelled tasks, and errors of the server."""

import asyncio
import pickle
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import openai
import pytest
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import RunnableLambda

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
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import ENGINE_DEAD, Refusal, Reply, ScriptedServer, rest_of

ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)

Eventually = Callable[[Callable[[], bool]], bool]


# Closing early


def test_closing_a_stream_ends_the_request_in_the_engine(
    llm: ChatRAGCache, server: ScriptedServer, eventually: Eventually
) -> None:
    server.script(ENDLESS)
    chunks = cast("Generator[AIMessageChunk]", llm.stream("count"))
    while not next(chunks).content:
        pass
    assert server.num_running == 1
    chunks.close()
    assert eventually(lambda: server.num_running == 0)


async def test_leaving_an_asynchronous_stream_ends_the_request_in_the_engine(
    llm: ChatRAGCache, server: ScriptedServer, eventually: Eventually
) -> None:
    server.script(ENDLESS)
    async for chunk in llm.astream("count"):
        if chunk.content:
            break
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_a_task_ends_its_request_in_the_engine(
    llm: ChatRAGCache, server: ScriptedServer, eventually: Eventually, streamed: bool
) -> None:
    server.script(Reply("never", wait_s=60))

    async def ask() -> None:
        if streamed:
            async for _ in llm.astream("count"):
                pass
        else:
            await llm.ainvoke("count")

    task = asyncio.create_task(ask())
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)


# Errors


def test_a_wrong_key_is_an_engine_auth_error(server: ScriptedServer) -> None:
    with pytest.raises(EngineAuthError):
        ChatRAGCache(base_url=server.base_url, api_key="wrong").invoke("hello")


def test_a_server_that_is_not_there_is_an_engine_unreachable_error() -> None:
    with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:1"):
        ChatRAGCache(base_url="http://127.0.0.1:1", model="a-model").invoke("hello")


def test_how_long_a_request_waits_for_its_server_is_a_setting(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "is_healthy", False)
    monkeypatch.setattr(server, "rules", [lambda _: ENGINE_DEAD])
    began_s = time.monotonic()
    for timeout_s in (0, 0.3):
        llm = ChatRAGCache(base_url=server.url, api_key="test-key", restart_timeout_s=timeout_s, hang_timeout_s=None)
        with pytest.raises(EngineUnreachableError):
            llm.invoke("hello")
        llm.close()
    assert time.monotonic() - began_s < 30


def test_a_late_first_token_of_an_address_is_asked_for_once_more(server: ScriptedServer) -> None:
    server.script(Reply("late", wait_s=60), Reply("in time"))
    llm = ChatRAGCache(base_url=server.url, api_key="test-key", first_token_timeout_s=0.3)
    assert "".join(str(chunk.content) for chunk in llm.stream("hello")) == "in time"
    llm.close()


@pytest.mark.parametrize("setting", ["restart_timeout_s", "hang_timeout_s", "first_token_timeout_s"])
def test_a_time_to_recover_belongs_to_an_address_and_must_be_one(engine: Engine, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine= and {setting}= were both given"):
        ChatRAGCache(engine=engine, **{setting: 5.0})
    with pytest.raises(ValueError, match=f"{setting} is -1"):
        ChatRAGCache(base_url="http://127.0.0.1:1", **{setting: -1.0})


ANSWERS: dict[str, tuple[Reply | Refusal, type[RAGCacheError]]] = {
    "a refused request": (Refusal(400, "top_k must be positive"), RequestRejectedError),
    "a prompt that the server finds too long": (
        Refusal(400, "This model's maximum context length is 8 tokens. However, your prompt contains 9"),
        PromptTooLongError,
    ),
    "an engine that died": (ENGINE_DEAD, RAGCacheError),
    "a connection that broke": (Reply("one two three four", cut_after_tokens=2), EngineDiedError),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_errors_of_the_server_become_ours_in_every_way_to_ask(
    llm: ChatRAGCache, server: ScriptedServer, name: str
) -> None:
    answer, expected = ANSWERS[name]
    server.rules = [lambda _: answer]

    async def read() -> None:
        async for _ in llm.astream("hello"):
            pass

    with pytest.raises(expected):
        list(llm.stream("hello"))
    with pytest.raises(expected):
        await read()
    if "broke" in name:
        expected = RAGCacheError
    with pytest.raises(expected):
        llm.invoke("hello")
    with pytest.raises(expected):
        await llm.ainvoke("hello")


async def test_a_greedy_stream_that_lost_its_engine_goes_on_as_if_nothing_had_happened(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    server.names_tokens, server.rules = True, [rest_of("one two three four")]
    greedy = llm.bind(temperature=0)
    whole = AIMessageChunk("")
    for chunk in greedy.stream("hello"):
        whole += chunk
    for cut in (1, 2, 3):
        server.script(Reply("one two three four", cut_after_tokens=cut))
        again = AIMessageChunk("")
        async for chunk in greedy.astream("hello"):
            again += chunk
        assert again.content == "one two three four"
        said = again.response_metadata["ragcache"]
        assert (said["num_resumes"], said["is_resampled"]) == (1, False)
        assert again.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
        assert again.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert len(server.requests) == 7
    assert all(request.body["return_token_ids"] for request in server.requests)


async def test_a_sampled_stream_that_lost_its_engine_continues_and_says_so(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    server.names_tokens, server.rules = True, [rest_of("one two three five")]
    for cut in (1, 2, 3):
        server.script(Reply("one two three four", cut_after_tokens=cut))
        answer = AIMessageChunk("")
        async for chunk in llm.bind(temperature=0.7).astream("hello"):
            answer += chunk
        assert answer.content == "one two three five"
        assert answer.usage_metadata["output_tokens"] == 4
        said = answer.response_metadata["ragcache"]
        assert (said["num_resumes"], said["is_resampled"], said["num_output_tokens"]) == (1, True, 4)
    undisturbed = list(llm.stream("hello"))[-1].response_metadata["ragcache"]
    assert (undisturbed["num_resumes"], undisturbed["is_resampled"]) == (0, False)


@pytest.mark.parametrize("asked", [{"n": 2}, {"response_format": {"type": "json_object"}}, {"logprobs": True}])
def test_a_stream_that_cannot_continue_is_an_error_and_no_other_answer(
    llm: ChatRAGCache, server: ScriptedServer, asked: dict[str, Any]
) -> None:
    server.names_tokens = True
    server.script(Reply("one two three four", cut_after_tokens=2))
    with pytest.raises(EngineDiedError):
        list(llm.stream("hello", **asked))
    assert len(server.requests) == 1


def test_a_question_that_does_not_fit_is_refused_before_it_is_sent(llm: ChatRAGCache, server: ScriptedServer) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        llm.invoke("word " * 4000)
    assert server.requests == []


def test_an_answer_that_takes_too_long_is_an_engine_timeout_error(engine: Engine, server: ScriptedServer) -> None:
    server.script(Reply("late", wait_s=60))
    with pytest.raises(EngineTimeoutError):
        ChatRAGCache(engine=engine, timeout=0.05).invoke("hello")


async def test_a_setting_that_there_is_not_is_refused_with_the_cure(llm: ChatRAGCache, server: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match=r"no setting 'cache_salt': .* extra_body="):
        llm.invoke("Who?", cache_salt="a")
    with pytest.raises(ConfigError, match="no setting 'temprature'"):
        await llm.bind(temprature=0).ainvoke("Who?")
    assert server.requests == []


OPENAI_TYPES: dict[str, tuple[Any, type[RAGCacheError], type[openai.OpenAIError]]] = {
    "a wrong key": (Refusal(401, "Unauthorized"), EngineAuthError, openai.AuthenticationError),
    "a refused request": (Refusal(400, "top_k must be positive"), RequestRejectedError, openai.BadRequestError),
    "an unknown model": (Refusal(404, "no model"), RequestRejectedError, openai.NotFoundError),
    "an engine that failed": (Refusal(500, "a bug"), EngineError, openai.InternalServerError),
    "a connection that broke": (Reply("one two", cut_after_tokens=1), EngineDiedError, openai.APIConnectionError),
}


@pytest.mark.parametrize("name", OPENAI_TYPES)
async def test_errors_of_requests_are_those_of_the_openai_sdk_as_well(
    llm: ChatRAGCache, server: ScriptedServer, name: str
) -> None:
    answer, ours, theirs = OPENAI_TYPES[name]
    server.rules = [lambda _: answer]

    async def read() -> None:
        async for _ in llm.astream("hello"):
            pass

    for ask in (lambda: list(llm.stream("hello")), lambda: asyncio.run(read())):
        with pytest.raises(ours) as raised:
            await asyncio.to_thread(ask)
        error: Any = raised.value
        assert isinstance(error, theirs)
        assert error.message == str(error)
        assert type(pickle.loads(pickle.dumps(error))) is ours


def test_handlers_for_openais_errors_catch_those_that_no_answer_caused(engine: Engine, server: ScriptedServer) -> None:
    def second(_: object) -> str:
        return "the other model"

    def answered_by(llm: ChatRAGCache, error: type[Exception], question: str = "hello") -> str:
        return str(llm.with_fallbacks([RunnableLambda(second)], exceptions_to_handle=(error,)).invoke(question))

    nothing_there = ChatRAGCache(base_url="http://127.0.0.1:1", model="a-model")
    slow = ChatRAGCache(engine=engine, timeout=0.05)
    server.script(Reply("late", wait_s=60))
    assert answered_by(nothing_there, openai.APIConnectionError) == "the other model"
    assert answered_by(slow, openai.APITimeoutError) == "the other model"
    assert answered_by(ChatRAGCache(engine=engine), openai.BadRequestError, "word " * 4000) == "the other model"
    with pytest.raises(EngineUnreachableError):
        answered_by(nothing_there, openai.RateLimitError)


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        "'max_tokens' or 'max_completion_tokens' is too large. This model's maximum context length is 2048 tokens.",
    ],
)
def test_an_answer_that_does_not_fit_is_not_the_documents_fault(
    llm: ChatRAGCache, server: ScriptedServer, message: str
) -> None:
    server.script(Refusal(400, message))
    with pytest.raises(PromptTooLongError, match="Lower max_tokens") as raised:
        llm.invoke("hello")
    assert "fewer documents" not in str(raised.value)


@pytest.mark.parametrize("engine", ["http://127.0.0.1:8000", 5, {"base_url": "http://host"}])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match="engine is .*: pass Engine.launch.*, or base_url="):
        ChatRAGCache(engine=engine)


@pytest.mark.parametrize("name", ["use_responses_api", "use_previous_response_id"])
def test_the_responses_api_is_refused_by_name(engine: Engine, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is True, but the Responses API"):
        ChatRAGCache(engine=engine, **{name: True})


def test_no_setting_leads_to_the_responses_api(engine: Engine, server: ScriptedServer) -> None:
    ChatRAGCache(engine=engine, use_responses_api=None, output_version="responses/v1").invoke("hello")
    assert server.requests[-1].path == "/v1/chat/completions"
