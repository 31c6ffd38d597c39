"""``ChatRAGCache`` on the real engine: what only a real engine can show."""

import json
from typing import cast
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
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


# Closing early


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
