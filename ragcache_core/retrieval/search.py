"""One search of a snapshot: conditions, combination of vectors and words, and the result of each stage.

Where words count, a score is the weighted mean ``w * words + (1 - w) * vectors`` of the words' score
(:mod:`~ragcache_core.retrieval.lexical`) and a cosine. It is computed for each document that the words or the index
found, so it is the same in every stage and store. It is reported in the store's metric: as it is for ``ip``, and as the
squared distance of unit vectors, ``2 - 2 * score``, for ``l2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.errors import ConfigError, EmptyStoreError, SearchError
from ragcache_core.retrieval.base import Cancellation, Ids, Neighbors, Stage, StagedIndex, Vectors, best_first
from ragcache_core.retrieval.embedders.base import check_query
from ragcache_core.retrieval.filters import (
    AllOf,
    AnyOf,
    FieldCondition,
    Mask,
    Not,
    Selection,
    Where,
    conditions_of,
    parse_filter,
)
from ragcache_core.retrieval.lexical import Similarities, WordScores, words_of
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.storage.snapshot import Snapshot
from ragcache_core.types import Document, RetrievalUpdate

Filter = Where | Mapping[str, Any] | Callable[[Document], bool]
"""An expression (``retrieval.filters``), the same as LangChain writes it, or a function of a document."""

_CANDIDATES = 2  # words and vectors each propose this multiple of the documents asked for
_LEAST_BY_WORDS = 64  # words propose at least this number: it costs little
_FIRST_FETCH = 4  # a search filtered by a function first looks at this multiple of the documents asked for
_FETCH_GROWTH = 4
_MAX_FIELDS_NAMED = 20
_NOTHING = Neighbors(np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class MMR:
    """Maximal marginal relevance: of the ``fetch_k`` best documents those that are near to the question and far from
    each other. With a ``lambda_mult`` of 1 only the first counts, with 0 only the second.

    Raises:
        ConfigError: a value that cannot work.
    """

    fetch_k: int = 20
    lambda_mult: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.fetch_k, bool) or not isinstance(self.fetch_k, int) or self.fetch_k < 1:
            raise ConfigError(f"fetch_k is {self.fetch_k!r}: give a whole number of at least 1")
        if not _is_number(self.lambda_mult) or not 0 <= self.lambda_mult <= 1:
            raise ConfigError(
                f"lambda_mult is {self.lambda_mult!r}: give a number from 0 (different documents) to 1 (near ones)"
            )

    def choose(self, question: Vectors, vectors: Vectors, k: int) -> list[int]:
        """Return up to ``k`` chosen rows of ``vectors: [n, dimension]``, in the order of choice."""
        rows = _unit(vectors.astype(np.float64))
        near = rows @ _unit(question.astype(np.float64))
        chosen: list[int] = []
        overlap = np.full(len(rows), -np.inf)
        while len(chosen) < min(k, len(rows)):
            score = self.lambda_mult * near - (1 - self.lambda_mult) * overlap if chosen else near.copy()
            score[chosen] = -np.inf
            chosen.append(int(np.argmax(score)))
            overlap = np.maximum(overlap, rows @ rows[chosen[-1]])
        return chosen


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """The number of documents to find and the conditions on them. :meth:`of` checks and creates one."""

    k: int
    where: Where | Callable[[Document], bool] | None = None
    score_threshold: float | None = None
    mmr: MMR | None = None

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        k: object,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> SearchQuery:
        """Return the query, with ``k`` limited to the documents of the snapshot.

        Raises:
            SearchError: an invalid ``k`` or threshold. EmptyStoreError: there are no documents.
            ConfigError: an invalid filter or MMR.
        """
        num_wanted = check_k(k)
        if snapshot.index is None or not len(snapshot.documents):
            raise EmptyStoreError("the store holds no documents yet: add some before searching")
        if where is not None and not callable(where) and not isinstance(where, FieldCondition | AllOf | AnyOf | Not):
            where = parse_filter(where) if where != {} else None
        if score_threshold is not None and not _is_number(score_threshold):
            raise SearchError(f"score_threshold is {score_threshold!r}: give a number, or None for all documents")
        if mmr is not None and not isinstance(mmr, MMR):
            raise ConfigError(f"mmr is {mmr!r:.80}: give MMR(fetch_k=20, lambda_mult=0.5)")
        return cls(min(num_wanted, len(snapshot.documents)), where, score_threshold, mmr)

    def is_near(self, scores: Vectors, *, is_similarity: bool) -> Mask:
        """Return the mask of the scores within the threshold: ``[n]``."""
        if self.score_threshold is None:
            return np.ones(len(scores), np.bool_)
        near: Mask = scores >= self.score_threshold if is_similarity else scores <= self.score_threshold
        return near


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """The vector ``[dimension]`` of a question and, where words count, its words."""

    vector: Vectors
    words: Sequence[str] | None = None

    @classmethod
    def of(cls, snapshot: Snapshot, text: object) -> SearchQuestion:
        """Return the embedded question.

        Raises:
            SearchError: there is no text in it. EmbedderMismatchError: the embedder's dimension has changed.
        """
        text = check_text(text)
        vector = check_query(snapshot.embedder.embed_query(text), snapshot.manifest.dimension, from_embedder=True)
        return cls(vector, words_of(text) if snapshot.manifest.options.word_weight else None)


class Search:
    """Searches one snapshot for one question, among all or filtered documents.

    Creating it searches the word indexes, and reads a metadata field when a filter names it for the first time: most of
    a second for 100,000 documents.

    Raises:
        SearchError: a filter that no document can pass.
    """

    def __init__(self, snapshot: Snapshot, question: SearchQuestion, query: SearchQuery) -> None:
        assert snapshot.index is not None, "SearchQuery.of has checked it"
        self._index: StagedIndex = snapshot.index
        self._documents = snapshot.documents
        self._vector = question.vector
        self._query = query
        is_expression = query.where is not None and not callable(query.where)
        self._among = _select(self._documents, query.where) if is_expression else None  # type: ignore[arg-type]
        self._num_documents = len(self._documents if self._among is None else self._among)
        num_candidates = query.k if query.mmr is None else max(query.k, query.mmr.fetch_k)
        self._count = min(num_candidates, len(self._documents))
        self._word_weight = snapshot.manifest.options.word_weight or 0.0
        self._words: WordScores | None = None
        if question.words is not None and self._word_weight:
            self._words = WordScores(self._documents.words(), question.words)
        self._cosines: dict[int, float] = {}
        self._read: dict[int, Document] = {}

    def run(self) -> RetrievalUpdate:
        """Return the best documents, in one stage."""
        where = self._query.where
        found = self._passing(where) if callable(where) else self._best(self._count)
        return self._update(found, 0, is_final=True)

    def run_words(self) -> RetrievalUpdate:
        """Return the best documents by words alone, as a first stage, with the word part of the score."""
        found = _NOTHING
        if self._words is not None:
            ids = self._words.best(self._count, self._among)
            found = self._ranked(ids, self._word_weight * self._words.of(ids), self._count)
        return self._update(found, 0, is_final=False)

    @property
    def max_default_stages(self) -> int:
        """The index's maximum number of stages of a search without explicit stages."""
        return self._index.max_default_stages

    @property
    def work(self) -> float:
        """Estimated multiply-adds of the search in the index."""
        return self._index.work(self._num_neighbors(self._count), self._among) if self._num_documents else 0.0

    def stages(self, cuts: Sequence[float], cancel: Cancellation) -> Iterator[Stage]:
        """Yield the index's neighbours after each share of the work in ``cuts``; see :meth:`update`."""
        if not self._num_documents:
            yield Stage(_NOTHING, is_final=True)
            return
        yield from self._index.stages(self._vector, self._num_neighbors(self._count), cuts, cancel, self._among)

    def update(self, stage: Stage, number: int) -> RetrievalUpdate:
        """Return the documents of an index stage; the final stage equals :meth:`run`."""
        return self._update(self._joined(stage.neighbors, self._count), number, is_final=stage.is_final)

    def _best(self, k: int) -> Neighbors:
        if not self._num_documents:
            return _NOTHING
        return self._joined(self._index.search(self._vector, self._num_neighbors(k), among=self._among), k)

    def _passing(self, accepts: Callable[[Document], bool]) -> Neighbors:
        """Return the best documents that a function accepts, from a growing number of neighbours."""
        passed: dict[int, bool] = {}
        num_fetched, total = _FIRST_FETCH * self._count, len(self._documents)
        while True:
            neighbors = self._best(min(num_fetched, total))
            self._read_new(neighbors)
            for internal_id in neighbors.ids.tolist():
                if internal_id not in passed:
                    passed[internal_id] = bool(accepts(self._read[internal_id]))
            kept = np.array([passed[internal_id] for internal_id in neighbors.ids.tolist()], np.bool_)
            found = Neighbors(neighbors.ids[kept][: self._count], neighbors.scores[kept][: self._count])
            if len(found.ids) == self._count or num_fetched >= total:
                return found
            num_fetched *= _FETCH_GROWTH

    def _num_neighbors(self, k: int) -> int:
        return min(k if self._words is None else _CANDIDATES * k, self._num_documents)

    def _joined(self, neighbors: Neighbors, k: int) -> Neighbors:
        """Return the best of the index's neighbours and of the lexical candidates."""
        if self._words is None or not self._num_documents:
            return neighbors
        ids = np.union1d(neighbors.ids, self._words.best(max(_CANDIDATES * k, _LEAST_BY_WORDS), self._among))
        score = self._word_weight * self._words.of(ids) + (1 - self._word_weight) * self._cosines_of(ids)
        return self._ranked(ids, score, k)

    def _ranked(self, ids: Ids, score: Similarities, k: int) -> Neighbors:
        is_similarity = self._index.options.is_similarity
        scores = np.asarray(score if is_similarity else 2 - 2 * score, np.float32)
        order = best_first(scores, ids, is_similarity)[:k]
        return Neighbors(ids[order], scores[order])

    def _cosines_of(self, ids: Ids) -> Similarities:
        new = [internal_id for internal_id in ids.tolist() if internal_id not in self._cosines]
        if new:
            rows = self._documents.read_vectors(new, len(self._vector)).astype(np.float64)
            query = self._vector.astype(np.float64)
            lengths = np.sqrt((rows**2).sum(axis=1) * (query**2).sum())
            products = (rows * query).sum(axis=1)
            cosines = np.divide(products, lengths, out=np.zeros(len(new)), where=lengths > 0)
            self._cosines.update(zip(new, cosines.tolist(), strict=True))
        return np.array([self._cosines[internal_id] for internal_id in ids.tolist()])

    def _update(self, neighbors: Neighbors, number: int, *, is_final: bool) -> RetrievalUpdate:
        """Return an update with the best documents after threshold and MMR."""
        near = self._query.is_near(neighbors.scores, is_similarity=self._index.options.is_similarity)
        ids, scores = neighbors.ids[near], neighbors.scores[near]
        if self._query.mmr is not None and len(ids):
            vectors = self._documents.read_vectors(ids.tolist(), len(self._vector))
            order = self._query.mmr.choose(self._vector, vectors, self._query.k)
            ids, scores = ids[order], scores[order]
        found = Neighbors(ids[: self._query.k], scores[: self._query.k])
        self._read_new(found)
        return RetrievalUpdate(
            documents=tuple(self._read[internal_id] for internal_id in found.ids.tolist()),
            scores=tuple(found.scores.tolist()),
            stage=number,
            is_final=is_final,
        )

    def _read_new(self, neighbors: Neighbors) -> None:
        new = [internal_id for internal_id in neighbors.ids.tolist() if internal_id not in self._read]
        if new:
            self._read.update(self._documents.read(new))


def check_text(query: object) -> str:
    """Return the text of a question.

    Raises:
        SearchError: there is no text in it, or it is not Unicode.
    """
    if not isinstance(query, str) or not query.strip():
        raise SearchError(f"the query is {query!r}: pass a text that is not empty")
    try:
        query.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SearchError(f"the query has a lone surrogate at character {error.start}: decode it as UTF-8") from error
    return query


def check_k(k: object) -> int:
    """Return the number of documents asked for.

    Raises:
        SearchError: it is not a positive integer.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise SearchError(f"k is {k!r}: give 1 or more")
    return int(k)


def _select(documents: DocumentTable, where: Where) -> Selection:
    for condition in conditions_of(where):
        if (why := condition.misfit(documents.kinds_of(condition.field))) is not None:
            fields = sorted(field for field in documents.fields() if not field.startswith("_"))
            known = ", ".join(fields[:_MAX_FIELDS_NAMED]) + (", ..." if len(fields) > _MAX_FIELDS_NAMED else "")
            raise SearchError(f"filter {condition}: {why}; the fields are {known or 'none'}")
    return documents.selected(where)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unit(rows: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: np.ndarray[Any, np.dtype[np.float64]] = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit
