"""Chats with tools and settings of the template on the real server: their tokens are its own, their documents known."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.vllm_plugin.server.called_tools import called_tool

FOUND = [
    Document("mirnal", "Mirnal is a town in the north. Mirnal was founded by Anna Zor, who made clocks. " * 3),
    Document("tenrik", 'Tenrik is a company.\nTenrik was founded by "Boris" Mel, and it makes ships. ' * 3),
]
SHOWN = "\n\n".join(document.text for document in FOUND)
ASKED = {"role": "user", "content": "Who founded Mirnal?"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TOOLS: dict[str, Any] = {"tools": [SEARCH]}


def called(arguments: str = '{"query": "Mirnal"}') -> dict[str, Any]:
    call = {"id": "call-1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call-1", "content": content}


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "tools": ([ASKED], TOOLS),
    "a result": ([ASKED, called(), result(SHOWN)], TOOLS),
    "a result in parts": ([ASKED, called(), result(texts(*(d.text for d in FOUND)))], TOOLS),
    "malformed arguments": ([ASKED, called("{"), result(SHOWN)], TOOLS),
    "several results": ([ASKED, called(), result("nothing"), called("[]"), result(SHOWN)], TOOLS),
    "a result without tools": ([ASKED, called(), result(SHOWN), ASKED], {}),
    "settings": ([{"role": "user", "content": SHOWN}], {"reasoning_effort": "low"}),
    "template settings": ([{"role": "user", "content": SHOWN}], {"chat_template_kwargs": {"enable_thinking": False}}),
    "several texts": ([{"role": "user", "content": texts(FOUND[0].text, FOUND[1].text, "Who?")}], {}),
    "own template": ([{"role": "user", "content": SHOWN}], {"add_generation_prompt": False}),
}


@pytest.mark.parametrize("kind", CHATS)
def test_its_tokens_are_those_of_the_server_and_its_documents_are_known(kind: str, engine: Engine) -> None:
    messages, settings = CHATS[kind]
    body = {"model": engine.model, "messages": messages, "max_tokens": 1, "return_token_ids": True, **settings}
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    answer = httpx.post(f"{engine.base_url}/chat/completions", headers=headers, json=body, timeout=60).json()
    engine.remember_documents(FOUND)
    plan = engine.integration.prompts.plan_chat(messages, settings={"extra_body": settings}, needs_tokens=True)
    assert plan.prompt is not None
    assert list(plan.prompt.token_ids) == answer["prompt_token_ids"]
    names = [] if kind == "tools" else ["mirnal", "tenrik"]
    assert [segment.doc_id for segment in plan.prompt.segments if segment.doc_id] == names
    told = engine.generate(messages, max_tokens=1, extra_body=settings).stats
    assert [document.doc_id for document in told.documents] == names
    assert told.num_prompt_tokens == len(plan.prompt.token_ids)


def test_the_second_of_two_agents_finds_the_documents_of_the_first_cached(engine: Engine) -> None:
    engine.remember_documents(FOUND)
    chat = [{"role": "system", "content": "Be brief."}, ASKED, called(), result(SHOWN)]
    first, second = (engine.generate(chat, max_tokens=8, **TOOLS) for _ in range(2))
    assert first.text == second.text
    for document in second.stats.documents:
        assert document.num_cached_tokens > document.num_tokens - 32
    assert [document.doc_id for document in second.stats.documents] == ["mirnal", "tenrik"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tool_that_an_answer_calls_is_in_its_bytes_with_the_id_of_the_request(engine: Engine, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "search"}}
    body = {
        "model": engine.model,
        "messages": [ASKED],
        "max_tokens": 60,
        "tool_choice": choice,
        "stream": stream,
        **TOOLS,
    }
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    answer = httpx.post(f"{engine.base_url}/chat/completions", headers=headers, json=body, timeout=60)
    called = called_tool(answer.content)
    assert called is not None
    response_id, tool = called
    assert tool == "search"
    assert httpx.get(f"{engine.base_url}/ragcache/requests/{response_id}", headers=headers).status_code == 200
