"""The retriever: a staged search with an event per stage, overlapped with speculative requests."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.histories import SourceHistory
from ragcache_core.client.pipeline.result import similarities
from ragcache_core.client.pipeline.session import SearchOverlap
from ragcache_core.client.pipeline.stages import (
    DEFAULT_TIMEOUT_S,
    check_stage,
    check_timeout,
    check_updates,
    close_stages,
)
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.retrieval import MMR, DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import Metric, check_count
from ragcache_core.retrieval.sources import (
    Reranking,
    StageSource,
    as_source,
    empty_result,
    num_candidates_of,
    or_nothing,
)
from ragcache_core.retrieval.threads import in_thread, run_blocking
from ragcache_core.swaps import check_max_score_loss
from ragcache_core.types import DocId, Document, RetrievalUpdate
from ragcache_integrations.llamaindex.events import publish
from ragcache_integrations.llamaindex.nodes import document_from_node, node_from_document, shown_documents, where_of
from ragcache_integrations.llamaindex.vector_store import StagedFAISSVectorStore
from ragcache_integrations.rag.handles import check_engine
from ragcache_integrations.rag.search import (
    DocumentView,
    Rerank,
    RetrieverSearch,
    SearchOptions,
    StartSpeculation,
    history_of,
)

_OF_LLAMAINDEX = {"object_map", "objects", "verbose"}
"""Arguments of every retriever of LlamaIndex."""


class RAGCacheRetriever(BaseRetriever):
    """Retrieves the nearest nodes of a store, and records them for the engine.

    ::

        retriever = RAGCacheRetriever(DocumentStore.open("docs.ragcache"), engine, similarity_top_k=2)
        nodes = retriever.retrieve("Who keeps the lighthouse of Zor?")

    A query is embedded by the store, or by ``embed_model`` where LlamaIndex embedded the nodes. After each stage of the
    search a :class:`RetrievalStageEvent` is published; the nodes returned are those of the last one, which is the
    answer of the unmodified index. The ``engine`` recognises the documents in later requests, in any layout of
    the prompt. An empty store has no nodes, and one with fewer than ``similarity_top_k`` returns all.

    The engine also prefills the prompt's beginning with the documents of each stage while the search runs, and cancels
    it if the next stage has others; a :class:`SpeculationEvent` reports this. The prompt must be known: from
    ``engine.bind_prompt()``, or from the first request. In a :class:`RAGCacheQueryEngine` the engine generates the
    answer as well.

    With ``node_postprocessors`` the last stage is their result for the ``num_candidates`` nearest nodes. Until then the
    first ``similarity_top_k`` are prefilled, as long as enough of them usually stay in place. Post-processors of a
    query engine run after the search.

    Args:
        store: a document store, a vector store over one, or another staged retriever.
        engine: the engine whose cache the documents are for.
        similarity_top_k: how many nodes to return.
        node_postprocessors: a reranker, or others that choose and change nodes; they may run more than once at a time.
        num_candidates: how many nodes they are given, by default 20.
        stages: number of stages, or increasing shares of the work such as ``(0.1, 0.5, 1.0)``; by default chosen by the
            duration of searches. Another staged retriever has its own.
        embed_model: the model that embedded the nodes.
        filters: conditions on the metadata of every node.
        mmr: chooses nodes that differ from each other, ``MMR(fetch_k=20, lambda_mult=0.5)``.
        prompt: the prompt that shows the documents; by default the one that the engine knows.
        document_order: ``canonical`` or ``cache_aware`` returns the nodes in an order with more cache hits.
        keep_first: whether the best node stays in front in every order.
        max_score_loss: share of a node's score that its replacement may lack, if more of the prompt is cached with it.
            Twice as many nodes are searched for; the search statistics and :class:`RetrievalStageEvent` list each swap.
            By default the nearest nodes are returned.
        search_timeout_s: seconds that a search may take; ``None`` for no limit.
        speculate: whether the engine prefills candidates during a search.

    Raises:
        ConfigError: ``similarity_top_k`` or ``search_timeout_s`` is not positive, there is no such ``document_order``,
            ``store`` has no staged search, or does not support the given ``embed_model``, ``filters``, ``mmr`` or
            ``stages``; a ``num_candidates`` below ``similarity_top_k``, or without post-processors; a
            ``max_score_loss`` outside of 0 to 1, or with canonical order, MMR or post-processors; an unknown
            argument.
        SearchError: a filter on a field that no node has, or with a value of another kind; a post-processor that does
            not return nodes.
        SearchTimeoutError: a search took longer than ``search_timeout_s``.
    """

    def __init__(
        self,
        store: DocumentStore | StagedFAISSVectorStore | StageSource,
        engine: EngineClient | None = None,
        *,
        similarity_top_k: int = 2,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        num_candidates: int | None = None,
        stages: int | Sequence[float] | None = None,
        embed_model: BaseEmbedding | None = None,
        filters: MetadataFilters | None = None,
        mmr: MMR | None = None,
        prompt: BoundPrompt | None = None,
        document_order: DocumentOrder = "retrieval",
        keep_first: bool = False,
        max_score_loss: float | None = None,
        search_timeout_s: float | None = DEFAULT_TIMEOUT_S,
        speculate: bool = True,
        callback_manager: CallbackManager | None = None,
        **kwargs: Any,
    ) -> None:
        check_count("similarity_top_k", similarity_top_k, 1)
        check_engine(engine)
        check_timeout(search_timeout_s)
        if document_order not in DOCUMENT_ORDERS:
            raise ConfigError(f"document_order is {document_order!r}: choose one of {', '.join(DOCUMENT_ORDERS)}")
        beside = "post-processors" if node_postprocessors else "MMR" if mmr is not None else None
        check_max_score_loss(max_score_loss, document_order, beside=beside)
        if unknown := kwargs.keys() - _OF_LLAMAINDEX:
            raise ConfigError(
                f"RAGCacheRetriever knows no {', '.join(sorted(unknown))}: how many nodes is similarity_top_k, which "
                "ones is filters=MetadataFilters(...)"
            )
        super().__init__(callback_manager=callback_manager, **kwargs)
        self._store = store.client if isinstance(store, StagedFAISSVectorStore) else store
        self._source = as_source(self._store, stages=stages)
        if embed_model is not None and not isinstance(self._store, DocumentStore):
            raise ConfigError(f"{store!r:.80} is searched by text: leave embed_model out")
        self._where, self._mmr = where_of(filters), mmr
        if (filters is not None or mmr is not None) and not isinstance(self._store, DocumentStore):
            given = "mmr is" if filters is None else "filters are"
            raise ConfigError(f"{given} given, but {store!r:.80} is no store: let stages() itself do it")
        self._engine = engine
        self._similarity_top_k = similarity_top_k
        self._postprocessors = tuple(node_postprocessors)
        self._num_candidates = num_candidates_of(
            num_candidates, similarity_top_k, bool(self._postprocessors), "node_postprocessors="
        )
        self._reranking = Reranking("the last of " + ", ".join(type(p).__name__ for p in self._postprocessors))
        self._stages = stages
        self._embed_model = embed_model
        self._prompt = prompt
        self._options = SearchOptions(document_order, keep_first, max_score_loss, search_timeout_s, speculate)
        self._source_history = SourceHistory()
        self._overlap: SearchOverlap[StartSpeculation[NodeWithScore]] | None = None

    def overlapped(self, overlap: SearchOverlap[StartSpeculation[NodeWithScore]]) -> RAGCacheRetriever:
        """Return this retriever for one search that is overlapped by ``overlap``."""
        retriever = copy.copy(self)  # LlamaIndex's retrieve() takes the query and nothing else
        retriever._overlap = overlap
        return retriever

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        model, texts = self._embed_model, query_bundle.embedding_strs
        if model is None:
            return run_blocking(lambda: self._search(query_bundle, None, is_async=False))
        embed = partial(in_thread, lambda: model.get_agg_embedding_from_queries(texts))
        return run_blocking(lambda: self._search(query_bundle, embed, is_async=False))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        model, texts = self._embed_model, query_bundle.embedding_strs
        if model is None:
            return await self._search(query_bundle, None)
        return await self._search(query_bundle, lambda: model.aget_agg_embedding_from_queries(texts))

    async def _search(
        self, query: QueryBundle, embed: Callable[[], Awaitable[list[float]]] | None, *, is_async: bool = True
    ) -> list[NodeWithScore]:
        metric: Metric | None = getattr(self._store, "metric", None)
        found, k = _FoundNodes(metric), self._similarity_top_k
        rerankers = tuple(type(p).__name__ for p in self._postprocessors), self._num_candidates
        known = (k, self._stages, self._mmr is not None, rerankers, self._options.order_key())
        asked = (query.query_str, *query.embedding_strs, repr(self._where), repr(self._mmr))
        search = RetrieverSearch(
            query=query.query_str,
            k=k,
            stages=partial(self._updates, query, embed, found),
            view=DocumentView(found.nodes, shown_documents),
            options=self._options,
            engine=self._engine,
            prompt=self._prompt,
            metric=metric,
            rerank=Rerank(self._reranking, self._num_candidates, partial(self._postprocessed, query, found, is_async))
            if self._postprocessors
            else None,
            source_history=history_of(self._store, *known, default=self._source_history),
            read_by_id=self._store.get if isinstance(self._store, DocumentStore) else None,
            question_key=asked if query.embedding is None else None,
        )
        return await search.run(
            partial(publish, query=query.query_str, span_id=active_span_id.get(), metric=metric), self._overlap
        )

    async def _postprocessed(
        self, query: QueryBundle, found: _FoundNodes, is_async: bool, documents: Sequence[Document]
    ) -> Sequence[Document]:
        nodes = found.nodes(documents)
        for postprocessor in self._postprocessors:
            if is_async:
                nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query)
            else:
                nodes = await in_thread(partial(postprocessor.postprocess_nodes, nodes, query_bundle=query))
        return found.changed(documents, nodes)

    async def _updates(
        self, query: QueryBundle, embed: Callable[[], Awaitable[list[float]]] | None, found: _FoundNodes, k: int
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        updates = await self._stages_of(query, embed, k)
        try:
            check_updates(updates)
            async for update in updates:
                check_stage(update)
                found.note(update)
                yield update
        finally:
            await close_stages(updates)

    async def _stages_of(
        self, query: QueryBundle, embed: Callable[[], Awaitable[list[float]]] | None, k: int
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        store = self._store
        if not isinstance(store, DocumentStore):
            return self._source.stages(query.query_str, k)
        if len(store) == 0:
            return empty_result()
        where = self._where
        embedding = await embed() if query.embedding is None and embed is not None else query.embedding
        if embedding is not None:
            return or_nothing(store.search_vector_staged(embedding, k, stages=self._stages, where=where, mmr=self._mmr))
        if isinstance(store.embedder, PrecomputedEmbedder):
            raise ConfigError(
                f"{store.path} cannot embed a query, the nodes were embedded elsewhere: give RAGCacheRetriever "
                "the embed_model that did it"
            )
        return or_nothing(store.search_staged(query.query_str, k, stages=self._stages, where=where, mmr=self._mmr))


class _FoundNodes:
    """A search's documents as nodes with their known scores."""

    def __init__(self, metric: Metric | None) -> None:
        self._metric = metric
        self._scores: dict[DocId, float] = {}

    def note(self, update: RetrievalUpdate) -> None:
        scored = list(zip(update.documents, similarities(update.scores, self._metric), strict=False))
        self._scores.update((d.doc_id, score) for d, score in reversed(scored) if not math.isnan(score))

    def changed(self, documents: Sequence[Document], nodes: Sequence[NodeWithScore]) -> Sequence[Document]:
        """Return post-processed nodes as documents; unchanged ones stay the same objects."""
        if not isinstance(nodes, Sequence) or not all(isinstance(node, NodeWithScore) for node in nodes):
            raise SearchError(f"the post-processors returned {nodes!r:.80}: return a list of NodeWithScore")
        before = {node_from_document(d).node_id: (node_from_document(d), d) for d in documents}
        self._scores = {n.node.node_id: n.score for n in reversed(nodes) if n.score is not None}
        kept = (before.get(n.node.node_id) for n in nodes)
        return [
            k[1] if k is not None and _is_same(k[0], n.node) else document_from_node(n.node)
            for k, n in zip(kept, nodes, strict=True)
        ]

    def nodes(self, documents: Sequence[Document]) -> list[NodeWithScore]:
        return [NodeWithScore(node=node_from_document(d), score=self._scores.get(d.doc_id)) for d in documents]


def _is_same(one: BaseNode, other: BaseNode) -> bool:
    return one.get_content() == other.get_content() and one.metadata == other.metadata
