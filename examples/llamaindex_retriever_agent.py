"""A LlamaIndex agent with a retriever tool, as LlamaIndex makes them: nothing but the LLM and the retriever is ours.

While the tool searches, the engine reads what its result will show. The documents of each step are named in its
statistics, and a second run finds them cached. Run it with ``python -m examples.llamaindex_retriever_agent``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.tools import RetrieverTool

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import PromptLayout, request_stats_from_dict
from ragcache_integrations.llamaindex import CacheStatsEventHandler, RAGCacheLLM, RAGCacheRetriever


async def ask(agent: FunctionAgent, question: str, note: str) -> list[Row]:
    """Return a row for each step of the agent."""
    rows, told, number = [], CacheStatsEventHandler(), 0
    get_dispatcher().add_event_handler(told)
    run = agent.run(question, max_iterations=4)
    async for event in run.stream_events():
        if isinstance(event, AgentOutput):
            number += 1
            stats = request_stats_from_dict(event.raw["ragcache"])
            calls = " ".join(f"{call.tool_name}({call.tool_kwargs.get('input')})" for call in event.tool_calls)
            text = calls or f"{event} ({', '.join(d.doc_id for d in stats.documents)})"
            hidden_s = None if calls else told.summary().overlapped_search_s
            rows.append(Row.of(question, f"{note} {number}", text, stats, hidden_s))
    await run
    get_dispatcher().event_handlers.remove(told)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    with open_engine(options) as engine, open_demo_store() as store:
        llm = RAGCacheLLM(engine, temperature=0, max_tokens=64)
        retriever = RAGCacheRetriever(SlowSearch(store), engine, similarity_top_k=2)
        search = RetrieverTool.from_defaults(retriever, name="search", description="Search the documents.")
        agent = FunctionAgent(tools=[search], llm=llm, system_prompt=PromptLayout().static_prefix)

        async def ask_all() -> list[Row]:
            questions = [q["question"] for q in demo_questions("single")[:2]]
            rounds = [(note, question) for note in ("step", "again") for question in questions]
            return [row for note, question in rounds for row in await ask(agent, question, note)]

        rows = asyncio.run(ask_all())
    show(rows, options)


if __name__ == "__main__":
    main()
