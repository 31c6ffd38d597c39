"""What a chat model says of itself, and what agents do by that; several answers of one request."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import Reply, ScriptedServer


class Founder(BaseModel):
    name: str


@pytest.fixture(params=["engine", "base_url"])
def model(request: pytest.FixtureRequest, engine: Engine, server: ScriptedServer) -> ChatRAGCache:
    if request.param == "engine":
        return ChatRAGCache(engine=engine)
    joined = ChatRAGCache(base_url=server.base_url, api_key="test-key")
    joined.connect()
    return joined


def test_a_profile_knows_the_window_and_the_abilities(model: ChatRAGCache) -> None:
    assert model.profile == {"structured_output": True, "tool_calling": True, "max_input_tokens": 2048}
    assert SummarizationMiddleware(model=model, trigger=("fraction", 0.5))


def test_a_profile_of_the_user_wins(engine: Engine) -> None:
    assert ChatRAGCache(engine=engine, profile={"structured_output": False}).profile == {"structured_output": False}


def test_an_agent_has_the_grammar_enforce_its_response_format(model: ChatRAGCache, server: ScriptedServer) -> None:
    agent: Any = create_agent(model, response_format=Founder)
    answer = agent.invoke({"messages": [HumanMessage("Who is 'Clara'?")]})
    assert answer["structured_response"] == Founder(name="Clara")
    assert server.requests[-1].body["response_format"]["type"] == "json_schema"
    assert not server.requests[-1].body.get("tools")


async def test_a_stream_of_several_answers_holds_the_first(engine: Engine, server: ScriptedServer) -> None:
    llm = ChatRAGCache(engine=engine, n=2)
    server.rules = [lambda _: Reply("one two three")]
    assert "".join(str(chunk.content) for chunk in llm.stream("Who?")) == "one two three"
    assert "".join([str(chunk.content) async for chunk in llm.astream("Who?")]) == "one two three"
    (generations,) = llm.generate([[HumanMessage("Who?")]]).generations
    assert [generation.text for generation in generations] == ["one two three"] * 2
