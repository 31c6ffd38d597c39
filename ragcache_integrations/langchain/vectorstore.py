"""A LangChain vector store over :class:`~ragcache_core.retrieval.DocumentStore`: Faiss, searched in stages, on disk."""
# ruff: noqa: A002 (LangChain's vector stores call it "filter")

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from ragcache_core.errors import ConfigError, EmptyStoreError
from ragcache_core.retrieval import MMR, DocumentStore, Embedder, LangChainEmbedder, TfidfSvdEmbedder
from ragcache_core.retrieval.filters import Where, parse_filter
from ragcache_core.retrieval.sources import NOTHING_FOUND
from ragcache_core.retrieval.storage.framework_documents import plain_metadata, plain_text, put_nonblank
from ragcache_core.types import Document, RetrievalUpdate
from ragcache_integrations.langchain.documents import to_langchain

MetadataFilter = Mapping[str, object] | Callable[[Mapping[str, object]], bool]
"""Condition on metadata, such as ``{"tenant": "a", "year": {"$gte": 2020}}``, or a function. See
:func:`~ragcache_core.retrieval.filters.parse_filter` for the operators."""


class CoreEmbeddings(Embeddings):
    """A core embedder as LangChain ``Embeddings``, for any vector store."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self._embedder.embed_documents(texts).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        row: list[float] = self._embedder.embed_query(text).tolist()
        return row


class TfidfSvdEmbeddings(CoreEmbeddings):
    """The built-in embedder, TF-IDF and a truncated SVD, fitted on ``texts``: no download, no network.

    :class:`StagedFAISS` needs none of it: without an embedding it fits
    the built-in embedder on its own documents and keeps it with them.

    Raises:
        ConfigError: no texts, or fewer than 8 dimensions.
    """

    def __init__(self, texts: Sequence[str], *, dimension: int = 128, seed: int = 0) -> None:
        super().__init__(TfidfSvdEmbedder(dimension, seed=seed).fit(texts))


class StagedFAISS(VectorStore):
    """A LangChain vector store in a folder, searched in stages. Nothing in it is ever unpickled.

    ``StagedFAISS.from_documents(documents)`` needs no embedding: the built-in one is fitted on the documents and kept
    with them. It finds documents by their words and names as well, where the question is a text. Scores are the store's
    own: squared L2 distances (less is nearer) or, with ``metric="ip"``, inner products (more is nearer). Metadata is
    plain JSON. ``k`` may be larger than the store.

    Adding a document whose id is stored replaces it. Each change is durable when it returns. Unknown arguments of a
    search are rejected, as a misspelt ``filter`` would return all documents.
    """

    def __init__(self, store: DocumentStore) -> None:
        """Wrap an open core store. The caller closes it, or :meth:`close` does."""
        self.store = store
        self._discard_folder: Callable[[], object] | None = None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str] | None = None, embedding: Embeddings | object | None = None, **index: Any
    ) -> Self:
        """Make an empty store in a new folder; without ``path`` in a temporary one.

        ``index`` are settings of :meth:`DocumentStore.create <ragcache_core.retrieval.DocumentStore.create>`:
        ``index="hnsw"``, ``metric="ip"``, ``nlist=1024``, ...
        """
        _check_names(index)
        if path is not None:
            return cls(DocumentStore.create(path, embedder=embedding, **index))
        folder = Path(tempfile.mkdtemp(prefix="ragcache-store-"))
        try:
            store = DocumentStore.create(folder, embedder=embedding, **index)
        except BaseException:
            shutil.rmtree(folder)
            raise
        made = cls(store)
        made._discard_folder = weakref.finalize(made, _discard, store, folder)
        return made

    @classmethod
    def open(cls, path: str | os.PathLike[str], embedding: Embeddings | object | None = None, **how: Any) -> Self:
        """Open a store of :meth:`create`; pass your own embedding again."""
        _check_names(how)
        return cls(DocumentStore.open(path, embedder=embedding, **how))

    @classmethod
    def open_or_create(
        cls, path: str | os.PathLike[str], embedding: Embeddings | object | None = None, **index: Any
    ) -> Self:
        """Open the store in a folder, or make one if there is none.

        ``index`` are settings of :meth:`create`, which a store that exists has to agree with.
        """
        _check_names(index)
        return cls(DocumentStore.open_or_create(path, embedder=embedding, **index))

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        **index: Any,
    ) -> Self:
        """Make a store of texts; see :meth:`create`. To add texts to an existing store use :meth:`open_or_create`."""
        made = cls.create(path, embedding, **index)
        try:
            made.add_texts(texts, metadatas, ids=ids)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def from_documents(
        cls, documents: list[LangChainDocument], embedding: Embeddings | None = None, **settings: Any
    ) -> Self:
        """Make a store of documents with their ids; see :meth:`create`."""
        settings.setdefault("ids", [d.id for d in documents])
        texts, metadatas = [d.page_content for d in documents], [d.metadata for d in documents]
        return cls.from_texts(texts, embedding, metadatas, **settings)

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Self:
        return await run_in_executor(None, cls.from_texts, texts, embedding, metadatas, **settings)

    @classmethod
    async def afrom_documents(
        cls, documents: list[LangChainDocument], embedding: Embeddings | None = None, **settings: Any
    ) -> Self:
        return await run_in_executor(None, cls.from_documents, documents, embedding, **settings)

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """Return LangChain's retriever over this store. ``RAGCacheRetriever`` also overlaps search and prefill.

        Raises:
            ConfigError: an argument that this retriever would ignore, such as ``engine``.
        """
        if unknown := kwargs.keys() - VectorStoreRetriever.model_fields.keys():
            named = ", ".join(f"{name}=..." for name in sorted(unknown))
            raise ConfigError(
                f"as_retriever() ignores {', '.join(sorted(unknown))}: pass settings of a search as "
                f"search_kwargs={{...}}, or use RAGCacheRetriever(store=..., {named})"
            )
        return super().as_retriever(**kwargs)

    def close(self) -> None:
        """Save the index and release the lock; a store without a ``path`` is deleted. Idempotent."""
        self.store.close()
        if self._discard_folder is not None:
            self._discard_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def embeddings(self) -> Embeddings:
        """The embedding; for the built-in one, the copy fitted on this store's documents."""
        embedder = self.store.embedder
        if isinstance(embedder, LangChainEmbedder) and isinstance(embedder.embeddings, Embeddings):
            return embedder.embeddings
        return CoreEmbeddings(embedder)

    # Changing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: Sequence[Mapping[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store texts and return their ids, which are generated if not given. A stored id is replaced.

        Empty texts are not stored, with a warning; their ids are still returned, and stored documents with such
        an id are deleted. Dates in the metadata are converted to ISO format.

        Raises:
            ValueError: not one id or metadata for each text.
            DocumentError: metadata that is not JSON; the store is as it was.
        """
        texts = list(texts)
        for name, given in (("metadatas", metadatas), ("ids", ids)):
            if given is not None and len(given) != len(texts):
                raise ValueError(f"{len(given)} {name} for {len(texts)} texts: give one for each, or none at all")
        doc_ids = [doc_id or str(uuid4()) for doc_id in (ids or [None] * len(texts))]
        metadata = metadatas or [{}] * len(texts)
        documents = [
            Document(i, plain_text(text), plain_metadata(m))
            for i, text, m in zip(doc_ids, texts, metadata, strict=True)
        ]
        put_nonblank(self.store, documents, **kwargs)
        return doc_ids

    def delete(self, ids: Sequence[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents; all of them without ``ids``. Ids that are not stored are skipped.

        Raises:
            ConfigError: another argument, such as a filter, which would leave ``ids`` out and remove all documents.
        """
        if kwargs:
            raise ConfigError(f"delete() knows no {', '.join(sorted(kwargs))}: pass the ids of the documents")
        self.store.delete(self.store.ids() if ids is None else ids, missing_ok=True)
        return True

    # Looking up

    def get_by_ids(self, ids: Sequence[str], /) -> list[LangChainDocument]:
        """Return the stored documents, in the order of ``ids``."""
        return [to_langchain(d) for d in self.store.get(ids, missing_ok=True)]

    # Searching

    def similarity_search(
        self, query: str, k: int = 4, *, filter: MetadataFilter | None = None, **kwargs: Any
    ) -> list[LangChainDocument]:
        return _documents(self._search(query, k, filter, kwargs))

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: MetadataFilter | None = None, **kwargs: Any
    ) -> list[tuple[LangChainDocument, float]]:
        return _scored(self._search(query, k, filter, kwargs))

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: MetadataFilter | None = None, **kwargs: Any
    ) -> list[LangChainDocument]:
        return _documents(self._search(embedding, k, filter, kwargs))

    async def asimilarity_search_staged(
        self,
        query: str,
        k: int = 4,
        *,
        filter: MetadataFilter | None = None,
        stages: int | Sequence[float] | None = None,
    ) -> AsyncGenerator[RetrievalUpdate]:
        """Yield the candidates after each stage; the last update equals the result of the other methods.

        See :meth:`DocumentStore.search_staged <ragcache_core.retrieval.DocumentStore.search_staged>`.
        """
        if k > 0:
            updates = self.store.search_staged(query, k, stages=stages, where=as_where(filter))
            with suppress(EmptyStoreError):
                async with aclosing(updates):
                    async for update in updates:
                        yield update

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: MetadataFilter | None = None,
        **kwargs: Any,
    ) -> list[LangChainDocument]:
        """Return ``k`` of the ``fetch_k`` best documents by maximal marginal relevance."""
        return _documents(self._search(query, k, filter, kwargs, MMR(fetch_k, lambda_mult)))

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: MetadataFilter | None = None,
        **kwargs: Any,
    ) -> list[LangChainDocument]:
        return _documents(self._search(embedding, k, filter, kwargs, MMR(fetch_k, lambda_mult)))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return relevance_of(self.store)

    def _search(
        self,
        query: str | list[float],
        k: int,
        filter: MetadataFilter | None,
        unknown: Mapping[str, object],
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        if unknown:
            raise ConfigError(f"a search knows no {', '.join(unknown)}: it takes k and filter")
        where = as_where(filter)
        if k < 1:
            return NOTHING_FOUND
        try:
            if isinstance(query, str):
                return self.store.search(query, k, where=where, mmr=mmr)
            return self.store.search_vector(query, k, where=where, mmr=mmr)
        except EmptyStoreError:
            return NOTHING_FOUND


def as_where(accepted: MetadataFilter | None) -> Where | Callable[[Document], bool] | None:
    """Return the filter expression of ``filter``; ``None`` for all documents.

    Raises:
        ConfigError: it is no filter.
    """
    if accepted is None or accepted == {}:
        return None
    if callable(accepted):
        return lambda document: _accepts(accepted, document)
    return parse_filter(accepted)


def relevance_of(store: DocumentStore) -> Callable[[float], float]:
    """Return a function from store scores to relevance in [0, 1]; larger is nearer.

    Squared distances and cosines, which are inner products of unit vectors, give 1 for the document itself. Inner
    products of other vectors have no largest value: a typical document itself has 0.75, and none has 1.
    """
    if store.metric == "l2":
        return lambda squared_distance: 1.0 / (1.0 + squared_distance)
    if (squared_length := store.squared_length) == 1.0:
        return lambda cosine: min(1.0, max(0.0, (1.0 + cosine) / 2))
    return lambda product: 0.5 + math.atan(product / squared_length) / math.pi


def _check_names(settings: Mapping[str, object]) -> None:
    """Reject ``embedder``, the core store's name of LangChain's ``embedding``."""
    if "embedder" in settings:
        raise ConfigError("StagedFAISS has no argument embedder: pass the embedding as embedding=...")


def _accepts(accepted: Callable[[Mapping[str, Any]], bool], document: Document) -> bool:
    try:
        return accepted(document.metadata)
    except AttributeError as error:  # other stores hand whole documents over
        raise ConfigError(
            f"filter fails ({error}): it is called with a document's metadata, a dict, as in "
            "lambda metadata: metadata['key'] == 'value'"
        ) from error


def _documents(update: RetrievalUpdate) -> list[LangChainDocument]:
    return [to_langchain(d) for d in update.documents]


def _scored(update: RetrievalUpdate) -> list[tuple[LangChainDocument, float]]:
    return list(zip(_documents(update), update.scores, strict=True))


def _discard(store: DocumentStore, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)
