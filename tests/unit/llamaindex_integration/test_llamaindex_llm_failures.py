"""RAGCacheLLM when its reader leaves early, and when the server does not answer as it should."""

from __future__ import annotations

import pytest
from llama_index.core.tools import FunctionTool

from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    PromptTooLongError,
)
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.support.scripted_server import ScriptedServer
from tests.unit.llamaindex_integration.ways import (
    MESSAGES,
)


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


async def test_prompt_with_tools_that_is_too_long_is_refused_by_the_server(llm: RAGCacheLLM) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="word " * 3000)


# What there is not


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
