"""Whole answers that are under way before the search has ended, in every way to ask a query engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool

from ragcache_core.client import Engine
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.contracts.rag.frameworks import LlamaIndex
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, Stage, expected

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]


async def test_an_agent_that_retrieves_overlaps_too(make_engine: Any, generations: Any, llm: RAGCacheLLM) -> None:
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: len(generations()) == 2))
    tool = QueryEngineTool.from_defaults(engine, name="search", description="Searches the documents.")
    run = FunctionAgent(tools=[tool], llm=llm, system_prompt="Use the tool.").run("Find out 'what goes around'")
    (result,) = [event async for event in run.stream_events() if isinstance(event, ToolCallResult)]
    assert "The tool said" in str((await run).response.content)
    assert result.tool_output.raw_output.metadata["ragcache"]["pipeline"]["is_confirmed"]
    assert len(generations()) == 3  # call the tool, answer in it, answer


async def test_a_model_without_chat_template_is_asked_ahead_where_it_is_asked(
    make_engine: Any, engine: Engine, server: ScriptedServer
) -> None:
    llm = RAGCacheLLM(engine, temperature=0, max_tokens=200, is_chat_model=False)
    for way in ("query", "streamed_query"):
        server.clear()
        make = partial(make_engine, Stage("moon"), Stage("moon", once=lambda: bool(server.requests)), llm=llm)
        answer = await LlamaIndex(engine).answer(make, way)
        assert answer.stats["pipeline"]["is_confirmed"]
        assert [r.path for r in server.requests] == ["/v1/completions"]


class WorstFirst(BaseNodePostprocessor):
    """Turns the order around."""

    seen: list[Sequence[str]] = []

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.seen.append([n.node.node_id for n in nodes])
        return nodes[::-1]


@pytest.mark.parametrize("way", ["query", "streamed_query"])
async def test_with_post_processors_nothing_is_asked_ahead_unless_they_run_ahead_too(
    way: str, make_engine: Any, generations: Any, engine: Engine, server: ScriptedServer, caplog: Any
) -> None:
    worst_first, asked = WorstFirst(seen=[]), LlamaIndex(engine)
    make = partial(make_engine, Stage("sun moon"), Stage("sun moon"), node_postprocessors=[worst_first])
    answer = await asked.answer(make, way)
    assert answer.text == expected("moon", "sun")
    assert "speculate_postprocessed" in answer.stats["pipeline"]["skipped_because"]
    assert [seen.speculation for seen in generations()] == [None]
    assert worst_first.seen == [["sun", "moon"]]

    server.clear()
    make = partial(
        make_engine,
        Stage("sun moon"),
        Stage("sun moon", once=lambda: bool(generations())),
        node_postprocessors=[worst_first],
        speculate_postprocessed=True,
    )
    answer = await asked.answer(make, way)
    assert answer.text == expected("moon", "sun")
    assert answer.stats["pipeline"]["is_confirmed"]
    assert len(generations()) == 1
    assert worst_first.seen == [["sun", "moon"]] * 3
    assert not caplog.records


async def test_two_steps_prefill_the_beginning_of_the_prompt_that_was_learned(
    make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    await make_engine(Stage("mars sun")).aquery("What is red?")
    stages = Stage("moon sun"), Stage("moon sun", once=lambda: len(server.requests) == 2)
    engine = make_engine(*stages)
    nodes = await engine.aretrieve(QueryBundle(QUESTION))
    response = await engine.asynthesize(QUESTION, nodes)
    assert str(response) == expected("moon", "sun")
    _, warm, real = server.requests
    assert (warm.path, warm.body["max_tokens"]) == ("/v1/completions", 1)
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    known = warm.body["prompt"]
    assert server.tokens_of(real)[: len(known)] == known
    assert real.speculation is None
