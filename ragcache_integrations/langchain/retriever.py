"""A retriever that searches in stages and tells the engine what it found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document as LangChainDocument
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field

from ragcache_core.client import Engine
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import RetrievalUpdate
from ragcache_integrations.langchain.documents import to_langchain
from ragcache_integrations.langchain.vectorstore import StagedFAISS

CANDIDATES_EVENT = "ragcache.candidates"
"""Custom event of each stage: ``{"query", "stage", "is_final", "doc_ids", "scores"}``."""


class RAGCacheRetriever(BaseRetriever):
    """Returns the ``k`` nearest documents of a store.

    It dispatches what it knows after each stage of the search as a custom event ``ragcache.candidates``; what it
    returns, streamed or not, is the final result, once. With ``engine=``, the engine that the chat model uses too, the
    documents are recognised in the prompt of an ordinary chain: ``retriever | format_docs`` loses nothing but the ids.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    store: StagedFAISS | DocumentStore = Field(exclude=True, repr=False)
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    k: int = Field(default=4, ge=1)
    """How many documents to return; a call may ask for another number, ``retriever.invoke(query, k=2)``."""
    stages: int | Sequence[float] | None = None
    """Number of stages, or increasing shares of the work that end in 1. By default by the size of the store."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[LangChainDocument]:
        config = RunnableConfig(callbacks=run_manager.get_child())

        async def search() -> list[LangChainDocument]:
            async with aclosing(self._updates(query, k)) as updates:
                async for update in updates:
                    dispatch_custom_event(CANDIDATES_EVENT, _event(query, update), config=config)
                    if update.is_final:
                        return self._found(update)
            return []

        # A loop of its own: the search is asynchronous, and this thread's loop may be running (in a notebook).
        with ThreadPoolExecutor(1, "ragcache-retriever") as thread:
            return thread.submit(asyncio.run, search()).result()

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[LangChainDocument]:
        config = RunnableConfig(callbacks=run_manager.get_child())
        async with aclosing(self._updates(query, k)) as updates:
            async for update in updates:
                await adispatch_custom_event(CANDIDATES_EVENT, _event(query, update), config=config)
                if update.is_final:
                    return self._found(update)
        return []

    def _updates(self, query: str, k: int | None) -> AsyncGenerator[RetrievalUpdate]:
        store = self.store if isinstance(self.store, StagedFAISS) else StagedFAISS(self.store)
        return store.asimilarity_search_staged(query, self.k if k is None else k, stages=self.stages)

    def _found(self, update: RetrievalUpdate) -> list[LangChainDocument]:
        if self.engine is not None:
            self.engine.remember_documents(update.documents)
        return [to_langchain(document) for document in update.documents]


def _event(query: str, update: RetrievalUpdate) -> dict[str, object]:
    return {
        "query": query,
        "stage": update.stage,
        "is_final": update.is_final,
        "doc_ids": [d.doc_id for d in update.documents],
        "scores": [float(score) for score in update.scores],
    }
