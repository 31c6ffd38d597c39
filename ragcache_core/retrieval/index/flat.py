"""Exact search, in stages of rows.

Rows are searched block by block by Faiss's own kernel and merged by (score, id). Where documents tie at the k-th
place, the one-shot search keeps one of them by the history of its heap, which blocks cannot replay: the last stage
then asks the index itself. So each stage keeps one document more than asked for, to see such ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragcache_core.retrieval.base import (
    DEFAULT_CUTS,
    Cancellation,
    Ids,
    IndexOptions,
    Neighbors,
    Stage,
    Vectors,
    best_first,
    cut_points,
    faiss,
)
from ragcache_core.retrieval.filters import Selection

_ROWS_PER_CALL = 16384
"""Rows between two looks at the cancel flag: about 1 ms at 384 dimensions."""


class RowScan:
    """Searches all or some rows of an unchanged ``IndexFlat``, with the same result as Faiss."""

    def __init__(self, rows: Any, ids: Ids, *, is_similarity: bool) -> None:
        self._rows = rows
        self._ids = ids
        self._is_similarity = is_similarity
        self._dimension = int(rows.d)
        self._vectors: Vectors = np.zeros((0, self._dimension), np.float32)
        if len(ids):
            flat = faiss.rev_swig_ptr(rows.get_xb(), len(ids) * self._dimension)
            self._vectors = flat.reshape(len(ids), self._dimension)

    def search(self, query: Vectors, k: int, among: Selection | None = None) -> Neighbors:
        """Return the ``k`` nearest of all rows, or of those in ``among``."""
        params = None if among is None else faiss.SearchParameters(sel=among.selector)
        scores, rows = self._rows.search(query[None], k, params=params)
        return self._found(scores[0], rows[0])

    def stages(
        self, query: Vectors, k: int, cuts: Sequence[float], cancel: Cancellation, among: Selection | None = None
    ) -> Iterator[Stage]:
        """Yield the best rows so far; the last stage equals :meth:`search`."""
        total = len(self._ids) if among is None else len(among)
        ends = cut_points(cuts, total, least=min(k, total))
        if len(ends) == 1:
            yield Stage(self.search(query, k, among), is_final=True)
            return
        scores, rows = np.zeros(0, np.float32), np.zeros(0, np.int64)
        begin = 0
        for end in ends:
            for start in range(begin, end, _ROWS_PER_CALL):
                if cancel.is_cancelled:
                    return
                block_scores, block_rows = self._block(query, k + 1, start, min(end, start + _ROWS_PER_CALL), among)
                scores = np.concatenate((scores, block_scores))
                rows = np.concatenate((rows, block_rows))
                order = best_first(scores, rows, self._is_similarity)[: k + 1]
                scores, rows = scores[order], rows[order]
            begin = end
            is_final = end == total
            if is_final and len(rows) > k and scores[k - 1] == scores[k]:
                yield Stage(self.search(query, k, among), is_final)
            else:
                yield Stage(self._found(scores[:k], rows[:k]), is_final)

    def _block(self, query: Vectors, k: int, start: int, end: int, among: Selection | None) -> tuple[Vectors, Ids]:
        """Return the best of the (selected) rows from ``start`` to ``end``."""
        if among is None:
            block = self._vectors[start:end]
            scores, rows = faiss.knn(query[None], block, min(k, len(block)), metric=self._rows.metric_type)
            return scores[0], rows[0] + start
        some = among.ids[start:end]
        params = faiss.SearchParameters(sel=faiss.IDSelectorArray(len(some), faiss.swig_ptr(some)))
        scores, rows = self._rows.search(query[None], min(k, len(some)), params=params)
        return scores[0], rows[0]

    def _found(self, scores: Vectors, rows: Ids) -> Neighbors:
        found = rows >= 0
        return Neighbors(self._ids[rows[found]], scores[found])


class FlatIndex:
    """``IndexIDMap2(IndexFlat)``. See :class:`ragcache_core.retrieval.base.StagedIndex`."""

    layout = "flat"
    max_default_stages = len(DEFAULT_CUTS)

    def __init__(self, native: Any, options: IndexOptions) -> None:
        self.options = options
        self.trained_on = 0
        self._native = native
        self._ids: Ids = faiss.vector_to_array(native.id_map)
        self._scan = RowScan(faiss.downcast_index(native.index), self._ids, is_similarity=options.is_similarity)

    @classmethod
    def build(cls, ids: Ids, vectors: Vectors, options: IndexOptions) -> FlatIndex:
        metric = faiss.METRIC_INNER_PRODUCT if options.is_similarity else faiss.METRIC_L2
        native = faiss.IndexIDMap2(faiss.IndexFlat(vectors.shape[1], metric))
        if len(ids):
            native.add_with_ids(vectors, ids)
        return cls(native, options)

    @property
    def native(self) -> Any:
        return self._native

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> Ids:
        return self._ids

    def work(self, k: int, among: Selection | None = None) -> float:
        return float((len(self) if among is None else len(among)) * self._native.d)

    def search(self, query: Vectors, k: int, *, among: Selection | None = None) -> Neighbors:
        return self._scan.search(query, k, self._rows_of(among))

    def stages(
        self,
        query: Vectors,
        k: int,
        cuts: Sequence[float],
        cancel: Cancellation,
        among: Selection | None = None,
    ) -> Iterator[Stage]:
        yield from self._scan.stages(query, k, cuts, cancel, self._rows_of(among))

    def _rows_of(self, among: Selection | None) -> Selection | None:
        return None if among is None else among.rows_in(self._ids)

    def with_added(self, ids: Ids, vectors: Vectors) -> FlatIndex:
        native = faiss.clone_index(self._native)
        native.add_with_ids(vectors, ids)
        return FlatIndex(native, self.options)

    def without(self, ids: Ids) -> FlatIndex:
        native = faiss.clone_index(self._native)
        native.remove_ids(ids)
        return FlatIndex(native, self.options)
