"""Closed streams, cancelled tasks, and errors of the server."""

from collections.abc import Callable

import openai
import pytest
from langchain_core.runnables import RunnableLambda

from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    EngineUnreachableError,
)
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import Reply, ScriptedServer

ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)

Eventually = Callable[[Callable[[], bool]], bool]


# Closing early


# Errors


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


@pytest.mark.parametrize("name", ["use_responses_api", "use_previous_response_id"])
def test_the_responses_api_is_refused_by_name(engine: Engine, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is True, but the Responses API"):
        ChatRAGCache(engine=engine, **{name: True})


def test_no_setting_leads_to_the_responses_api(engine: Engine, server: ScriptedServer) -> None:
    ChatRAGCache(engine=engine, use_responses_api=None, output_version="responses/v1").invoke("hello")
    assert server.requests[-1].path == "/v1/chat/completions"
