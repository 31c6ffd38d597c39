"""Several stores searched as one: every shard that arrives is a stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from ragcache_core.errors import (
    ConfigError,
    DuplicateDocumentError,
    EmbedderMismatchError,
    EmptyStoreError,
    UnknownDocumentError,
)
from ragcache_core.retrieval.base import Metric, Vectors
from ragcache_core.retrieval.bound_engines import CachesDocuments, Warming
from ragcache_core.retrieval.embedders.base import Embedder, TrainableEmbedder, check_query
from ragcache_core.retrieval.hybrid import Question
from ragcache_core.retrieval.selection import Selection
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.storage.opening import is_same_state
from ragcache_core.retrieval.storage.snapshot import Snapshot, check_k, select_documents
from ragcache_core.retrieval.store import DocumentStore
from ragcache_core.retrieval.threads import SearchThreads
from ragcache_core.retrieval.wanted import MMR, Filter, Wanted
from ragcache_core.retrieval.words import WordWeights
from ragcache_core.runtime.handle import Handle
from ragcache_core.types import DocId, Document, RetrievalUpdate

_MOST_IDS_COMPARED = 100_000
"""Measured: 0.1 s. The ids of larger shards are not compared when they are put together."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A store at the moment at which a search began."""

    store: DocumentStore
    snapshot: Snapshot
    threads: SearchThreads

    @property
    def num_documents(self) -> int:
        return len(self.snapshot.documents)

    def share_of(self, wanted: Wanted) -> Wanted:
        """Return what this shard is asked for: all that could be chosen."""
        return replace(wanted, k=min(wanted.num_candidates, self.num_documents), mmr=None)

    @contextmanager
    def naming_itself(self) -> Iterator[None]:
        """Say in an error which shard it comes from."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in the shard {self.store.path}")
            raise


class ShardedStore(Handle):
    """Several open stores as one. They stay their owners', who may add to them and close them.

    ::

        news, archive = DocumentStore.open("news.ragcache"), DocumentStore.open("archive.ragcache")
        async for update in ShardedStore([news, archive]).search_staged("Who keeps the lighthouse of Zor?", k=4):
            ...

    Scores are compared across shards, so all have the same metric and the same embedder. The built-in one is fitted
    on documents: fit it once and make every shard with it, ``DocumentStore.create(path, embedder=fitted)``.

    Documents are ordered by score, and by id where scores are equal, whichever shard came first; which of several that
    tie for a shard's last place it finds is its index's choice. A document that two shards hold is found once, where it
    is nearer; up to 100,000 documents in all are checked for this at the start, and it is refused.

    Raises:
        ConfigError: no stores, one of them twice, or metrics that differ. EmbedderMismatchError: embedders that differ.
        DuplicateDocumentError: a document is in two of them. StoreError: one of them is closed.
    """

    def __init__(self, stores: Iterable[DocumentStore]) -> None:
        self._stores = tuple(stores)
        if not self._stores:
            raise ConfigError("there are no shards: give at least one store")
        for store in self._stores:
            if not isinstance(store, DocumentStore):
                raise ConfigError(f"a shard is a {type(store).__name__}: give open DocumentStores")
        if len({store.path for store in self._stores}) < len(self._stores):
            raise ConfigError("a store is among the shards twice: give each once")
        for a, b in pairwise(self._stores):
            if a.metric != b.metric:
                raise ConfigError(
                    f"{a.path} has the metric {a.metric!r}, {b.path} {b.metric!r}: their scores cannot be compared, "
                    "make one of them anew"
                )
        self._compared: tuple[Embedder, ...] = ()
        self._weighed: tuple[tuple[DocumentTable, ...], WordWeights] | None = None
        self._begin()
        for a, b in pairwise(self._stores):
            if a.word_weight != b.word_weight:
                raise ConfigError(
                    f"{a.path} has the word_weight {a.word_weight:g}, {b.path} {b.word_weight:g}: their scores cannot "
                    "be compared, make one of them anew"
                )
        self._check_ids()

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
        """Return the ``k`` nearest documents of all shards, in one stage. See :meth:`DocumentStore.search`.

        Raises:
            SearchError: an empty query, an impossible ``k`` or filter. EmptyStoreError
            EmbedderMismatchError: a shard was fitted otherwise since. An error of a shard's search names the shard.
        """
        shards = self._searched(k)
        wanted = Wanted.of(k, where, score_threshold, mmr)
        return self._search(shards, self._asked(shards, query), wanted)

    def search_vector(
        self,
        vector: object,
        k: int,
        *,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        """Return the ``k`` documents nearest to a vector ``[dimension]``. See :meth:`search`."""
        shards = self._searched(k)
        wanted = Wanted.of(k, where, score_threshold, mmr)
        question = Question(check_query(vector, shards[0].snapshot.manifest.dimension))
        return self._search(shards, question, wanted)

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
        """Yield the best of the shards that have arrived, after each; the last update is final and equals
        :meth:`search`'s.

        With ``stages``, as :meth:`DocumentStore.search_staged` takes them, each shard's own stages count too. An early
        update may hold fewer than ``k`` documents. A shard that fails ends the search with its error, which names it.
        Closing the iterator early stops the search in all of them.
        """
        shards = self._searched(k)
        wanted = Wanted.of(k, where, score_threshold, mmr)
        question = await shards[0].threads.run(lambda: self._asked(shards, query))
        async with aclosing(self._updates(shards, question, wanted, stages)) as updates:
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
        """Yield the best of the shards that have arrived, after each. See :meth:`search_staged`."""
        shards = self._searched(k)
        wanted = Wanted.of(k, where, score_threshold, mmr)
        question = Question(check_query(vector, shards[0].snapshot.manifest.dimension))
        async with aclosing(self._updates(shards, question, wanted, stages)) as updates:
            async for update in updates:
                yield update

    def _asked(self, shards: Sequence[_Shard], query: str) -> Question:
        """Return a question whose words are worth what they are in all shards together."""
        question = shards[0].snapshot.embed(query)
        if question.words is None:
            return question
        tables = tuple(shard.snapshot.documents for shard in shards)
        weighed = self._weighed
        if weighed is None or weighed[0] != tables:
            weighed = tables, WordWeights([part for table in tables for part in table.words()])
            self._weighed = weighed
        return replace(question, weights=weighed[1])

    def _search(self, shards: Sequence[_Shard], question: Question, wanted: Wanted) -> RetrievalUpdate:
        def search(shard: _Shard, among: Selection | None) -> Callable[[], RetrievalUpdate]:
            return lambda: shard.snapshot.search(question, shard.share_of(wanted), among)

        running = []
        try:
            for shard, among in zip(shards, _selected(shards, wanted), strict=True):
                with shard.naming_itself():
                    running.append(shard.threads.submit(search(shard, among)))
            found = []
            for shard, future in zip(shards, running, strict=True):
                with shard.naming_itself():
                    found.append(future.result())
        finally:
            for future in running:
                future.cancel()
            wait(running)
        return _chosen(shards, question, wanted, self._merged(found, wanted.num_candidates, 0, is_final=True))

    async def _updates(
        self, shards: Sequence[_Shard], question: Question, wanted: Wanted, stages: int | Sequence[float] | None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        arrived: asyncio.Queue[tuple[int, RetrievalUpdate | Exception]] = asyncio.Queue()
        threads = shards[0].threads
        selected = (
            _selected(shards, wanted) if wanted.where is None else await threads.run(lambda: _selected(shards, wanted))
        )

        async def follow(position: int, shard: _Shard) -> None:
            asked, cuts = shard.share_of(wanted), 1 if stages is None else stages
            try:
                with shard.naming_itself():
                    updates = shard.threads.updates(shard.snapshot, question, asked, cuts, selected[position])
                    async with aclosing(updates):
                        async for update in updates:
                            arrived.put_nowait((position, update))
            except Exception as error:
                arrived.put_nowait((position, error))

        tasks = [asyncio.create_task(follow(position, shard)) for position, shard in enumerate(shards)]
        known: dict[int, RetrievalUpdate] = {}
        number, is_final = 0, False
        try:
            while not is_final:
                position, update = await arrived.get()
                if isinstance(update, Exception):
                    raise update
                known[position] = update
                is_final = len(known) == len(shards) and all(each.is_final for each in known.values())
                merged = self._merged([known[i] for i in sorted(known)], wanted.num_candidates, number, is_final)
                if wanted.mmr is not None:
                    merged = await threads.run(partial(_chosen, shards, question, wanted, merged))
                yield merged
                number += 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _merged(self, updates: Iterable[RetrievalUpdate], k: int, stage: int, is_final: bool) -> RetrievalUpdate:
        """Return the best of ``updates``, which come in the order of the shards."""
        sign = -1 if self.metric == "ip" else 1
        pairs = [pair for update in updates for pair in zip(update.scores, update.documents, strict=True)]
        best: dict[DocId, tuple[float, Document]] = {}
        for score, document in sorted(pairs, key=lambda pair: (sign * pair[0], pair[1].doc_id)):
            best.setdefault(document.doc_id, (score, document))
        found = list(best.values())[:k]
        return RetrievalUpdate(
            documents=tuple(document for _, document in found),
            scores=tuple(score for score, _ in found),
            stage=stage,
            is_final=is_final,
        )

    def _searched(self, k: object) -> list[_Shard]:
        """Return the shards that hold documents, if ``k`` is a number of documents."""
        check_k(k)
        shards = [shard for shard in self._begin() if shard.num_documents]
        if not shards:
            raise EmptyStoreError("the shards hold no documents yet: add some before searching")
        return shards

    def _begin(self) -> list[_Shard]:
        """Return the state of every shard now; their embedders are compared when one is new."""
        shards = [_Shard(store, *store.begin_search()) for store in self._stores]
        embedders = tuple(shard.snapshot.embedder for shard in shards)
        if len(embedders) != len(self._compared) or any(
            now is not before for now, before in zip(embedders, self._compared, strict=True)
        ):
            _check_comparable(shards)
            self._compared = embedders
        return shards

    def _check_ids(self) -> None:
        if len(self) > _MOST_IDS_COMPARED:
            return
        holder: dict[DocId, DocumentStore] = {}
        for store in self._stores:
            for doc_id in store.ids():
                if (other := holder.setdefault(doc_id, store)) is not store:
                    raise DuplicateDocumentError(
                        f"document {doc_id!r} is in {other.path} and in {store.path}: delete it from one of them"
                    )

    # Looking up

    def get(self, doc_ids: Iterable[DocId], *, missing_ok: bool = False) -> list[Document]:
        """Return documents in the order of ``doc_ids``; ``missing_ok`` leaves out those that are in no shard.

        Raises:
            UnknownDocumentError: one of them is in no shard.
        """
        wanted = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        found: dict[DocId, Document] = {}
        for snapshot in (shard.snapshot for shard in self._begin()):
            internal = snapshot.documents.find([doc_id for doc_id in wanted if doc_id not in found])
            documents = snapshot.documents.read(list(internal.values()))
            found.update({doc_id: documents[internal_id] for doc_id, internal_id in internal.items()})
        for doc_id in () if missing_ok else wanted:
            if doc_id not in found:
                raise UnknownDocumentError(f"document {doc_id!r} is in no shard: check ids() for what is")
        return [found[doc_id] for doc_id in wanted if doc_id in found]

    def ids(self) -> list[DocId]:
        """Return the ids of all documents, shard by shard."""
        return list(dict.fromkeys(doc_id for store in self._stores for doc_id in store.ids()))

    def __len__(self) -> int:
        return sum(len(store) for store in self._stores)

    def __contains__(self, doc_id: object) -> bool:
        return any(doc_id in store for store in self._stores)

    # Changing

    def replace(self, document: Document, *, embedding: object | None = None) -> None:
        """Store another version of a document in the shard that has it. See :meth:`DocumentStore.replace`.

        Raises:
            UnknownDocumentError: it is in no shard. Exception: whatever the shard raises.
        """
        for store in self._holders([document.doc_id]):
            store.replace(document, embedding=embedding)

    def delete(self, doc_ids: Iterable[DocId]) -> None:
        """Remove documents from the shards that have them. Durable; atomic in each shard.

        Raises:
            UnknownDocumentError: one of them is in no shard; nothing was removed. Exception: whatever a shard raises,
                those before it have changed.
        """
        for store, own in self._holders([doc_ids] if isinstance(doc_ids, str) else doc_ids).items():
            store.delete(own)

    def bind(self, engine: CachesDocuments, *, warm: Warming = False) -> None:
        """Have an engine forget what changes in any shard, whoever changes it. See :meth:`DocumentStore.bind`."""
        for store in self._stores:
            store.bind(engine, warm=warm)

    def unbind(self, engine: CachesDocuments) -> None:
        """Undo :meth:`bind`."""
        for store in self._stores:
            store.unbind(engine)

    def _holders(self, doc_ids: Iterable[DocId]) -> dict[DocumentStore, list[DocId]]:
        """Return the shards that have documents, each with those that it has."""
        wanted = list(dict.fromkeys(doc_ids))
        holders: dict[DocumentStore, list[DocId]] = {}
        for doc_id in wanted:
            stores = [store for store in self._stores if doc_id in store]
            if not stores:
                raise UnknownDocumentError(f"document {doc_id!r} is in no shard: check ids() for what is")
            for store in stores:
                holders.setdefault(store, []).append(doc_id)
        return holders

    # About the shards

    @property
    def stores(self) -> tuple[DocumentStore, ...]:
        """The shards, in the order given."""
        return self._stores

    @property
    def identity(self) -> str:
        """What names the shards together in every process."""
        return "\n".join(store.identity for store in self._stores)

    @property
    def embedder(self) -> Embedder:
        """The embedder of all shards."""
        return next((store.embedder for store in self._stores if len(store)), self._stores[0].embedder)

    @property
    def dimension(self) -> int | None:
        """Dimensions of the vectors; ``None`` until the embedder was first used."""
        return next((store.dimension for store in self._stores if store.dimension is not None), None)

    @property
    def metric(self) -> Metric:
        """How near two vectors are: ``l2`` or ``ip``."""
        return self._stores[0].metric

    @property
    def squared_length(self) -> float:
        """The inner product of a typical stored vector with itself: 1 for unit vectors, and where words count."""
        return next((store.squared_length for store in self._stores if len(store)), 1.0)


def _selected(shards: Sequence[_Shard], wanted: Wanted) -> Sequence[Selection | None]:
    """Return the documents of each shard that may be found; ``None`` for all."""
    if wanted.where is None or callable(wanted.where):
        return [None] * len(shards)
    return select_documents([shard.snapshot.documents for shard in shards], wanted.where)


def _chosen(shards: Sequence[_Shard], question: Question, wanted: Wanted, merged: RetrievalUpdate) -> RetrievalUpdate:
    """Return the documents of an update that are different enough."""
    if wanted.mmr is None or not merged.documents:
        return merged
    doc_ids = [document.doc_id for document in merged.documents]
    vectors: dict[DocId, Vectors] = {}
    for table in (shard.snapshot.documents for shard in shards):
        found = table.find([doc_id for doc_id in doc_ids if doc_id not in vectors])
        vectors.update(zip(found, table.read_vectors(list(found.values()), len(question.vector)), strict=True))
    rows = wanted.mmr.choose(question.vector, np.stack([vectors[doc_id] for doc_id in doc_ids]), wanted.k)
    return replace(
        merged,
        documents=tuple(merged.documents[row] for row in rows),
        scores=tuple(merged.scores[row] for row in rows),
    )


def _check_comparable(shards: Sequence[_Shard]) -> None:
    """Raise unless all shards embed alike. One that holds nothing yet may be unfitted."""
    fitted: _Shard | None = None
    for shard in shards:
        first, embedder = shards[0].snapshot.embedder, shard.snapshot.embedder
        if embedder.name != first.name:
            raise EmbedderMismatchError(
                f"{shards[0].store.path} has the embedder {first.name!r}, {shard.store.path} {embedder.name!r}: their "
                "scores cannot be compared, make all shards with one embedder"
            )
        if isinstance(embedder, TrainableEmbedder) and not embedder.is_fitted:
            continue
        if fitted is None:
            fitted = shard
        other, dimensions = fitted.snapshot, (fitted.store.dimension, shard.store.dimension)
        if None not in dimensions and dimensions[0] != dimensions[1]:
            raise EmbedderMismatchError(
                f"{fitted.store.path} has {dimensions[0]} dimensions, {shard.store.path} {dimensions[1]}: make all "
                "shards with one embedder"
            )
        if (
            isinstance(embedder, TrainableEmbedder)
            and isinstance(other.embedder, TrainableEmbedder)
            and embedder is not other.embedder
            and not is_same_state(embedder, other.embedder)
        ):
            raise EmbedderMismatchError(
                f"the embedders of {fitted.store.path} and {shard.store.path} were fitted on different documents: fit "
                f"one {embedder.name!r} on a good part of both and make all shards with it, "
                "DocumentStore.create(path, embedder=fitted)"
            )
