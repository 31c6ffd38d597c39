"""What is prefilled during a search carries what separates the KV of the request that follows: salt, adapter, key."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.client.prompts.tokenizer import ModelTokenizer
from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
    to_langchain,
)
from tests.support import scripted_source
from tests.support.chat_templates import ids_of
from tests.support.scripted_server import IDLE, ScriptedServer, Seen
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage
from tests.unit.langchain_integration.conftest import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("idle")
PROMPT = prompt_from_layout()
DOCUMENT = Document("zor", "Zorval was founded in 1901 by Mel Anvik, who kept the lighthouse.")
NOT_BELOW_THE_GPU = {"kv_transfer_params": {"max_offload_tokens": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "salt": {"extra_body": {"cache_salt": "tenant-a"}},
    "adapter": {"model": "an-adapter"},
    "adapter by extra_body": {"extra_body": {"model": "an-adapter"}},
    "not below the GPU": {"extra_body": NOT_BELOW_THE_GPU},
    "all": {"model": "an-adapter", "extra_body": {"cache_salt": "tenant-a", **NOT_BELOW_THE_GPU}},
    "none": {},
}


@pytest.fixture(autouse=True)
def adapters(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "adapters", ("an-adapter",))


def separates(seen: Seen) -> dict[str, Any]:
    """Return what keeps a request's KV apart."""
    params = {k: v for k, v in seen.kv_transfer_params.items() if k not in ("ragcache", "prompt_token_ids")}
    return {
        **{name: seen.body.get(name) for name in ("model", "cache_salt")},
        "params": params,
        "key": seen.authorization,
    }


def ask(engine: Engine, llm: Any, warmed: Any, *, may_prefill: bool = True, **settings: Any) -> None:
    """Ask a chain whose search ends when something is prefilled, or at once where nothing may be."""
    num_before = len(warmed())
    last = Stage("moon sun", once=lambda: not may_prefill or len(warmed()) > num_before)
    retriever = RAGCacheRetriever(store=ScriptedSource((Stage("moon sun"), last)), engine=engine, k=2, **settings)
    chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | PROMPT | llm
    chain.invoke(QUESTION)
    assert may_prefill or len(warmed()) == num_before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_learned_prompt_is_prefilled_for_requests_like_those_before(
    name: str, engine: Engine, warmed: Any, generations: Any
) -> None:
    llm = ChatRAGCache(engine=engine, **SETTINGS[name])
    ask(engine, llm, warmed, may_prefill=False)
    ask(engine, llm, warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bound_prompt_is_prefilled_for_the_requests_of_the_only_model(
    name: str, engine: Engine, warmed: Any, generations: Any
) -> None:
    engine.bind_prompt(PROMPT, format_documents)
    ask(engine, ChatRAGCache(engine=engine, **SETTINGS[name]), warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])


def test_of_several_models_the_one_that_shows_documents_counts(engine: Engine, warmed: Any, generations: Any) -> None:
    engine.bind_prompt(PROMPT, format_documents)
    ChatRAGCache(engine=engine).invoke("Is anybody there?")
    answering = ChatRAGCache(engine=engine, model="an-adapter")
    ask(engine, answering, warmed, may_prefill=False)
    ask(engine, answering, warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])


def test_where_requests_differ_nothing_is_prefilled_for_an_unknown_one(
    engine: Engine, warmed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = ChatRAGCache(engine=engine)
    engine.bind_prompt(PROMPT, format_documents)
    for salt in "ab":
        asked = PROMPT.invoke({"context": DOCUMENT.text, "question": "Who?"})
        llm.bind(extra_body={"cache_salt": salt}, documents=[to_langchain(DOCUMENT)]).invoke(asked)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "No prefill" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "ragcache_core"):
        for salt in "abab":
            last = Stage("moon sun", once=lambda: bool(said()))
            retriever = RAGCacheRetriever(store=ScriptedSource((Stage("moon sun"), last)), engine=engine, k=2)
            chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | PROMPT
            (chain | llm.bind(extra_body={"cache_salt": salt})).invoke(QUESTION)
    assert warmed() == []
    assert len(said()) == 1
    assert "settings=" in said()[0]
    with pytest.raises(ConfigError, match="settings="):
        engine.warm([DOCUMENT])


def test_a_prompt_that_was_bound_with_settings_is_prefilled_for_them(
    engine: Engine, warmed: Any, generations: Any
) -> None:
    llm = ChatRAGCache(engine=engine)
    for salt in "abab":
        settings = {"extra_body": {"cache_salt": salt}}
        bound = engine.bind_prompt(PROMPT, format_documents, is_default=False, settings=settings)
        ask(engine, llm.bind(**settings), warmed, prompt=bound)
        assert separates(warmed()[-1]) == separates(generations()[-1])
        assert warmed()[-1].body["cache_salt"] == salt


def test_the_salt_of_the_documents_groups_is_joined_as_in_the_request(
    engine: Engine, warmed: Any, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restricted = {
        name: Document(f"restricted-{name}", f"{d.text} Keep it to yourself.", acl=["hr"])
        for name, d in scripted_source.DOCUMENTS.items()
    }
    monkeypatch.setattr(scripted_source, "DOCUMENTS", restricted)
    engine.bind_prompt(PROMPT, format_documents)
    ask(engine, ChatRAGCache(engine=engine, **SETTINGS["salt"]), warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])
    assert warmed()[0].body["cache_salt"].startswith("acl-")


@pytest.mark.parametrize("where", ["model", "call"])
def test_a_prefill_has_the_key_of_the_model_and_none_is_guessed_from_calls(where: str) -> None:
    headers = {"Authorization": "Bearer of-tenant-a"}
    with ScriptedServer(root=str(DEMO_MODEL), load=IDLE) as open_to_all, Engine.connect(open_to_all.url) as engine:
        llm = ChatRAGCache(engine=engine, **({"default_headers": headers} if where == "model" else {}))
        asked = llm.bind(extra_headers=headers) if where == "call" else llm
        seen: Any = lambda: [r for r in open_to_all.requests if r.path == "/v1/completions"]  # noqa: E731
        ask(engine, asked, seen, may_prefill=False)
        ask(engine, asked, seen, may_prefill=where == "model")
        assert open_to_all.requests[-1].authorization == "Bearer of-tenant-a"
        keys = [separates(prefill)["key"] for prefill in seen()]
        assert keys == (["Bearer of-tenant-a"] if where == "model" else []), "the next call may be another tenant's"


@pytest.mark.parametrize("asks_before", [False, True])
def test_an_agents_next_prompt_is_prefilled_for_its_own_chat(
    engine: Engine,
    server: ScriptedServer,
    warmed: Any,
    generations: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asks_before: bool,
) -> None:
    monkeypatch.setattr(server, "tokenize", ids_of(ModelTokenizer(DEMO_MODEL)))
    if asks_before:
        ask(engine, ChatRAGCache(engine=engine), warmed, may_prefill=False)
    for may_prefill in (not asks_before, True):
        num_before = len(warmed())
        last = Stage("moon sun", once=lambda: not may_prefill or len(warmed()) > num_before)  # noqa: B023
        source = ScriptedSource((Stage("moon sun"), last))
        tool = create_retriever_tool(RAGCacheRetriever(store=source, engine=engine, k=2), "search", "Search the sky.")
        agent = create_agent(ChatRAGCache(engine=engine, **SETTINGS["all"]), [tool], system_prompt="Be brief.")
        agent.invoke({"messages": [("human", QUESTION)]})
        assert may_prefill == (len(warmed()) > num_before), "the chain's prompt and the agent's are for different KV"
    assert separates(warmed()[-1]) == separates(generations()[-1])
    assert warmed()[-1].body["cache_salt"] == "tenant-a"


def test_documents_are_warmed_for_the_requests_of_the_bound_prompt(engine: Engine, server: ScriptedServer) -> None:
    engine.bind_prompt(PROMPT, format_documents, settings=SETTINGS["all"])
    assert engine.warm([DOCUMENT]) == 1
    assert separates(server.requests[-1])["cache_salt"] == "tenant-a"
    assert server.requests[-1].body["model"] == "an-adapter"
