"""Chats of LlamaIndex whose documents come again: shown again as they are made, or referred to."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.client.prompts.repeated_documents import reference_to
from ragcache_core.errors import ConfigError
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.support.scripted_server import ScriptedServer

ZOR = (
    "Zor is a lighthouse in the north of Mel, kept by Anna Krenvi since 1823, and painted white every spring. Ships "
    "sound their horns at it."
)
TOLD = [
    ChatMessage(role="user", content=f"{ZOR}\n\nWho keeps it?"),
    ChatMessage(role="assistant", content="Anna Krenvi."),
    ChatMessage(role="user", content=f"{ZOR}\n\nSince when?"),
]


def last(server: ScriptedServer) -> str:
    content: str = server.requests[-1].body["messages"][-1]["content"]
    return content


def test_an_llm_and_a_call_refer_to_what_was_shown(scripted: Engine, server: ScriptedServer) -> None:
    scripted.remember_documents([Document("zor", ZOR)], query="Since when?")
    RAGCacheLLM(scripted, max_tokens=20).chat(TOLD)
    assert last(server) == TOLD[-1].content
    RAGCacheLLM(scripted, max_tokens=20, deduplicate=True).chat(TOLD)
    assert last(server) == f"{reference_to(ZOR)}\n\nSince when?"
    list(RAGCacheLLM(scripted, max_tokens=20).stream_chat(TOLD, deduplicate=True))
    assert last(server) == f"{reference_to(ZOR)}\n\nSince when?"
    RAGCacheLLM(scripted, max_tokens=20, deduplicate=True).chat(TOLD, deduplicate=False)
    assert last(server) == TOLD[-1].content
    assert "deduplicate" not in server.requests[-1].body


def test_what_is_neither_true_nor_false_is_refused_by_the_llm_and_by_a_call(scripted: Engine) -> None:
    with pytest.raises(ConfigError, match="deduplicate is 'no': give True or False"):
        RAGCacheLLM(scripted, deduplicate="no")
    for ask in (lambda llm: llm.chat(TOLD, deduplicate=1), lambda llm: llm.complete("?", deduplicate=1)):
        with pytest.raises(ConfigError, match="deduplicate is 1: give True or False"):
            ask(RAGCacheLLM(scripted))
