"""The ways to ask one question over a search: LangChain's ordinary chain and fused pair, LlamaIndex's query engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.runnables import Runnable, RunnablePassthrough
from llama_index.core.base.response.schema import AsyncStreamingResponse

from benchmarks.pipeline.answer_tap import ASK_TOKEN_IDS
from ragcache_core.client import Engine
from ragcache_core.ordering import DocumentOrder
from ragcache_core.retrieval.sources import StageSource
from ragcache_integrations import llamaindex
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    SpeculativeRAG,
    format_documents,
    prompt_from_layout,
)


@dataclass(frozen=True, slots=True)
class Over:
    """What is searched for whom: ``k`` documents of ``source`` in an order, for an engine that works ahead or not.

    Answers have ``num_tokens`` tokens, whether or not the model would have ended sooner.
    """

    engine: Engine
    source: StageSource
    k: int
    order: DocumentOrder
    speculate: bool
    num_tokens: int

    @property
    def extra_body(self) -> dict[str, Any]:
        """What goes into a request besides the OpenAI protocol's own fields."""
        return {**ASK_TOKEN_IDS, "ignore_eos": True}


Ask = Callable[[str, bool], Awaitable[None]]
"""Asks a question and reads the answer, of a stream only the first piece if its reader leaves then (the flag)."""


def chain(over: Over) -> Runnable[Any, Any]:
    """Return ``retriever | prompt | llm`` as LangChain's own documentation writes it."""
    parts = {"context": _retriever(over) | format_documents, "question": RunnablePassthrough()}
    return parts | prompt_from_layout() | _chat_model(over)


def fused(over: Over) -> Runnable[Any, Any]:
    """Return the fused pair."""
    return SpeculativeRAG(retriever=_retriever(over), prompt=prompt_from_layout(), llm=_chat_model(over))


def _retriever(over: Over) -> RAGCacheRetriever:
    return RAGCacheRetriever(
        store=over.source, engine=over.engine, k=over.k, document_order=over.order, speculate=over.speculate
    )


def _chat_model(over: Over) -> ChatRAGCache:
    return ChatRAGCache(engine=over.engine, max_tokens=over.num_tokens, temperature=0, extra_body=over.extra_body)


def _query_engine(over: Over, *, streaming: bool = False) -> llamaindex.RAGCacheQueryEngine:
    retriever = llamaindex.RAGCacheRetriever(
        over.source, over.engine, similarity_top_k=over.k, document_order=over.order, speculate=over.speculate
    )
    llm = llamaindex.RAGCacheLLM(
        over.engine, temperature=0, max_tokens=over.num_tokens, additional_kwargs={"extra_body": over.extra_body}
    )
    return llamaindex.RAGCacheQueryEngine(retriever, llm, streaming=streaming)


def _invoke(runnable: Runnable[Any, Any]) -> Ask:
    async def ask(question: str, _leaves: bool) -> None:
        await asyncio.to_thread(runnable.invoke, question)

    return ask


def _ainvoke(runnable: Runnable[Any, Any]) -> Ask:
    async def ask(question: str, _leaves: bool) -> None:
        await runnable.ainvoke(question)

    return ask


def _stream(runnable: Runnable[Any, Any]) -> Ask:
    async def ask(question: str, _leaves: bool) -> None:
        await asyncio.to_thread(lambda: list(runnable.stream(question)))

    return ask


def _astream(runnable: Runnable[Any, Any]) -> Ask:
    async def ask(question: str, leaves: bool) -> None:
        async with aclosing(cast("Any", runnable.astream(question))) as chunks:
            await _read(chunks, leaves)

    return ask


def _query(over: Over) -> Ask:
    query_engine = _query_engine(over)

    async def ask(question: str, _leaves: bool) -> None:
        await asyncio.to_thread(query_engine.query, question)

    return ask


def _aquery(over: Over) -> Ask:
    query_engine = _query_engine(over)

    async def ask(question: str, _leaves: bool) -> None:
        await query_engine.aquery(question)

    return ask


def _streamed_aquery(over: Over) -> Ask:
    query_engine = _query_engine(over, streaming=True)

    async def ask(question: str, leaves: bool) -> None:
        response = await query_engine.aquery(question)
        assert isinstance(response, AsyncStreamingResponse)
        async with aclosing(cast("Any", response.response_gen)) as tokens:
            await _read(tokens, leaves)

    return ask


async def _read(pieces: AsyncIterator[Any], leaves: bool) -> None:
    async for _ in pieces:
        if leaves:
            return


WAYS: dict[str, Callable[[Over], Ask]] = {
    "chain, invoke": lambda over: _invoke(chain(over)),
    "chain, ainvoke": lambda over: _ainvoke(chain(over)),
    "chain, stream": lambda over: _stream(chain(over)),
    "chain, astream": lambda over: _astream(chain(over)),
    "fused, invoke": lambda over: _invoke(fused(over)),
    "fused, ainvoke": lambda over: _ainvoke(fused(over)),
    "fused, astream": lambda over: _astream(fused(over)),
    "query": _query,
    "aquery": _aquery,
    "aquery, streaming": _streamed_aquery,
}
BLOCKING = frozenset(("chain, invoke", "chain, stream", "fused, invoke", "query"))
"""They run in a thread, which cannot be cancelled."""
