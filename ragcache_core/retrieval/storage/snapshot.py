"""One published state of a store, and the search in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ragcache_core.errors import EmptyStoreError, SearchError, TooFewDocumentsError
from ragcache_core.retrieval.base import IndexKind, Metric, Neighbors, Stage, StagedIndex
from ragcache_core.retrieval.embedders.base import Embedder, check_query
from ragcache_core.retrieval.hybrid import Finder, Question
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.storage.manifest import Manifest
from ragcache_core.retrieval.words import count_words
from ragcache_core.types import Document, RetrievalUpdate

_FIRST_FETCH = 4
"""A filtered search first looks at so many times the documents asked for."""

Filter = Callable[[Document], bool]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. ``index_layout`` is ``flat`` while there are too few documents to train ``ivf``."""

    num_documents: int
    dimension: int | None
    embedder: str
    index_kind: IndexKind
    index_layout: str | None
    metric: Metric
    generation: int
    num_segments: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Documents, index and embedder of one generation. Immutable: a search keeps the one it began with."""

    manifest: Manifest
    documents: DocumentTable
    index: StagedIndex | None
    embedder: Embedder
    num_unsaved: int = 0
    """Changes that the saved index lacks; they are made up for when it is read."""

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        manifest = self.manifest
        return StoreStats(
            num_documents=len(self.documents),
            dimension=manifest.dimension,
            embedder=manifest.embedder_name,
            index_kind=manifest.options.kind,
            index_layout=None if self.index is None else self.index.layout,
            metric=manifest.options.metric,
            generation=manifest.generation,
            num_segments=len(manifest.segments),
            num_bytes=sum(entry.num_bytes for entry in manifest.files()),
        )

    def index_for(self, k: object) -> StagedIndex:
        """Return the index, if ``k`` documents can be asked of it.

        Raises:
            SearchError, EmptyStoreError, TooFewDocumentsError
        """
        wanted = check_k(k)
        if self.index is None or not len(self.documents):
            raise EmptyStoreError("the store holds no documents yet: add some before searching")
        if wanted > len(self.documents):
            raise TooFewDocumentsError(
                f"{wanted} documents were asked for, the store holds {len(self.documents)}: use a smaller k"
            )
        return self.index

    def embed(self, query: object) -> Question:
        """Return the vector of a question, and its words where the store is searched by them.

        Raises:
            SearchError: there is no text in it. EmbedderMismatchError: the embedder's dimension has changed.
        """
        if not isinstance(query, str) or not query.strip():
            raise SearchError(f"the query is {query!r}: ask something")
        try:
            query.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SearchError(
                f"the query has a lone surrogate at character {error.start}: decode it as UTF-8"
            ) from error
        vector = check_query(self.embedder.embed_query(query), self.manifest.dimension, from_embedder=True)
        return Question(vector, count_words(query) if self.manifest.options.word_weight else None)

    def finder(self, question: Question, k: object) -> Finder:
        """Return what searches for a question, if ``k`` documents can be asked of it.

        The words of the store are looked through at once: milliseconds where it holds 100,000 documents.

        Raises:
            SearchError, EmptyStoreError, TooFewDocumentsError
        """
        return Finder(self.index_for(k), self.documents, question, self.manifest.options.word_weight or 0.0)

    def search(self, question: Question, k: int, where: Filter | None = None) -> RetrievalUpdate:
        """Return the ``k`` best documents."""
        finder = self.finder(question, k)
        if where is not None:
            return self._filtered(finder, int(k), where)
        return self.update(Stage(finder.search(int(k)), is_final=True), 0, {})

    def _filtered(self, finder: Finder, k: int, where: Filter) -> RetrievalUpdate:
        seen: dict[int, Document] = {}
        passed: dict[int, bool] = {}
        total = len(self.documents)

        def matching(neighbors: Neighbors) -> Neighbors:
            self._read_new(neighbors, seen)
            for internal_id in neighbors.ids.tolist():
                if internal_id not in passed:
                    passed[internal_id] = bool(where(seen[internal_id]))
            kept = np.array([passed[i] for i in neighbors.ids.tolist()], np.bool_)
            return Neighbors(neighbors.ids[kept][:k], neighbors.scores[kept][:k])

        for wanted in _growing(_FIRST_FETCH * k, total):
            neighbors = finder.search(wanted)
            found = matching(neighbors)
            if len(found.ids) == k:
                break
            if len(neighbors.ids) < wanted:  # what an approximate search reaches is exhausted
                found = matching(finder.search(total, exhaustive=True))
                break
        return self.update(Stage(found, is_final=True), 0, seen)

    def update(self, stage: Stage, number: int, seen: dict[int, Document]) -> RetrievalUpdate:
        """Return a stage with its documents; ``seen`` keeps those of earlier stages."""
        neighbors = stage.neighbors
        self._read_new(neighbors, seen)
        return RetrievalUpdate(
            documents=tuple(seen[i] for i in neighbors.ids.tolist()),
            scores=tuple(neighbors.scores.tolist()),
            stage=number,
            is_final=stage.is_final,
        )

    def _read_new(self, neighbors: Neighbors, seen: dict[int, Document]) -> None:
        new = [i for i in neighbors.ids.tolist() if i not in seen]
        if new:
            seen.update(self.documents.read(new))


def check_k(k: object) -> int:
    """Return how many documents are asked for.

    Raises:
        SearchError: not a positive number.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise SearchError(f"k is {k!r}: ask for at least 1 document")
    return int(k)


def _growing(first: int, last: int) -> Iterator[int]:
    wanted = first
    while wanted < last:
        yield wanted
        wanted *= 4
    yield last
