"""``ChatRAGCache`` on the real engine: what only a real engine can show."""

import asyncio
import json
from collections.abc import Callable, Generator
from time import monotonic, sleep
from typing import Any, cast
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.errors import EngineAuthError, EngineUnreachableError, PromptTooLongError, RequestRejectedError
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    format_documents,
    prompt_from_layout,
)


def documents(count: int = 3) -> list[Document]:
    """Return documents that no test has shown before."""
    topic = f"Nalna{uuid4().hex[:8]}"
    facts = "It lies in Memgexdak. It was founded by Jonas Foksan. Its river is the Havmirn. "
    return [Document(f"{topic}-{i}", f"{topic} {i} is a city. {facts * 3}".strip()) for i in range(count)]


def asked(shown: list[Document], question: str) -> list[BaseMessage]:
    values = {"context": format_documents(shown), "question": question}
    return prompt_from_layout().invoke(values).to_messages()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline_s = monotonic() + 20.0
    while not condition() and monotonic() < deadline_s:
        sleep(0.02)
    return condition()


@pytest.fixture
def llm(engine: Engine) -> ChatRAGCache:
    return ChatRAGCache(engine=engine, max_tokens=8, temperature=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_second_question_about_the_same_documents_finds_them_cached(llm: ChatRAGCache, streamed: bool) -> None:
    shown = documents()
    stats = []
    for question in ("Who founded it?", "What is its river?"):
        handler = CacheStatsCallbackHandler()
        messages = asked(shown, question)
        if streamed:
            list(llm.stream(messages, {"callbacks": [handler]}, documents=shown))
        else:
            answer = llm.invoke(messages, {"callbacks": [handler]}, documents=shown)
            assert answer.usage_metadata is not None
            stats_dict = answer.response_metadata["ragcache"]
            assert answer.usage_metadata["input_token_details"]["cache_read"] == stats_dict["num_cached_tokens"]
        ((_, seen),) = handler.runs
        stats.append(seen)

    cold, warm = stats
    assert [d.doc_id for d in warm.documents] == [d.doc_id for d in shown]
    assert all(d.num_cached_tokens == 0 for d in cold.documents)
    assert [d.num_cached_tokens for d in warm.documents[:2]] == [d.num_tokens for d in warm.documents[:2]]
    assert warm.num_cached_tokens > cold.num_cached_tokens
    assert warm.ttft_s is not None
    assert 0 < warm.ttft_s <= warm.total_s
    assert (warm.num_gpu_tokens, warm.num_host_tokens, warm.num_disk_tokens) == (warm.num_cached_tokens, 0, 0)
    assert cold.num_stored_bytes
    assert warm.queue_s is not None


def test_token_ids_of_the_plan_are_those_of_the_server(llm: ChatRAGCache, engine: Engine) -> None:
    """Announcing documents changes nothing of the prompt: the same request without them is found cached."""
    shown = documents()
    messages = asked(shown, "Who founded it?")
    planned = llm.invoke(messages, documents=shown)
    plain = llm.invoke(messages, extra_body={"add_generation_prompt": True})  # left to the server's own template
    assert planned.usage_metadata is not None
    assert plain.usage_metadata is not None
    assert plain.usage_metadata["input_tokens"] == planned.usage_metadata["input_tokens"]
    assert plain.usage_metadata["input_token_details"]["cache_read"] > plain.usage_metadata["input_tokens"] // 2
    assert plain.content == planned.content


def test_an_asynchronous_answer_is_the_blocking_one(llm: ChatRAGCache) -> None:
    messages = asked(documents(), "Who founded it?")
    blocking = llm.invoke(messages).content

    async def ask() -> list[object]:
        streamed = "".join([str(c.content) async for c in llm.astream(messages)])
        return [(await llm.ainvoke(messages)).content, streamed, *[a.content for a in await llm.abatch([messages] * 2)]]

    assert asyncio.run(ask()) == [blocking] * 4


# Closing early

LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.0, "extra_body": {"ignore_eos": True, "n": 4}}
"""Four answers of 1,500 tokens each: seconds of work, also for a model that needs a millisecond for a step."""


def test_closing_a_stream_leaves_no_running_request(engine: Engine) -> None:
    llm = ChatRAGCache(engine=engine, **LONG)
    chunks = cast("Generator[AIMessageChunk]", llm.stream("Tell me about Nalna."))
    while not next(chunks).content:
        pass
    chunks.close()
    assert eventually(lambda: engine.stats().num_running == 0)


async def test_leaving_an_asynchronous_stream_leaves_no_running_request(engine: Engine) -> None:
    llm = ChatRAGCache(engine=engine, **LONG)
    async for chunk in llm.astream("Tell me about Nalna."):
        if chunk.content:
            break
    assert await asyncio.to_thread(eventually, lambda: engine.stats().num_running == 0)


async def test_a_cancelled_task_leaves_no_running_request(engine: Engine) -> None:
    llm = ChatRAGCache(engine=engine, **LONG)
    task = asyncio.create_task(llm.ainvoke("Tell me about Nalna."))
    await asyncio.sleep(0.5)  # it takes seconds, and a busy server may be as long in saying that it runs
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(eventually, lambda: engine.stats().num_running == 0)


# Structure and tools


def test_a_grammar_holds_on_a_model_that_knows_no_json(llm: ChatRAGCache) -> None:
    schema = {"name": "number", "schema": {"type": "integer", "enum": [17, 42]}}
    answer = llm.invoke("What is Nalna?", response_format={"type": "json_schema", "json_schema": schema})
    assert isinstance(answer.content, str)
    assert json.loads(answer.content) in (17, 42)


@tool
def search(query: str) -> str:
    """Search the documents."""
    return query


@pytest.mark.parametrize("streamed", [False, True])
def test_the_demo_model_calls_the_tool_it_was_trained_for(engine: Engine, streamed: bool) -> None:
    llm = ChatRAGCache(engine=engine, max_tokens=32, temperature=0).bind_tools([search])
    messages = [SystemMessage(PromptLayout().static_prefix), HumanMessage("Who founded Nalna?")]
    if streamed:
        first, *rest = cast("list[AIMessageChunk]", list(llm.stream(messages)))
        answer: AIMessage = first + rest
    else:
        answer = llm.invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "search"
    assert "Nalna" in call["args"]["query"]
    assert answer.response_metadata["ragcache"]["num_prompt_tokens"] > 0


# Errors


def test_errors_of_a_real_server_are_ours(engine: Engine) -> None:
    with pytest.raises(EngineAuthError):
        ChatRAGCache(base_url=engine.base_url, api_key="wrong").invoke("hello")
    with pytest.raises(EngineUnreachableError):
        ChatRAGCache(base_url="http://127.0.0.1:9", api_key="x").invoke("hello")
    with pytest.raises(RequestRejectedError):
        ChatRAGCache(engine=engine, model="another-model").invoke("hello")
    with pytest.raises(RequestRejectedError):
        ChatRAGCache(engine=engine, temperature=-1).invoke("hello")


def test_a_prompt_or_an_answer_that_does_not_fit_is_too_long(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError):
        ChatRAGCache(engine=engine).invoke("word " * 5000)
    with pytest.raises(PromptTooLongError):
        ChatRAGCache(engine=engine, max_tokens=5000).invoke("hello")
    with pytest.raises(PromptTooLongError):
        list(ChatRAGCache(engine=engine, max_tokens=5000).stream("hello"))


def test_a_model_joins_the_engine_by_its_address(engine: Engine) -> None:
    llm = ChatRAGCache(base_url=engine.base_url, api_key=engine.api_key, max_tokens=4)
    assert llm.invoke("hello").response_metadata["model_name"] == engine.model
    llm.close()
