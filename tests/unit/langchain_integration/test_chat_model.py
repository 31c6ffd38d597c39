import asyncio
import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel, SecretStr

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.stats import request_stats_from_dict
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.", {"page": 3})
MOON = Document("moon", "The moon goes around the earth once in a month, and it has no light.")
ASKED = [SystemMessage("Answer."), HumanMessage(f"{SUN.text}\n\n{MOON.text}\n\nWhat is the sun?")]


def ids_on_the_wire(server: ScriptedServer) -> list[str]:
    return [document["id"] for document in server.requests[-1].documents]


# Statistics


def test_an_answer_reports_cached_tokens_and_the_statistics_of_its_request(llm: ChatRAGCache) -> None:
    cold, warm = llm.invoke(ASKED, documents=[SUN]), llm.invoke(ASKED, documents=[SUN])

    assert cold.usage_metadata is not None
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    assert warm.usage_metadata is not None
    cached = warm.usage_metadata["input_token_details"]["cache_read"]
    assert 0 < cached < warm.usage_metadata["input_tokens"]
    stats = request_stats_from_dict(warm.response_metadata["ragcache"])
    assert stats.num_cached_tokens == cached
    assert stats.num_prompt_tokens == warm.usage_metadata["input_tokens"]
    assert stats.num_output_tokens == warm.usage_metadata["output_tokens"]
    assert [d.doc_id for d in stats.documents] == ["sun"]
    assert stats.documents[0].num_cached_tokens == stats.documents[0].num_tokens
    assert stats.ttft_s is None
    assert stats.total_s > 0
    assert warm.response_metadata["model_name"] == "scripted-model"


def test_only_the_last_chunk_of_a_stream_has_the_statistics(llm: ChatRAGCache) -> None:
    llm.invoke(ASKED)
    chunks = list(llm.stream(ASKED))

    assert [c for c in chunks if "ragcache" in c.response_metadata] == [chunks[-1]]
    assert chunks[-1].chunk_position == "last"
    assert len([c for c in chunks if c.usage_metadata is not None]) == 1
    whole = sum_of(chunks)
    stats = request_stats_from_dict(whole.response_metadata["ragcache"])
    assert stats.ttft_s is not None
    assert 0 < stats.ttft_s <= stats.total_s
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_token_details"]["cache_read"] == stats.num_cached_tokens > 0
    assert whole.response_metadata["model_name"] == "scripted-model"


async def test_an_asynchronous_stream_reports_the_same_as_a_blocking_one(llm: ChatRAGCache) -> None:
    llm.invoke(ASKED)
    blocking = sum_of(list(llm.stream(ASKED)))
    awaited = sum_of([c async for c in llm.astream(ASKED)])

    assert awaited.content == blocking.content
    assert awaited.usage_metadata == blocking.usage_metadata
    for timed in ("ttft_s", "total_s"):
        assert awaited.response_metadata["ragcache"].pop(timed) > 0
        assert blocking.response_metadata["ragcache"].pop(timed) > 0
    assert awaited.response_metadata == blocking.response_metadata


async def test_batches_report_the_statistics_of_each_request(llm: ChatRAGCache) -> None:
    answers = [*llm.batch(["one", "two two"]), *await llm.abatch(["one", "two two"])]

    assert [a.content for a in answers] == ["You said: one", "You said: two two"] * 2
    for answer in answers:
        assert answer.usage_metadata is not None
        assert answer.response_metadata["ragcache"]["num_output_tokens"] == answer.usage_metadata["output_tokens"]


def test_a_stream_without_usage_still_ends_in_statistics(llm: ChatRAGCache) -> None:
    last = list(llm.stream("hello", stream_usage=False))[-1]
    assert last.response_metadata["ragcache"]["ttft_s"] > 0
    assert last.usage_metadata is None


def invoke(llm: Runnable[Any, AIMessage]) -> AIMessage:
    return llm.invoke(ASKED)


def stream(llm: Runnable[Any, AIMessage]) -> AIMessage:
    return sum_of(list(llm.stream(ASKED)))


def ainvoke(llm: Runnable[Any, AIMessage]) -> AIMessage:
    return asyncio.run(llm.ainvoke(ASKED))


def astream(llm: Runnable[Any, AIMessage]) -> AIMessage:
    async def read() -> AIMessage:
        return sum_of([chunk async for chunk in llm.astream(ASKED)])

    return asyncio.run(read())


def batch(llm: Runnable[Any, AIMessage]) -> AIMessage:
    return llm.batch([ASKED, ASKED])[1]


def abatch(llm: Runnable[Any, AIMessage]) -> AIMessage:
    return asyncio.run(llm.abatch([ASKED, ASKED]))[1]


every_way = pytest.mark.parametrize("ask", [invoke, stream, ainvoke, astream, batch, abatch])


@every_way
@pytest.mark.parametrize("settings", [{}, {"response_format": {"type": "json_object"}}, {"n": 2}])
def test_an_answer_says_which_tier_its_tokens_came_from(
    llm: ChatRAGCache, server: ScriptedServer, ask: Callable[[Any], AIMessage], settings: dict[str, Any]
) -> None:
    server.cache = THREE_TIERS
    llm.invoke(ASKED)
    answer = ask(llm.bind(**settings))

    stats = request_stats_from_dict(answer.response_metadata["ragcache"])
    quarter = stats.num_cached_tokens // 4
    by_tier = (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens)
    assert by_tier == (stats.num_cached_tokens - 2 * quarter, quarter, quarter)
    assert stats.num_loaded_bytes == 2 * quarter * 1024 > 0
    assert stats.num_stored_bytes == stats.num_computed_tokens * 1024
    assert stats.queue_s == 0.001
    assert (stats.ttft_s == 0.002) == ("stream" not in ask.__name__)
    assert len(server.cache_questions) == 1 + len(server.requests)


@every_way
def test_an_answer_of_plain_vllm_says_nothing_of_tiers(
    llm: ChatRAGCache, server: ScriptedServer, ask: Callable[[Any], AIMessage]
) -> None:
    stats = request_stats_from_dict(ask(llm).response_metadata["ragcache"])
    assert (stats.num_gpu_tokens, stats.num_loaded_bytes, stats.queue_s) == (None, None, None)
    assert set(server.cache_questions) == {"stats"}


# Documents


@pytest.mark.parametrize(
    "documents",
    [
        [MOON, SUN],
        [LangChainDocument(id=d.doc_id, page_content=d.text) for d in (SUN, MOON)],
        [{"id": d.doc_id, "page_content": d.text} for d in (SUN, MOON)],
    ],
)
def test_documents_of_a_call_reach_the_wire_as_spans(
    llm: ChatRAGCache, server: ScriptedServer, documents: list[object]
) -> None:
    llm.bind(documents=documents).invoke(ASKED)

    seen = server.requests[-1]
    assert "documents" not in seen.body
    assert ids_on_the_wire(server) == ["sun", "moon"]
    ids = seen.kv_transfer_params["prompt_token_ids"]
    for document in seen.documents:
        assert 0 < document["start"] < document["end"] < len(ids)


def test_documents_of_a_message_reach_the_wire(llm: ChatRAGCache, server: ScriptedServer) -> None:
    llm.invoke([HumanMessage(ASKED[1].content, additional_kwargs={"ragcache_documents": [SUN]})])
    assert ids_on_the_wire(server) == ["sun"]


def test_documents_that_a_retriever_of_this_engine_returned_are_found_by_their_text(
    llm: ChatRAGCache, engine: Engine, server: ScriptedServer
) -> None:
    engine.remember_documents([SUN, MOON])
    llm.invoke([HumanMessage(f"Context: {MOON.text} Question: what is it?")])
    assert ids_on_the_wire(server) == ["moon"]


def test_a_document_without_an_id_is_known_by_its_text(llm: ChatRAGCache, server: ScriptedServer) -> None:
    nameless = LangChainDocument("Mars is red, and it has two moons of its own.")
    llm.invoke(f"{nameless.page_content} Why?", documents=[nameless])
    (first,) = ids_on_the_wire(server)
    llm.invoke(f"{nameless.page_content} How?", documents=[nameless])
    assert ids_on_the_wire(server) == [first]


def test_something_else_than_a_document_is_refused(llm: ChatRAGCache) -> None:
    with pytest.raises(TypeError, match="not a document"):
        llm.invoke("hello", documents=["just text"])


def test_extra_body_of_the_user_is_kept(engine: Engine, server: ScriptedServer) -> None:
    llm = ChatRAGCache(engine=engine, extra_body={"priority": 3, "kv_transfer_params": {"mine": 1}})
    llm.invoke(ASKED, documents=[SUN])

    body = server.requests[-1].body
    assert body["priority"] == 3
    assert body["kv_transfer_params"]["mine"] == 1
    assert ids_on_the_wire(server) == ["sun"]


@tool
def search(query: str) -> str:
    """Search."""
    return f"found {query}"


def test_requests_with_tools_are_left_to_a_server_that_does_not_say_how_it_renders_them(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    answer = llm.bind_tools([search]).invoke("look for 'mars'")

    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("search", {"query": "mars"})]
    assert "prompt_token_ids" not in server.requests[-1].kv_transfer_params
    assert "ragcache" in answer.response_metadata


def test_own_settings_of_the_chat_template_are_left_to_such_a_server(llm: ChatRAGCache, server: ScriptedServer) -> None:
    llm.invoke("hello", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert "prompt_token_ids" not in server.requests[-1].kv_transfer_params
    assert server.requests[-1].body["chat_template_kwargs"] == {"enable_thinking": False}


# Tools and structured output


async def test_streamed_tool_calls_arrive_whole(llm: ChatRAGCache) -> None:
    with_tools = llm.bind_tools([search], tool_choice="any")
    whole = sum_of(list(with_tools.stream("look for 'mars'")))
    awaited = sum_of([c async for c in with_tools.astream("look for 'mars'")])

    assert [c["args"] for c in whole.tool_calls] == [{"query": "mars"}] == [c["args"] for c in awaited.tool_calls]
    assert whole.response_metadata["ragcache"]["ttft_s"] > 0


def test_structured_output_asks_for_a_grammar_by_default(llm: ChatRAGCache, server: ScriptedServer) -> None:
    class Planet(BaseModel):
        name: str
        moons: int

    assert llm.with_structured_output(Planet).invoke("'Mars' has 2 moons") == Planet(name="Mars", moons=2)
    response_format = server.requests[-1].body["response_format"]
    assert response_format["type"] == "json_schema"
    assert set(response_format["json_schema"]["schema"]["properties"]) == {"name", "moons"}


# Settings


def test_without_an_engine_or_an_address_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_BASE", "http://somewhere.else")
    with pytest.raises(ConfigError, match="RAGCACHE_BASE_URL"):
        ChatRAGCache()


def test_an_engine_and_an_address_at_once_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="both"):
        ChatRAGCache(engine=engine, base_url="http://somewhere")


def test_an_address_is_joined_at_the_first_request_and_gives_the_model(server: ScriptedServer) -> None:
    llm = ChatRAGCache(base_url=server.url, api_key=SecretStr("test-key"))
    assert llm.invoke("hello").content == "You said: hello"
    assert llm.model_name == server.model
    llm.close()


def test_a_key_never_shows(engine: Engine) -> None:
    llm = ChatRAGCache(engine=engine)
    for shown in (repr(llm), str(llm), json.dumps(llm._identifying_params)):
        assert "test-key" not in shown
    assert not llm.is_lc_serializable()
    assert llm.lc_secrets == {"openai_api_key": "RAGCACHE_API_KEY"}


def test_the_key_of_openai_is_never_sent(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.delenv("RAGCACHE_API_KEY", raising=False)
    key = ChatRAGCache(base_url=server.url).openai_api_key
    assert isinstance(key, SecretStr)
    assert key.get_secret_value() != "sk-secret"


def test_tokens_are_counted_with_the_tokenizer_of_the_engine(llm: ChatRAGCache, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert llm.get_num_tokens("hello there") == len(engine.tokenize("hello there"))
    assert llm.get_num_tokens_from_messages([HumanMessage("hello")]) == len(engine.tokenize(messages))


def test_an_answer_may_take_as_long_as_the_engine_allows(engine: Engine, server: ScriptedServer) -> None:
    allowed = engine.http_client().timeout
    joined = ChatRAGCache(base_url=server.url, api_key="test-key")
    joined.invoke("hello")
    for llm in (ChatRAGCache(engine=engine), joined):
        assert llm.root_client.timeout == llm.root_async_client.timeout == allowed
    assert ChatRAGCache(engine=engine, timeout=3).root_client.timeout == 3


async def test_one_model_serves_several_event_loops(llm: ChatRAGCache) -> None:
    def in_a_new_loop() -> AIMessage:
        return asyncio.run(llm.ainvoke("hello"))

    answers = [await llm.ainvoke("hello"), *[await asyncio.to_thread(in_a_new_loop) for _ in range(2)]]
    assert {a.content for a in answers} == {"You said: hello"}
    gc.collect()


def sum_of(chunks: Sequence[AIMessage]) -> AIMessageChunk:
    whole, *rest = (c for c in chunks if isinstance(c, AIMessageChunk))
    for chunk in rest:
        whole = whole + chunk
    return whole
