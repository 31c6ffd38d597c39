"""Agents of LlamaIndex that search with a tool: the next call of the model is prefilled while the tool runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, FunctionAgent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from ragcache_core.client import Engine
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheRetriever
from tests.support.scripted_server import Reply, ScriptedServer, Seen
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
STATIC = "Answer the question from what the search finds, and say no more than it does. Be brief, and do not guess."


@pytest.fixture
def retriever(engine: Engine, warmed: Callable[[], list[Seen]]) -> RAGCacheRetriever:
    """A retriever whose search does not end before something is prefilled."""
    source = ScriptedSource((Stage("moon sun"), Stage("moon sun", once=lambda: bool(warmed()))))
    return RAGCacheRetriever(source, engine)


async def output_of(agent: Any) -> AgentOutput:
    return await agent.run(QUESTION, max_iterations=4)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_workflow", [False, True])
async def test_the_next_call_of_the_model_is_prefilled_while_the_tool_searches(
    is_streaming: bool,
    is_workflow: bool,
    retriever: Any,
    llm: RAGCacheLLM,
    warmed: Any,
    generations: Any,
    server: ScriptedServer,
) -> None:
    server.script(Reply(tool_calls=(("search", {"input": f" {QUESTION} "}),)))  # as a model would, with a space
    search = RetrieverTool.from_defaults(retriever, name="search", description="Search the sky.")
    agent: Any = FunctionAgent(tools=[search], llm=llm, system_prompt=STATIC, streaming=is_streaming)
    output = await output_of(AgentWorkflow(agents=[agent]) if is_workflow else agent)
    (warm,), (first, second) = warmed(), generations()
    assert [d["doc_id"] for d in output.raw["ragcache"]["documents"]] == ["moon", "sun"]
    known = warm.body["prompt"]
    assert server.tokens_of(second)[: len(known)] == known
    assert [d["id"] for d in warm.documents] == [d["id"] for d in second.documents] == ["moon", "sun"]
    assert len(known) >= server._prompt(second)[1][-1]["end"] - 2
    assert first.documents == []


async def test_a_query_engine_as_a_tool_keeps_its_own_prompt(
    retriever: Any, llm: RAGCacheLLM, warmed: Any, generations: Any, server: ScriptedServer, engine: Engine
) -> None:
    engine.bind_prompt(
        lambda context, question: [{"role": "user", "content": f"{STATIC}\n{context}\n{question}"}],
        lambda nodes: "\n\n".join(node.get_content() for node in nodes),
    )
    server.rules = (lambda request: None if request.body.get("tools") else Reply("In a month."),)
    answers = RetrieverQueryEngine.from_args(retriever, llm=llm)
    search = QueryEngineTool.from_defaults(answers, name="search", description="Search the sky.")
    output = await output_of(FunctionAgent(tools=[search], llm=llm, system_prompt=STATIC))
    (warm,), chats = warmed(), generations()
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert [[d["id"] for d in chat.documents] for chat in chats] == [[], ["moon", "sun"], []], (
        "the agent, the query engine, the agent with its answer"
    )
    assert str(output) == "The tool said: In a month."
