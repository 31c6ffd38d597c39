"""The vector store: LlamaIndex nodes in RAGCache's document store, on disk, with a staged Faiss index."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from ragcache_core.client.pipeline.result import similarities
from ragcache_core.errors import ConfigError, EmptyStoreError, SearchError
from ragcache_core.retrieval import MMR, DocumentStore, PrecomputedEmbedder, TfidfSvdEmbedder
from ragcache_core.retrieval.filters import Where, matches
from ragcache_core.retrieval.sources import or_nothing
from ragcache_core.retrieval.storage.framework_documents import put_nonblank
from ragcache_core.retrieval.storage.manifest import MANIFEST_NAME
from ragcache_core.types import Document, RetrievalUpdate
from ragcache_integrations.llamaindex.nodes import document_from_node, node_from_document, source_of, where_of
from ragcache_integrations.rag.handles import HoldsHandles

_SCAN_BATCH = 512
_PREFETCH_FACTOR = 4
"""Default MMR prefetch factor of LlamaIndex's other stores."""
_MMR_SETTINGS = {"mmr_prefetch_factor", "mmr_prefetch_k", "mmr_threshold"}


class TfidfSvdEmbedding(BaseEmbedding):
    """TF-IDF and truncated SVD, fitted on ``texts``, as a LlamaIndex embedding for any index.

    ::

        embed_model = TfidfSvdEmbedding([node.get_content() for node in nodes])
        index = VectorStoreIndex(nodes, embed_model=embed_model)

    A :class:`~ragcache_core.retrieval.DocumentStore` needs none of it: it fits the built-in embedder on its own
    documents and keeps it with them.

    Raises:
        ConfigError: no texts, or fewer than 8 dimensions.
    """

    _embedder: TfidfSvdEmbedder = PrivateAttr()

    def __init__(self, texts: Sequence[str], *, dimension: int = 128, seed: int = 0, **kwargs: Any) -> None:
        embedder = TfidfSvdEmbedder(dimension, seed=seed).fit(texts)
        super().__init__(**{"model_name": embedder.name, **kwargs})
        self._embedder = embedder

    @classmethod
    def class_name(cls) -> str:
        return "TfidfSvdEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        row: list[float] = self._embedder.embed_query(query).tolist()
        return row

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self._embedder.embed_documents(texts).tolist()
        return rows

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._get_text_embeddings(texts)


class StagedFAISSVectorStore(HoldsHandles, BasePydanticVectorStore):
    """Nodes with their embeddings in a folder. ``add`` and ``delete`` are durable when they return.

    ::

        vector_store = StagedFAISSVectorStore("docs.ragcache")
        index = VectorStoreIndex(nodes, storage_context=StorageContext.from_defaults(vector_store=vector_store))
        ...
        index = VectorStoreIndex.from_vector_store(StagedFAISSVectorStore("docs.ragcache"))     # another day

    Returned nodes are complete except for their embeddings. Adding a node whose id is stored replaces it. No call of
    ``persist`` is needed, as the store is its folder. A query returns fewer nodes only if fewer match.

    Args:
        store: an open store, which the caller closes; or a store's folder, created if missing.
        embedder: the embedding model, for queries in text (see ``RAGCacheRetriever``) and nodes without embeddings.
            Not needed where LlamaIndex embeds.
        **options: of a new store: ``index``, ``metric``, ``nlist``, ... of ``DocumentStore.create``. Similarities are
            inner products by default; with ``metric="l2"`` they are ``1 / (1 + squared distance)``.

    Raises:
        StoreError: the folder cannot be used. ConfigError: options that differ from those of an existing store.
    """

    stores_text: bool = True

    _store: DocumentStore = PrivateAttr()
    _owns_store: bool = PrivateAttr()

    def __init__(
        self,
        store: DocumentStore | str | os.PathLike[str],
        *,
        embedder: object | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stores_text=True)
        self._owns_store = not isinstance(store, DocumentStore)
        self._store = store if isinstance(store, DocumentStore) else _open(Path(store), embedder, options)
        if not self._owns_store and (embedder is not None or options):
            raise ConfigError("embedder and options are for a new store: give the folder instead of an open store")

    @classmethod
    def class_name(cls) -> str:
        return "StagedFAISSVectorStore"

    @property
    def client(self) -> DocumentStore:
        """The document store."""
        return self._store

    def close(self) -> None:
        """Save the index and release the lock; a store that was passed in stays open."""
        if self._owns_store:
            self._store.close()

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes and return their ids; a node with a stored id is replaced.

        Nodes without embeddings are embedded by the store, if it was made with an embedder. Nodes without text are not
        stored, with a warning; their ids are still returned.

        Raises:
            ValueError: some nodes have embeddings and some have none. DocumentError: metadata that is not JSON.
            EmbedderMismatchError: embeddings of another dimension. StoreError: they could not be saved.
        """
        documents = [document_from_node(node) for node in nodes]
        with_text = [node for node, document in zip(nodes, documents, strict=True) if document.text.strip()]
        num_embedded = sum(node.embedding is not None for node in with_text)
        if num_embedded not in (0, len(with_text)):
            raise ValueError(f"{num_embedded} of {len(with_text)} nodes have embeddings: embed all nodes, or none")
        embeddings = [node.embedding for node in nodes] if num_embedded else None
        put_nonblank(self._store, documents, embeddings=embeddings)
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of the document ``ref_doc_id``."""
        self._delete_where(lambda document: source_of(document) == ref_doc_id)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete the nodes with one of the ids (if given) that pass the filters."""
        self._delete_where(_accepts(filters), node_ids)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Delete all nodes."""
        self._store.delete(self._store.ids(), missing_ok=True)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return the nodes with one of the ids (if given) that pass the filters."""
        passes = _accepts(filters)
        return [node_from_document(document) for document in self._documents(node_ids) if passes(document)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the nearest nodes that pass the query's filters, best first.

        The mode ``mmr`` returns nodes by maximal marginal relevance: from ``mmr_prefetch_k`` nodes, or
        ``mmr_prefetch_factor`` (4) times the requested number, it chooses those near to the query and far from each
        other, weighted by ``mmr_threshold`` (0.5; 1 uses the query only).

        Raises:
            SearchError: a mode other than the default and ``mmr``, a missing vector if the store has no embedder, or a
                filter on a field that no node has.
            ConfigError: other ``kwargs``, which are ``vector_store_kwargs`` of a retriever: they would be without
                effect; a filter or a number that cannot work.
        """
        mmr = _mmr(query, kwargs)
        if (k := query.similarity_top_k) < 1:
            return _result([], [])
        where = _where(query)
        try:
            if query.query_embedding is not None:
                return self._as_result(self._store.search_vector(query.query_embedding, k, where=where, mmr=mmr))
            return self._as_result(self._store.search(_text(query), k, where=where, mmr=mmr))
        except EmptyStoreError:
            return _result([], [])

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Do :meth:`query` without blocking. Cancellation stops the search."""
        mmr = _mmr(query, kwargs)
        if (k := query.similarity_top_k) < 1:
            return _result([], [])
        where = _where(query)
        if query.query_embedding is not None:
            updates = self._store.search_vector_staged(query.query_embedding, k, stages=1, where=where, mmr=mmr)
        else:
            updates = self._store.search_staged(_text(query), k, stages=1, where=where, mmr=mmr)
        return self._as_result([update async for update in or_nothing(updates)][-1])

    def _as_result(self, update: RetrievalUpdate) -> VectorStoreQueryResult:
        nodes = [node_from_document(document) for document in update.documents]
        return _result(nodes, similarities(update.scores, self._store.metric))

    def _delete_where(self, is_gone: Callable[[Document], bool], node_ids: Sequence[str] | None = None) -> None:
        if gone := [document.doc_id for document in self._documents(node_ids) if is_gone(document)]:
            self._store.delete(gone, missing_ok=True)

    def _documents(self, node_ids: Sequence[str] | None) -> Iterator[Document]:
        wanted = self._store.ids() if node_ids is None else node_ids
        for start in range(0, len(wanted), _SCAN_BATCH):
            yield from self._store.get(wanted[start : start + _SCAN_BATCH], missing_ok=True)


def _open(path: Path, embedder: object | None, options: dict[str, Any]) -> DocumentStore:
    if not (path / MANIFEST_NAME).exists():
        embedder, options = embedder or PrecomputedEmbedder(), {"metric": "ip", **options}
    return DocumentStore.open_or_create(path, embedder=embedder, **options)


def _text(query: VectorStoreQuery) -> str:
    if query.query_str is None:
        raise SearchError("the query has neither an embedding nor a text: give one")
    return query.query_str


def _result(nodes: list[BaseNode], found: list[float]) -> VectorStoreQueryResult:
    return VectorStoreQueryResult(nodes=nodes, similarities=found, ids=[node.node_id for node in nodes])


def _mmr(query: VectorStoreQuery, asked: Mapping[str, Any]) -> MMR | None:
    """Return the MMR settings of a query; ``None`` in the default mode."""
    is_mmr = query.mode == VectorStoreQueryMode.MMR
    if unknown := asked.keys() - (_MMR_SETTINGS if is_mmr else set()):
        raise ConfigError(
            f"a search knows no {', '.join(sorted(unknown))}: which nodes is filters=MetadataFilters(...), of a query "
            f"or of index.as_retriever(); with the mode 'mmr' it takes {', '.join(sorted(_MMR_SETTINGS))}"
        )
    if not is_mmr and query.mode != VectorStoreQueryMode.DEFAULT:
        raise SearchError(f"the query mode is {query.mode.value!r}: this store knows 'default' and 'mmr'")
    if not is_mmr:
        return None
    factor = asked.get("mmr_prefetch_factor", _PREFETCH_FACTOR)
    fetch_k = asked.get("mmr_prefetch_k", int(factor * max(1, query.similarity_top_k)))
    threshold = asked.get("mmr_threshold", query.mmr_threshold)
    return MMR(fetch_k) if threshold is None else MMR(fetch_k, threshold)


def _where(query: VectorStoreQuery) -> Where | Callable[[Document], bool] | None:
    """Return the filter expression of a query; ``None`` for all. LlamaIndex's empty id lists mean any."""
    node_ids, sources = set(query.node_ids or ()), set(query.doc_ids or ())
    if not (node_ids or sources):
        return where_of(query.filters)
    passes = _accepts(query.filters)
    return lambda document: (
        (not node_ids or document.doc_id in node_ids)
        and (not sources or source_of(document) in sources)
        and passes(document)
    )


def _accepts(filters: MetadataFilters | None) -> Callable[[Document], bool]:
    """Return a function that tells whether a stored node passes ``filters``."""
    where = where_of(filters)
    return lambda document: where is None or matches(where, document.metadata)
