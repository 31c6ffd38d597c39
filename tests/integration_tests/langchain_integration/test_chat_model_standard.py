"""LangChain's standard integration tests for chat models, twice.

``TestOnTheRealEngine`` runs what needs an engine and any model, on the demo model. Tests that look at what a capable
model would say (``NEEDS_A_CAPABLE_MODEL``) are skipped there and run in ``TestToolsOnTheScriptedServer``: on a scripted
server by default, on a real model when ``RAGCACHE_TEST_MODEL`` names one.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_integrations.langchain import ChatRAGCache
from tests.scripted_server import ScriptedServer

TEST_MODEL = os.environ.get("RAGCACHE_TEST_MODEL")
PROMPT = "The sun is a star and every planet goes around it. " * 12

NEEDS_A_CAPABLE_MODEL = {
    "test_tool_calling": "checks the arguments of the call",
    "test_tool_calling_async": "checks the arguments of the call",
    "test_bind_runnables_as_tools": "checks the arguments of the call",
    "test_agent_loop": "expects the model to call a tool of its own will",
    "test_unicode_tool_call_integration": "checks the arguments of the call",
}


class _Standard(ChatModelIntegrationTests):
    """What both classes say of ``ChatRAGCache``. Image, PDF, audio and Anthropic inputs are the model's to support."""

    engine: Engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_retries": 0}

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
            answer = AIMessageChunk("")
            for chunk in llm.stream(PROMPT):
                answer += chunk  # type: ignore[operator, assignment]
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


class TestOnTheRealEngine(_Standard):
    @pytest.fixture(autouse=True)
    def _on_the_demo_model(self, engine: Engine, request: pytest.FixtureRequest) -> None:
        if why := NEEDS_A_CAPABLE_MODEL.get(request.function.__name__):
            pytest.skip(f"needs a capable model ({why}): runs in TestToolsOnTheScriptedServer")
        self.engine = engine


class TestToolsOnTheScriptedServer(_Standard):
    @pytest.fixture(scope="class")
    def _capable_engine(self) -> Iterator[Engine]:
        if TEST_MODEL:
            arguments = {
                "enable_auto_tool_choice": True,
                "tool_call_parser": os.environ.get("RAGCACHE_TEST_TOOL_PARSER", "hermes"),
            }
            with Engine.launch(TEST_MODEL, cache=CacheConfig(), **arguments) as engine:  # type: ignore[arg-type]
                yield engine
            return
        with ScriptedServer() as server, Engine.connect(server.url) as engine:
            yield engine

    @pytest.fixture(autouse=True)
    def _on_a_capable_model(self, _capable_engine: Engine) -> None:
        self.engine = _capable_engine
