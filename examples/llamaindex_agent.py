"""A LlamaIndex agent whose tool is a query engine that answers while it searches; every step says what the cache did.

Run it with ``python -m examples.llamaindex_agent``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.tools import QueryEngineTool

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import PromptLayout, request_stats_from_dict
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever


async def ask(agent: FunctionAgent, question: str, round_number: int) -> list[Row]:
    """Return a row for each request to the LLM: the agent's steps, and the query engine's answers within."""
    rows = []
    run = agent.run(question, max_iterations=4)
    async for event in run.stream_events():
        if isinstance(event, AgentOutput):
            calls = " ".join(f"{call.tool_name}({call.tool_kwargs.get('input')})" for call in event.tool_calls)
            stats = request_stats_from_dict(event.raw["ragcache"])
            rows.append(Row.of(question, f"{round_number} agent", calls or str(event), stats))
        if isinstance(event, ToolCallResult):
            said = event.tool_output.raw_output.metadata
            stats, hidden_s = request_stats_from_dict(said["ragcache"]), said["ragcache"]["pipeline"]["hidden_search_s"]
            note = f"{round_number} {event.tool_name}"
            rows.append(Row.of(question, note, event.tool_output.content, stats, hidden_s))
    await run
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    with open_engine(options) as engine, open_demo_store() as store:
        llm = RAGCacheLLM(engine, temperature=0, max_tokens=64)
        query_engine = RAGCacheQueryEngine(RAGCacheRetriever(SlowSearch(store), engine, similarity_top_k=2), llm)
        search = QueryEngineTool.from_defaults(query_engine, name="search", description="Search the documents.")
        agent = FunctionAgent(tools=[search], llm=llm, system_prompt=PromptLayout().static_prefix)

        async def ask_all() -> list[Row]:
            questions = [q["question"] for q in demo_questions("single")[:2]]
            return [row for question in questions for number in (1, 2) for row in await ask(agent, question, number)]

        rows = asyncio.run(ask_all())
    show(rows, options)


if __name__ == "__main__":
    main()
