"""The eight ways to ask a LlamaIndex LLM, and the two to ask a query engine, alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import StreamingResponse

from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import until

QUESTION = "Who keeps the lighthouse of Zor when the winter storms come over the northern sea again?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]

Asked = tuple[str, dict[str, Any]]
"""The text of an answer, and the additional_kwargs of its last response."""


async def chat(llm: RAGCacheLLM) -> Asked:
    response = llm.chat(MESSAGES)
    return response.message.content or "", response.additional_kwargs


async def achat(llm: RAGCacheLLM) -> Asked:
    response = await llm.achat(MESSAGES)
    return response.message.content or "", response.additional_kwargs


async def complete(llm: RAGCacheLLM) -> Asked:
    response = llm.complete(QUESTION)
    return response.text, response.additional_kwargs


async def acomplete(llm: RAGCacheLLM) -> Asked:
    response = await llm.acomplete(QUESTION)
    return response.text, response.additional_kwargs


async def stream_chat(llm: RAGCacheLLM) -> Asked:
    responses = list(llm.stream_chat(MESSAGES))
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


async def astream_chat(llm: RAGCacheLLM) -> Asked:
    responses = [r async for r in await llm.astream_chat(MESSAGES)]
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


async def stream_complete(llm: RAGCacheLLM) -> Asked:
    responses = list(llm.stream_complete(QUESTION))
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


async def astream_complete(llm: RAGCacheLLM) -> Asked:
    responses = [r async for r in await llm.astream_complete(QUESTION)]
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


Ask = Callable[[RAGCacheLLM], Awaitable[Asked]]
WHOLE: list[Ask] = [chat, achat, complete, acomplete]
STREAMED: list[Ask] = [stream_chat, astream_chat, stream_complete, astream_complete]
every_way = pytest.mark.parametrize("ask", WHOLE + STREAMED, ids=lambda f: f.__name__)


def wait_until_idle(server: ScriptedServer) -> None:
    assert until(lambda: server.num_running == 0)


# A query engine

MakeEngine = Callable[..., RAGCacheQueryEngine]


async def query(make: MakeEngine, question: str) -> Asked:
    response = make().query(question)
    return str(response), response.metadata or {}


async def aquery(make: MakeEngine, question: str) -> Asked:
    response = await make().aquery(question)
    return str(response), response.metadata or {}


async def streamed_query(make: MakeEngine, question: str) -> Asked:
    response = make(streaming=True).query(question)
    assert isinstance(response, StreamingResponse)
    return "".join(response.response_gen), response.metadata or {}
