"""Conversations of LangChain whose documents come again: shown again as they are made, or referred to."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from ragcache_core.client import Engine
from ragcache_core.client.prompts.repeated_documents import reference_to
from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import ScriptedServer
from tests.unit.langchain_integration.ways import answered, each_way

ZOR = (
    "Zor is a lighthouse in the north of Mel, kept by Anna Krenvi since 1823, and painted white every spring. Ships "
    "sound their horns at it."
)
TOLD: list[BaseMessage] = [
    HumanMessage(f"{ZOR}\n\nWho keeps it?"),
    AIMessage("Anna Krenvi."),
    HumanMessage(f"{ZOR}\n\nSince when?"),
]
DOCUMENTS = [Document(ZOR, id="zor")]


def contents(server: ScriptedServer) -> list[str]:
    return [message["content"] for message in server.requests[-1].body["messages"]]


def test_documents_are_sent_as_the_chain_shows_them_by_itself(llm: ChatRAGCache, server: ScriptedServer) -> None:
    llm.invoke(TOLD, documents=DOCUMENTS)
    assert contents(server) == [m.content for m in TOLD]


@each_way
async def test_a_model_and_a_call_refer_to_what_was_shown(
    way: Any, engine: Engine, llm: ChatRAGCache, server: ScriptedServer
) -> None:
    expected = [TOLD[0].content, "Anna Krenvi.", f"{reference_to(ZOR)}\n\nSince when?"]
    await answered(way, ChatRAGCache(engine=engine, deduplicate=True).bind(documents=DOCUMENTS), TOLD)
    assert contents(server) == expected
    assert len(server.requests[-1].documents) == 1
    await answered(way, llm.bind(documents=DOCUMENTS, deduplicate=True), TOLD)
    assert contents(server) == expected
    assert "deduplicate" not in server.requests[-1].body


def test_what_a_tool_returned_again_is_referred_to(engine: Engine, server: ScriptedServer) -> None:
    called = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    llm = ChatRAGCache(engine=engine, deduplicate=True)
    llm.invoke([TOLD[0], AIMessage("Anna."), HumanMessage("?"), called, ToolMessage(ZOR, tool_call_id="1")],
               documents=DOCUMENTS)  # fmt: skip
    assert contents(server)[-1] == reference_to(ZOR)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_langchains_cache_tells_the_two_apart(engine: Engine, server: ScriptedServer, deduplicate: bool) -> None:
    cache = InMemoryCache()
    for option in (deduplicate, not deduplicate, deduplicate):
        ChatRAGCache(engine=engine, deduplicate=option, cache=cache, streaming=False).invoke(TOLD)
    assert len(server.requests) == 2


def test_what_is_neither_true_nor_false_is_refused_by_model_and_call(engine: Engine, llm: ChatRAGCache) -> None:
    with pytest.raises(ValueError, match="deduplicate is 'no': give True or False"):
        ChatRAGCache(engine=engine, deduplicate="no")
    with pytest.raises(ConfigError, match="deduplicate is 'no': give True or False"):
        llm.invoke(TOLD, deduplicate="no")
