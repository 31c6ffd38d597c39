"""The fused pair of LangChain: the engine already answers while the documents are searched, and says what came of it.

Every stage of the search, and every speculation that was started, cancelled or confirmed, is an event of the stream;
tokens come only when the documents are final. Run it with ``python -m examples.speculative_rag``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessageChunk

from examples._shared import Options, Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import request_stats_from_dict
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout


def described(name: str, data: Mapping[str, Any]) -> str:
    """Return a line about an event of the search."""
    found = ", ".join(data["doc_ids"])
    if name == "ragcache.candidates":
        return f"stage {data['stage']}: {found}{' (final)' if data['is_final'] else ''}"
    if data["event"] in ("settle", "miss"):
        if data["overlapped_search_s"] is None:
            return f"{data['event']}: the request was another one after all"
        hidden, search = (round(data[key] * 1000) for key in ("overlapped_search_s", "search_s"))
        return f"{data['event']}: {hidden} of {search} ms of the search overlapped"
    return f"{data['event']}: {found}"


async def ask(rag: SpeculativeRAG, question: str, options: Options) -> Row:
    """Ask, and print what happens as it does."""
    answer = AIMessageChunk(content="")
    if not options.as_json:
        print(question)
    async for event in rag.astream_events(question):
        if event["event"] == "on_custom_event" and not options.as_json:
            print(f"  {described(event['name'], event['data'])}")
        if event["event"] == "on_chain_stream" and not event["parent_ids"]:
            answer += event["data"]["chunk"]
    figures = dict(answer.response_metadata["ragcache"])
    report = figures.pop("pipeline")
    if not options.as_json:
        print(f"  {answer.text.strip()}\n")
    return Row.of(question, "streamed", answer.text, request_stats_from_dict(figures), report["overlapped_search_s"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    with open_engine(options) as engine, open_demo_store() as store:
        rag = SpeculativeRAG(
            retriever=RAGCacheRetriever(store=SlowSearch(store), engine=engine, k=2),
            prompt=prompt_from_layout(),
            llm=ChatRAGCache(engine=engine, temperature=0, max_tokens=32),
        )

        async def ask_all() -> list[Row]:
            return [await ask(rag, q["question"], options) for q in demo_questions("single")[:6]]

        rows = asyncio.run(ask_all())
    show(rows, options)


if __name__ == "__main__":
    main()
