"""LangChain's standard integration tests for chat models, twice.

``TestOnTheRealEngine`` runs what any model can do, on the demo model. Tests that look at what only a capable model
would say (``NEEDS_A_CAPABLE_MODEL``) are skipped there and run in ``TestToolsOnTheScriptedServer``: on a scripted
server by default, on a real model when ``RAGCACHE_TEST_MODEL`` names one.
"""

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import ScriptedServer

TEST_MODEL = os.environ.get("RAGCACHE_TEST_MODEL")
PROMPT = "The sun is a star and every planet goes around it. " * 12

_ARGUMENTS = "it checks what the model puts into a tool call"
_JSON = "the demo model's tokens are words with a space between them, so that no grammar can make it spell JSON"
NEEDS_A_CAPABLE_MODEL = {
    "test_agent_loop": "it expects a call of a tool that the demo model was not trained for",
    "test_bind_runnables_as_tools": _ARGUMENTS,
    "test_json_mode": _JSON,
    "test_structured_few_shot_examples": _JSON,
    "test_structured_output": _JSON,
    "test_structured_output_async": _JSON,
    "test_structured_output_optional_param": _JSON,
    "test_structured_output_pydantic_2_v1": _JSON,
    "test_tool_calling": _ARGUMENTS,
    "test_tool_calling_async": _ARGUMENTS,
    "test_tool_calling_with_no_arguments": _JSON,
    "test_tool_choice": _JSON,
    "test_unicode_tool_call_integration": _ARGUMENTS,
}


class _Standard(ChatModelIntegrationTests):
    """What both classes say of ``ChatRAGCache``. Image, PDF, audio and Anthropic inputs are the model's to support."""

    engine: Engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 64}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return self.engine.model

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatRAGCache(engine=self.engine, max_tokens=8)
        llm.invoke(PROMPT)
        if not stream:
            answer = llm.invoke(PROMPT)
        else:
            first, *rest = cast("list[AIMessageChunk]", list(llm.stream(PROMPT)))
            answer = first + rest
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


class TestOnTheRealEngine(_Standard):
    @pytest.fixture(autouse=True)
    def _on_the_demo_model(self, engine: Engine, request: pytest.FixtureRequest) -> None:
        if why := NEEDS_A_CAPABLE_MODEL.get(request.function.__name__):
            pytest.skip(f"runs in TestToolsOnTheScriptedServer only: {why}")
        self.engine = engine


@pytest.fixture(scope="module")
def capable_engine() -> Iterator[Engine]:
    """A scripted server, or the model of ``RAGCACHE_TEST_MODEL``, with the parser of ``RAGCACHE_TEST_TOOL_PARSER``."""
    if TEST_MODEL is None:
        with ScriptedServer() as server, Engine.connect(server.url) as engine:
            yield engine
    else:
        parser = os.environ.get("RAGCACHE_TEST_TOOL_PARSER", "hermes")
        with Engine.launch(TEST_MODEL, enable_auto_tool_choice=True, tool_call_parser=parser) as engine:
            yield engine


class TestToolsOnTheScriptedServer(_Standard):
    @pytest.fixture(autouse=True)
    def _on_a_capable_model(self, capable_engine: Engine) -> None:
        self.engine = capable_engine
