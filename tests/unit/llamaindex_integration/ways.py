"""The eight ways to ask a LlamaIndex LLM, and those to ask a query engine, alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

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


async def streamed_aquery(make: MakeEngine, question: str) -> Asked:
    response = await make(streaming=True).aquery(question)
    assert isinstance(response, AsyncStreamingResponse)
    return "".join([token async for token in response.response_gen]), response.metadata or {}


async def tool_call(make: MakeEngine, question: str) -> Asked:
    output = QueryEngineTool.from_defaults(make(), name="search").call(input=question)
    assert isinstance(output.raw_output, Response)
    return output.content, output.raw_output.metadata or {}


async def tool_acall(make: MakeEngine, question: str) -> Asked:
    output = await QueryEngineTool.from_defaults(make(), name="search").acall(input=question)
    assert isinstance(output.raw_output, Response)
    return output.content, output.raw_output.metadata or {}


class OneStep(Workflow):
    """Answers in one step."""

    def __init__(self, query_engine: RAGCacheQueryEngine) -> None:
        super().__init__(timeout=30)
        self.query_engine = query_engine

    @step
    async def answer(self, event: StartEvent) -> StopEvent:
        response = await self.query_engine.aquery(event.question)
        assert isinstance(response, AsyncStreamingResponse)
        return StopEvent(result=await response.get_response())


async def in_a_workflow(make: MakeEngine, question: str) -> Asked:
    response = await OneStep(make(streaming=True)).run(question=question)
    return str(response), response.metadata or {}


QUERIES = [query, aquery, streamed_query, streamed_aquery, tool_call, tool_acall, in_a_workflow]
every_query = pytest.mark.parametrize("ask", QUERIES, ids=lambda f: f.__name__)
