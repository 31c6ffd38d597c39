"""A question's search: by its vector, in the index, and where the store says so by its words as well.

The two are joined by one score, the weighted mean of BM25 and a cosine: ``w * words + (1 - w) * vectors``. It is
computed for each document that either of them found, so it is the same in every stage and store. It is reported in the
store's metric: as it is for ``ip``, and as the squared distance of unit vectors, ``2 - 2 * score``, for ``l2``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_core.retrieval.base import Cancellation, Ids, Neighbors, Stage, StagedIndex, Vectors, best_first
from ragcache_core.retrieval.lexical import Similarities, WordScores
from ragcache_core.retrieval.selection import Selection
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.wanted import Wanted

_CANDIDATES = 2
"""Words and vectors put forward so many times the documents asked for, each."""
_NOTHING = Neighbors(np.zeros(0, np.int64), np.zeros(0, np.float32))
_LEAST_BY_WORDS = 64
"""Words put forward at least so many: they cost next to nothing."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched for: a vector ``[dimension]`` and, where words count, how often each is asked for."""

    vector: Vectors
    words: Sequence[str] | None = None


class Finder:
    """Searches one index for one question, ``among`` all documents or those that a filter selects."""

    def __init__(
        self,
        index: StagedIndex,
        documents: DocumentTable,
        question: Question,
        word_weight: float,
        among: Selection | None = None,
    ) -> None:
        self._index = index
        self._documents = documents
        self._vector = question.vector
        self._word_weight = word_weight
        self._among = among
        self._num_documents = len(documents) if among is None else len(among)
        self._matches: WordScores | None = None
        self._cosines: dict[int, float] = {}
        if question.words is not None and word_weight:
            self._matches = WordScores(documents.words(), question.words)

    def search(self, k: int) -> Neighbors:
        """Return the ``k`` best documents; fewer only where there are fewer."""
        if not self._num_documents:
            return _NOTHING
        count = self._num_neighbors(k)
        return self._joined(self._index.search(self._vector, count, among=self._among), k)

    def by_words(self, k: int) -> Neighbors:
        """Return the best documents as far as words alone say: with the part of the score that is theirs."""
        if self._matches is None:
            return _NOTHING
        ids = self._matches.best(k, self._among)
        return self._best(ids, self._word_weight * self._matches.of(ids), k)

    @property
    def max_default_stages(self) -> int:
        """The index's upper bound on the stages of a search that names none."""
        return self._index.max_default_stages

    def work(self, k: int) -> float:
        """Return about how many multiply-adds the index's search costs."""
        return self._index.work(self._num_neighbors(k), self._among) if self._num_documents else 0.0

    def stages(self, k: int, cuts: Sequence[float], cancel: Cancellation) -> Iterator[Stage]:
        """Yield what the index knows after each share of the work; see :meth:`joined`."""
        if not self._num_documents:
            yield Stage(_NOTHING, is_final=True)
            return
        yield from self._index.stages(self._vector, self._num_neighbors(k), cuts, cancel, self._among)

    def joined(self, stage: Stage, k: int) -> Stage:
        """Return a stage of the index as one of the whole search: the last is what :meth:`search` returns."""
        return Stage(self._joined(stage.neighbors, k), stage.is_final)

    def chosen(self, neighbors: Neighbors, wanted: Wanted) -> Neighbors:
        """Return those of the best documents, best first, that are near enough and different enough."""
        near = wanted.is_near(neighbors.scores, is_similarity=self._index.options.is_similarity)
        ids, scores = neighbors.ids[near], neighbors.scores[near]
        if wanted.mmr is not None and len(ids):
            vectors = self._documents.read_vectors(ids.tolist(), len(self._vector))
            order = wanted.mmr.choose(self._vector, vectors, wanted.k)
            ids, scores = ids[order], scores[order]
        return Neighbors(ids[: wanted.k], scores[: wanted.k])

    def _num_neighbors(self, k: int) -> int:
        return min(k if self._matches is None else _CANDIDATES * k, self._num_documents)

    def _joined(self, neighbors: Neighbors, k: int) -> Neighbors:
        if self._matches is None or not self._num_documents:
            return neighbors
        ids = np.union1d(neighbors.ids, self._matches.best(max(_CANDIDATES * k, _LEAST_BY_WORDS), self._among))
        score = self._word_weight * self._matches.of(ids) + (1 - self._word_weight) * self._cosines_of(ids)
        return self._best(ids, score, k)

    def _best(self, ids: Ids, score: Similarities, k: int) -> Neighbors:
        is_similarity = self._index.options.is_similarity
        scores = np.asarray(score if is_similarity else 2 - 2 * score, np.float32)
        order = best_first(scores, ids, is_similarity)[:k]
        return Neighbors(ids[order], scores[order])

    def _cosines_of(self, ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        new = [internal_id for internal_id in ids.tolist() if internal_id not in self._cosines]
        if new:
            rows = self._documents.read_vectors(new, len(self._vector)).astype(np.float64)
            query = self._vector.astype(np.float64)
            lengths = np.sqrt((rows**2).sum(axis=1) * (query**2).sum())
            products = (rows * query).sum(axis=1)
            cosines = np.divide(products, lengths, out=np.zeros(len(new)), where=lengths > 0)
            self._cosines.update(zip(new, cosines.tolist(), strict=True))
        return np.array([self._cosines[internal_id] for internal_id in ids.tolist()])
