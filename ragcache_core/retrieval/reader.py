"""The part of a document store that reads: documents by their ids, and searches in one stage or several."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ragcache_core.errors import EmptyStoreError, StoreError, TooFewDocumentsError, UnknownDocumentError
from ragcache_core.retrieval.base import IndexKind, Metric
from ragcache_core.retrieval.embedders.base import Embedder, check_query
from ragcache_core.retrieval.search import MMR, Filter, Search, SearchQuery, SearchQuestion, check_k
from ragcache_core.retrieval.storage.snapshot import Snapshot, StoreStats
from ragcache_core.retrieval.threads import SearchThreads, closed_error
from ragcache_core.types import DocId, Document, RetrievalUpdate


class StoreReader:
    """The part of :class:`~ragcache_core.retrieval.store.DocumentStore` that reads: one immutable snapshot at a time.

    A call keeps the snapshot that was published last when it began.
    """

    def __init__(self, folder: Path, snapshot: Snapshot) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._is_closed = False
        self._threads = SearchThreads(str(folder))
        self._snapshot = snapshot

    # Looking up

    def get(self, doc_ids: Iterable[DocId], *, missing_ok: bool = False) -> list[Document]:
        """Return documents in the order of ``doc_ids``; ``missing_ok`` leaves out those that are not stored.

        Raises:
            UnknownDocumentError: one of them is not stored.
        """
        wanted = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        self._check_open()
        snapshot = self._snapshot
        found = self._find(snapshot, wanted, missing_ok=missing_ok)
        documents = snapshot.documents.read(list(found.values()))
        return [documents[found[doc_id]] for doc_id in wanted if doc_id in found]

    def _find(self, snapshot: Snapshot, doc_ids: Sequence[DocId], *, missing_ok: bool = False) -> dict[DocId, int]:
        found = snapshot.documents.find(doc_ids)
        for doc_id in () if missing_ok else doc_ids:
            if doc_id not in found:
                raise UnknownDocumentError(f"document {doc_id!r} is not in {self._folder}: check ids() for what is")
        return found

    def ids(self) -> list[DocId]:
        """Return the ids of all documents, in the order they were added."""
        self._check_open()
        return list(self._snapshot.documents.doc_ids())

    def __len__(self) -> int:
        return len(self._snapshot.documents)

    def __contains__(self, doc_id: object) -> bool:
        self._check_process()
        return isinstance(doc_id, str) and bool(self._snapshot.documents.find([doc_id]))

    # Searching

    def search(
        self,
        query: str,
        k: int,
        *,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        """Return the ``k`` best documents, in one stage: the answer of the unmodified index, or where words count
        (``word_weight``) the best of what the index and the words put forward. Where that index finds fewer than ``k``,
        all its vectors are compared, so that a search returns ``k`` documents, or all documents of a smaller store.

        An HNSW index is searched with ``efSearch = max(ef_search, k)``, more while deleted documents are in its graph,
        and its answer is that of the unmodified index with this value.

        ``where`` is a filter on the metadata, ``{"town": "Aro", "year": {"$gte": 2020}}``; the answer is that of the
        unmodified index with a selector of the documents that pass. It looks at as many of them as it would at all, so
        that among few it is exact: ``nprobe`` and ``efSearch`` grow, and below about an eighth (IVF) or some thousands
        (HNSW) all that pass are compared. With a function of a document more and more neighbours are looked at until
        ``k`` pass, and at last all. Either way fewer than ``k`` come back only where fewer match.

        ``score_threshold`` leaves out documents with larger distances (``l2``) or smaller products (``ip``); ``mmr``
        chooses ``k`` of more documents, which differ from each other.

        Raises:
            SearchError: an empty query, an impossible ``k``, a filter on a field that no document has, or on a value of
                a kind that the field never has. EmptyStoreError
            ConfigError: something that is no filter.
        """
        snapshot, _ = self.begin_search()
        demand = SearchQuery.of(snapshot, k, where, score_threshold, mmr)
        return Search(snapshot, SearchQuestion.of(snapshot, query), demand).run()

    def search_vector(
        self,
        vector: object,
        k: int,
        *,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        """Return the ``k`` documents nearest to a vector ``[dimension]``, by vectors alone. See :meth:`search`."""
        snapshot, _ = self.begin_search()
        demand = SearchQuery.of(snapshot, k, where, score_threshold, mmr)
        return Search(snapshot, SearchQuestion(check_query(vector, snapshot.manifest.dimension)), demand).run()

    async def search_staged(
        self,
        query: str,
        k: int,
        *,
        stages: int | Sequence[float] | None = None,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage; the last update is final and equals :meth:`search`'s.

        ``stages`` is a number of them, or increasing shares of the work as ``(0.1, 0.5, 1.0)``; by default 5, 15, 40
        and 100 %, without those that would, by the searches so far, take less than about a millisecond. An HNSW index
        repeats work in each stage, so by default it has two: the first of these and the last. A stage that
        adds no work is left out. Closing the iterator early stops the search. With a filter that is
        a function there is one stage.

        Where words count and the last question took 5 ms or more to embed, as with a service, what the words alone find
        is one stage more, the first.
        """
        snapshot, threads = self.begin_search()
        demand = SearchQuery.of(snapshot, k, where, score_threshold, mmr)
        async with aclosing(threads.text_updates(snapshot, query, demand, stages)) as updates:
            async for update in updates:
                yield update

    async def search_vector_staged(
        self,
        vector: object,
        k: int,
        *,
        stages: int | Sequence[float] | None = None,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage. See :meth:`search_staged`."""
        snapshot, threads = self.begin_search()
        demand = SearchQuery.of(snapshot, k, where, score_threshold, mmr)
        question = SearchQuestion(check_query(vector, snapshot.manifest.dimension))
        async with aclosing(threads.updates(snapshot, question, demand, stages)) as updates:
            async for update in updates:
                yield update

    def check_k(self, k: int) -> None:
        """Raise unless the store holds ``k`` documents. A search with a larger ``k`` returns all documents.

        Raises:
            SearchError, EmptyStoreError, TooFewDocumentsError: ``k`` is no positive number, or the store holds fewer.
        """
        self._check_open()
        num_wanted, num_documents = check_k(k), len(self._snapshot.documents)
        if not num_documents:
            raise EmptyStoreError("the store holds no documents yet: add some before searching")
        if num_wanted > num_documents:
            raise TooFewDocumentsError(
                f"{k} documents were asked for, the store holds {num_documents}: use a smaller k"
            )

    def begin_search(self) -> tuple[Snapshot, SearchThreads]:
        """Return the state that a search beginning now keeps until it ends, and the threads that run it.

        Raises:
            StoreError: the store was closed, or opened before a fork.
        """
        self._check_open()
        return self._snapshot, self._threads

    # About the store

    @property
    def path(self) -> Path:
        """The folder, as an absolute path."""
        return self._folder

    @property
    def identity(self) -> str:
        """What names the store in every process: what is learnt of its searches is kept under it."""
        return str(self._folder)

    @property
    def embedder(self) -> Embedder:
        """The embedder; of a trainable one, the store's own fitted copy."""
        return self._snapshot.embedder

    @property
    def dimension(self) -> int | None:
        """Dimensions of the vectors; ``None`` until the embedder was first used."""
        return self._snapshot.manifest.dimension

    @property
    def metric(self) -> Metric:
        """How near two vectors are: ``l2`` or ``ip``."""
        return self._snapshot.manifest.options.metric

    @property
    def squared_length(self) -> float:
        """The inner product of a typical stored vector with itself: 1 for unit vectors, and where words count."""
        return self._snapshot.squared_length

    @property
    def word_weight(self) -> float:
        """The share of the words in the score of a document; 0 in a store that is searched by vectors alone."""
        return self._snapshot.manifest.options.word_weight or 0.0

    @property
    def index_kind(self) -> IndexKind:
        """The kind of index that was chosen: ``ivf``, ``hnsw`` or ``flat``."""
        return self._snapshot.manifest.options.kind

    @property
    def faiss_index(self) -> Any:
        """The unmodified Faiss index of this moment, or ``None``. Its ids are internal. Do not change it.

        To compare with :meth:`search`, search an HNSW index with ``efSearch = max(ef_search, k)``.
        """
        index = self._snapshot.index
        return None if index is None else index.native

    def stats(self) -> StoreStats:
        """Return what the store holds now."""
        return self._snapshot.stats()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"{self._folder} was opened before a fork: open it again in this process")

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise closed_error(str(self._folder))
