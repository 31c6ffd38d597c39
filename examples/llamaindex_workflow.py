"""A LlamaIndex workflow of two steps, ask and read, that streams what it found and then every token.

Run it with ``python -m examples.llamaindex_workflow``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from examples._shared import Options, Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import request_stats_from_dict
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever


class Found(Event):
    question: str
    response: Any


class Token(Event):
    text: str


class Answering(Workflow):
    def __init__(self, query_engine: RAGCacheQueryEngine) -> None:
        super().__init__(timeout=120)
        self.query_engine = query_engine

    @step
    async def ask(self, ctx: Context, event: StartEvent) -> Found:
        """Search, while the engine works on the answer already."""
        found = Found(question=event.question, response=await self.query_engine.aquery(event.question))
        ctx.write_event_to_stream(found)
        return found

    @step
    async def read(self, ctx: Context, event: Found) -> StopEvent:
        async for token in event.response.async_response_gen():
            ctx.write_event_to_stream(Token(text=token))
        return StopEvent(result=await event.response.get_response())


async def ask(workflow: Answering, question: str, note: str, options: Options) -> Row:
    run = workflow.run(question=question)
    async for event in run.stream_events():
        if isinstance(event, Found) and not options.as_json:
            print(f"{question}\n  from {', '.join(node.node_id for node in event.response.source_nodes)}:", end=" ")
        if isinstance(event, Token) and not options.as_json:
            print(event.text, end="", flush=True)
    response = await run
    if not options.as_json:
        print()
    stats, hidden_s = response.metadata["ragcache"], response.metadata["ragcache"]["pipeline"]["hidden_search_s"]
    return Row.of(question, note, str(response), request_stats_from_dict(stats), hidden_s)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(SlowSearch(store), engine, similarity_top_k=4)
        llm = RAGCacheLLM(engine, temperature=0, max_tokens=32)
        workflow = Answering(RAGCacheQueryEngine(retriever, llm, streaming=True))

        async def ask_all() -> list[Row]:
            questions = [q["question"] for q in demo_questions("single")[:3]]
            return [await ask(workflow, q, note, options) for q in questions for note in ("cold", "again")]

        rows = asyncio.run(ask_all())
    show(rows, options)


if __name__ == "__main__":
    main()
