from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.documents import Document as LangChainDocument
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.errors import EngineUnreachableError
from ragcache_core.stats import request_stats_from_dict
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import Reply, ScriptedServer

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.", {"page": 3})


MOON = Document("moon", "The moon goes around the earth once in a month, and it has no light.")


ASKED = [SystemMessage("Answer."), HumanMessage(f"{SUN.text}\n\n{MOON.text}\n\nWhat is the sun?")]


def ids_on_the_wire(server: ScriptedServer) -> list[str]:
    return [document["id"] for document in server.requests[-1].documents]


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
    assert all(document["text"] in str(seen.messages) for document in seen.documents)


def test_documents_of_a_message_reach_the_wire(llm: ChatRAGCache, server: ScriptedServer) -> None:
    llm.invoke([HumanMessage(ASKED[1].content, additional_kwargs={"ragcache_documents": [SUN]})])
    assert ids_on_the_wire(server) == ["sun"]


def test_tokens_are_counted_with_the_tokenizer_of_the_engine(llm: ChatRAGCache, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert llm.get_num_tokens("hello there") == len(engine.tokenize("hello there"))
    assert llm.get_num_tokens_from_messages([HumanMessage("hello")]) == len(engine.tokenize(messages))


def sum_of(chunks: Sequence[AIMessage]) -> AIMessageChunk:
    whole, *rest = (c for c in chunks if isinstance(c, AIMessageChunk))
    for chunk in rest:
        whole = whole + chunk
    return whole


def test_handlers_for_openais_errors_catch_those_that_no_answer_caused(engine: Engine, server: ScriptedServer) -> None:
    def second(_: object) -> str:
        return "the other model"

    def answered_by(llm: ChatRAGCache, error: type[Exception], question: str = "hello") -> str:
        return str(llm.with_fallbacks([RunnableLambda(second)], exceptions_to_handle=(error,)).invoke(question))

    nothing_there = ChatRAGCache(base_url="http://127.0.0.1:1", model="a-model")
    slow = ChatRAGCache(engine=engine, timeout=0.05)
    server.script(Reply("late", wait_s=60))
    assert answered_by(nothing_there, openai.APIConnectionError) == "the other model"
    assert answered_by(slow, openai.APITimeoutError) == "the other model"
    assert answered_by(ChatRAGCache(engine=engine), openai.BadRequestError, "word " * 4000) == "the other model"
    with pytest.raises(EngineUnreachableError):
        answered_by(nothing_there, openai.RateLimitError)


class Founder(BaseModel):
    name: str


@pytest.fixture(params=["engine", "base_url"])
def model(request: pytest.FixtureRequest, engine: Engine, server: ScriptedServer) -> ChatRAGCache:
    if request.param == "engine":
        return ChatRAGCache(engine=engine)
    joined = ChatRAGCache(base_url=server.base_url, api_key=server.api_key)
    joined.connect()
    return joined


def test_a_profile_knows_the_window_and_the_abilities(model: ChatRAGCache) -> None:
    assert model.profile == {"structured_output": True, "tool_calling": True, "max_input_tokens": 2048}
    assert SummarizationMiddleware(model=model, trigger=("fraction", 0.5))


def test_an_agent_has_the_grammar_enforce_its_response_format(model: ChatRAGCache, server: ScriptedServer) -> None:
    agent: Any = create_agent(model, response_format=Founder)
    answer = agent.invoke({"messages": [HumanMessage("Who is 'Clara'?")]})
    assert answer["structured_response"] == Founder(name="Clara")
    assert server.requests[-1].body["response_format"]["type"] == "json_schema"
    assert not server.requests[-1].body.get("tools")


class TestStandardUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": "http://127.0.0.1:1/v1", "model": "a-model"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"RAGCACHE_BASE_URL": "http://127.0.0.1:1/v1", "RAGCACHE_API_KEY": "a-key", "OPENAI_API_KEY": "not-ours"},
            {"model": "a-model"},
            {"openai_api_base": "http://127.0.0.1:1/v1", "openai_api_key": "a-key", "model_name": "a-model"},
        )
