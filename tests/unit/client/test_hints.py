"""Hints on the KV that a request leaves, on every way to ask: they are sent with the documents, or refused before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from llama_index.core.base.llms.types import ChatMessage

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import ChatRAGCache
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.support.scripted_server import ScriptedServer

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
LAYOUT = PromptLayout()
HINTS: dict[str, Any] = {"priority": 2, "retain_s": 30.0, "prefetch": ["moon"], "tool": "search"}
OWN_BODY = {"extra_body": {"kv_transfer_params": {"ragcache": {"version": 1, "ttl_s": 60.0}}, "top_k": 5}}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.remember_documents([SUN], LAYOUT.document_text)
    return engine


def ways(engine: Engine) -> dict[str, Callable[..., Any]]:
    """Return every way to ask, as functions of the request's options."""
    messages: Any = LAYOUT.messages([SUN], "What is the sun?")
    rendered = LAYOUT.render(engine.tokenizer, [SUN], "What is the sun?")
    text = messages[-1]["content"]
    chat = [ChatMessage(role="user", content=text)]
    return {
        "messages": lambda **options: engine.generate(messages, **options),
        "rendered": lambda **options: list(engine.stream(rendered, **options)),
        "asynchronous": lambda **options: asyncio.run(engine.agenerate(messages, **options)),
        "LangChain": lambda **options: ChatRAGCache(engine=engine).bind(**options).invoke(text),
        "LangChain's stream": lambda **options: list(ChatRAGCache(engine=engine).stream(text, **options)),
        "LlamaIndex": lambda **options: RAGCacheLLM(engine).chat(chat, **options),
        "LlamaIndex's stream": lambda **options: list(RAGCacheLLM(engine).stream_chat(chat, **options)),
    }


WAYS = (
    "messages", "rendered", "asynchronous", "LangChain", "LangChain's stream", "LlamaIndex", "LlamaIndex's stream",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_hints_are_sent_beside_the_documents_and_those_of_the_body(
    engine: Engine, server: ScriptedServer, way: str
) -> None:
    ways(engine)[way](**HINTS, **OWN_BODY)
    sent = server.requests[-1]
    metadata = sent.kv_transfer_params["ragcache"]
    assert {name: metadata[name] for name in (*HINTS, "ttl_s")} == {**HINTS, "ttl_s": 60.0}
    assert [document["id"] for document in sent.documents] == ["sun"]
    assert sent.body["top_k"] == 5
    assert not HINTS.keys() & sent.body.keys()


@pytest.mark.parametrize("way", WAYS)
def test_a_hint_that_cannot_be_is_refused_before_anything_is_sent(
    engine: Engine, server: ScriptedServer, way: str
) -> None:
    with pytest.raises(ConfigError, match="retain_s is -1: send seconds from 0 to 86,400"):
        ways(engine)[way](retain_s=-1)
    assert server.requests == []


def test_a_prompt_without_documents_has_its_hints(engine: Engine, server: ScriptedServer) -> None:
    engine.generate("Once upon a time", demote=True)
    assert server.requests[-1].kv_transfer_params == {"ragcache": {"version": 1, "demote": True}}
    RAGCacheLLM(engine, is_chat_model=False).complete("Once upon a time", ttl_s=0)
    assert server.requests[-1].kv_transfer_params == {"ragcache": {"version": 1, "ttl_s": 0}}


def test_hints_make_no_other_answer(engine: Engine, server: ScriptedServer) -> None:
    cache = InMemoryCache()
    for options in ({}, {"retain_s": 30}, {"priority": 1}):
        ChatRAGCache(engine=engine, cache=cache, streaming=False).invoke("What is the sun?", **options)
    assert len(server.requests) == 1
