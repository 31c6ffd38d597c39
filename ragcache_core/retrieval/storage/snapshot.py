"""One published state of a store, and the search in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ragcache_core.errors import EmptyStoreError, SearchError, TooFewDocumentsError
from ragcache_core.retrieval.base import IndexKind, Metric, Neighbors, Stage, StagedIndex
from ragcache_core.retrieval.embedders.base import Embedder, check_query
from ragcache_core.retrieval.filters import Where, conditions_of
from ragcache_core.retrieval.hybrid import Finder, Question
from ragcache_core.retrieval.lexical import words_of
from ragcache_core.retrieval.selection import Selection
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.storage.manifest import Manifest
from ragcache_core.retrieval.wanted import MMR, Filter, Wanted
from ragcache_core.types import Document, RetrievalUpdate

_FIRST_FETCH = 4
"""A search filtered by a function first looks at so many times the documents asked for."""
_MOST_FIELDS_NAMED = 20


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

    @property
    def squared_length(self) -> float:
        """The inner product of a typical stored vector with itself; 1 where words count, whose scores are cosines."""
        return 1.0 if self.manifest.options.word_weight else self.documents.squared_length

    def index_for(self, k: object) -> StagedIndex:
        """Return the index, if ``k`` is a number of documents and there is a document.

        Raises:
            SearchError, EmptyStoreError
        """
        check_k(k)
        if self.index is None or not len(self.documents):
            raise EmptyStoreError("the store holds no documents yet: add some before searching")
        return self.index

    def check_k(self, k: object) -> None:
        """Raise unless the store holds ``k`` documents.

        Raises:
            SearchError, EmptyStoreError, TooFewDocumentsError
        """
        self.index_for(k)
        if check_k(k) > len(self.documents):
            raise TooFewDocumentsError(
                f"{k} documents were asked for, the store holds {len(self.documents)}: use a smaller k"
            )

    def embed(self, query: object) -> Question:
        """Return the vector of a question, and its words where the store is searched by them.

        Raises:
            SearchError: there is no text in it. EmbedderMismatchError: the embedder's dimension has changed.
        """
        text = check_text(query)
        vector = check_query(self.embedder.embed_query(text), self.manifest.dimension, from_embedder=True)
        return Question(vector, words_of(text) if self.manifest.options.word_weight else None)

    def wanted(
        self, k: int, where: Filter | None = None, score_threshold: float | None = None, mmr: MMR | None = None
    ) -> Wanted:
        """Return the query settings, with ``k`` limited to the documents of this snapshot.

        Raises:
            SearchError, EmptyStoreError, ConfigError
        """
        self.index_for(k)
        return Wanted.of(min(k, len(self.documents)), where, score_threshold, mmr)

    def count(self, wanted: Wanted) -> int:
        """Return how many documents are searched for."""
        return min(wanted.num_candidates, len(self.documents))

    def finder(self, question: Question, wanted: Wanted) -> Finder:
        """Return the search for a question among the documents that ``wanted`` allows.

        The words of the store are looked through at once: milliseconds where it holds 100,000 documents. So is a field
        of the metadata when a filter names it for the first time: most of a second.

        Raises:
            SearchError: a filter that nothing could pass. EmptyStoreError
        """
        where = wanted.where
        among = None if where is None or callable(where) else _select_documents(self.documents, where)
        word_weight = self.manifest.options.word_weight or 0.0
        return Finder(self.index_for(wanted.k), self.documents, question, word_weight, among)

    def search(self, question: Question, wanted: Wanted) -> RetrievalUpdate:
        """Return what is wanted, in one stage."""
        finder = self.finder(question, wanted)
        if callable(wanted.where):
            return self._filtered(finder, wanted, wanted.where)
        found = finder.chosen(finder.search(self.count(wanted)), wanted)
        return self.update(Stage(found, is_final=True), 0, {})

    def by_words(self, query: str, wanted: Wanted) -> RetrievalUpdate:
        """Return what the words of a question find, before its vector is known: a guess, as the first stage."""
        finder = self.finder(Question(np.zeros(0, np.float32), words_of(query)), wanted)
        found = finder.chosen(finder.by_words(self.count(wanted)), wanted)
        return self.update(Stage(found, is_final=False), 0, {})

    def _filtered(self, finder: Finder, wanted: Wanted, accepts: Callable[[Document], bool]) -> RetrievalUpdate:
        seen: dict[int, Document] = {}
        passed: dict[int, bool] = {}
        count, total = self.count(wanted), len(self.documents)

        def matching(neighbors: Neighbors) -> Neighbors:
            self._read_new(neighbors, seen)
            for internal_id in neighbors.ids.tolist():
                if internal_id not in passed:
                    passed[internal_id] = bool(accepts(seen[internal_id]))
            kept = np.array([passed[i] for i in neighbors.ids.tolist()], np.bool_)
            return Neighbors(neighbors.ids[kept][:count], neighbors.scores[kept][:count])

        for num_seen in _growing(_FIRST_FETCH * count, total):
            found = matching(finder.search(num_seen))
            if len(found.ids) == count:
                break
        return self.update(Stage(finder.chosen(found, wanted), is_final=True), 0, seen)

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


def _select_documents(documents: DocumentTable, where: Where) -> Selection:
    """Return the documents that a filter accepts.

    Raises:
        SearchError: the filter names a field that no document has, or that has no value of such a kind.
    """
    for condition in conditions_of(where):
        if (why := condition.misfit(documents.kinds_of(condition.field))) is not None:
            fields = sorted(field for field in documents.fields() if not field.startswith("_"))
            known = ", ".join(fields[:_MOST_FIELDS_NAMED]) + (", ..." if len(fields) > _MOST_FIELDS_NAMED else "")
            raise SearchError(f"filter {condition}: {why}; the fields are {known or 'none'}")
    return documents.selected(where)


def check_text(query: object) -> str:
    """Return the text of a question.

    Raises:
        SearchError: there is none in it, or it is no Unicode.
    """
    if not isinstance(query, str) or not query.strip():
        raise SearchError(f"the query is {query!r}: ask something")
    try:
        query.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SearchError(f"the query has a lone surrogate at character {error.start}: decode it as UTF-8") from error
    return query


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
