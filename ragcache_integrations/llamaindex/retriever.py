"""The retriever: the staged search of a document store, with an event for every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_integrations.llamaindex.events import RetrievalStageEvent, dispatcher
from ragcache_integrations.llamaindex.nodes import node_from_document, shown_document, similarities
from ragcache_integrations.llamaindex.vector_store import StagedFAISSVectorStore


class RAGCacheRetriever(BaseRetriever):
    """Retrieves the nearest nodes of a store, and tells the engine what they hold.

    ::

        retriever = RAGCacheRetriever(DocumentStore.open("docs.ragcache"), engine, similarity_top_k=2)
        nodes = retriever.retrieve("Who keeps the lighthouse of Zor?")

    A query is embedded by the store, or by ``embed_model`` where LlamaIndex embedded the nodes. After each stage of the
    search a :class:`RetrievalStageEvent` is published; the nodes returned are those of the last one, which is the
    answer of the unmodified index. The ``engine`` recognises the documents in later requests, whoever lays out the
    prompt. An empty store has no nodes, and one with fewer than ``similarity_top_k`` returns all.

    Args:
        store: a document store, or a vector store over one.
        engine: the engine whose cache the documents are for.
        similarity_top_k: how many nodes to return.
        stages: a number of stages, or increasing shares of the work as ``(0.1, 0.5, 1.0)``; by default what is worth
            its time.
        embed_model: the model that embedded the nodes.

    Raises:
        ConfigError: ``similarity_top_k`` is not positive.
    """

    def __init__(
        self,
        store: DocumentStore | StagedFAISSVectorStore,
        engine: Engine | None = None,
        *,
        similarity_top_k: int = 2,
        stages: int | Sequence[float] | None = None,
        embed_model: BaseEmbedding | None = None,
        callback_manager: CallbackManager | None = None,
        **kwargs: Any,
    ) -> None:
        if similarity_top_k < 1:
            raise ConfigError(f"similarity_top_k is {similarity_top_k}: ask for at least 1 node")
        super().__init__(callback_manager=callback_manager, **kwargs)
        self._store = store.client if isinstance(store, StagedFAISSVectorStore) else store
        self._engine = engine
        self._similarity_top_k = similarity_top_k
        self._stages = stages
        self._embed_model = embed_model

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if query_bundle.embedding is None and self._embed_model is not None:
            embedding = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
            query_bundle = QueryBundle(query_bundle.query_str, embedding=embedding)
        # The search is asynchronous; a loop of its own, in its own thread, works under a running one too.
        with ThreadPoolExecutor(1, "ragcache-retrieve") as thread:
            return thread.submit(copy_context().run, asyncio.run, self._aretrieve(query_bundle)).result()

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        span_id = active_span_id.get()
        k = min(self._similarity_top_k, len(self._store))
        if k == 0:
            return []
        async with aclosing(await self._search(query_bundle, k)) as updates:
            async for update in updates:
                dispatcher.event(RetrievalStageEvent.from_update(update, query=query_bundle.query_str, span_id=span_id))
        nodes = [node_from_document(document) for document in update.documents]
        if self._engine is not None:
            self._engine.remember_documents(shown_document(node) for node in nodes)
        scores = similarities(update, self._store.metric)
        return [NodeWithScore(node=node, score=score) for node, score in zip(nodes, scores, strict=True)]

    async def _search(self, query: QueryBundle, k: int) -> Any:
        embedding = query.embedding
        if embedding is None and self._embed_model is not None:
            embedding = await self._embed_model.aget_agg_embedding_from_queries(query.embedding_strs)
        if embedding is not None:
            return self._store.search_vector_staged(embedding, k, stages=self._stages)
        if isinstance(self._store.embedder, PrecomputedEmbedder):
            raise ConfigError(
                f"{self._store.path} cannot embed a query, its nodes were embedded elsewhere: give RAGCacheRetriever "
                "the embed_model that did it"
            )
        return self._store.search_staged(query.query_str, k, stages=self._stages)
