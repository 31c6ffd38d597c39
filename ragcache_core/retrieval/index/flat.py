"""Exact search, cut by rows.

Rows are searched block by block by Faiss's own kernel and merged by (score, id). Where documents tie at the k-th
place, the one-shot search keeps one of them by the history of its heap, which blocks cannot replay: the last stage
then asks the index itself. So each stage keeps one document more than asked for, to see such ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragcache_core.retrieval.base import (
    Cancellation,
    Ids,
    IndexOptions,
    Neighbors,
    Stage,
    Vectors,
    best_first,
    cut_points,
)
from ragcache_core.retrieval.extra import faiss

_ROWS_PER_CALL = 16384
"""Rows between two looks at the cancel flag: about 1 ms at 384 dimensions."""


class FlatIndex:
    """``IndexIDMap2(IndexFlat)``. See :class:`ragcache_core.retrieval.base.StagedIndex`."""

    layout = "flat"

    def __init__(self, native: Any, options: IndexOptions) -> None:
        self.options = options
        self.trained_on = 0
        self._native = native
        self._rows = faiss.downcast_index(native.index)
        self._dimension = int(self._rows.d)
        self._metric = self._rows.metric_type
        num_rows = int(self._rows.ntotal)
        self._ids: Ids = faiss.vector_to_array(native.id_map)
        self._vectors: Vectors = np.zeros((0, self._dimension), np.float32)
        if num_rows:
            flat = faiss.rev_swig_ptr(self._rows.get_xb(), num_rows * self._dimension)
            self._vectors = flat.reshape(num_rows, self._dimension)

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

    def work(self, k: int) -> float:
        return float(len(self) * self._dimension)

    def search(self, query: Vectors, k: int, *, exhaustive: bool = False) -> Neighbors:
        scores, ids = self._native.search(query[None], k)
        return Neighbors.from_faiss(scores[0], ids[0])

    def stages(self, query: Vectors, k: int, cuts: Sequence[float], cancel: Cancellation) -> Iterator[Stage]:
        ends = cut_points(cuts, len(self), least=min(k, len(self)))
        if len(ends) == 1:
            yield Stage(self.search(query, k), is_final=True)
            return
        scores, rows = np.zeros(0, np.float32), np.zeros(0, np.int64)
        begin = 0
        for end in ends:
            for start in range(begin, end, _ROWS_PER_CALL):
                if cancel.is_cancelled:
                    return
                block = self._vectors[start : min(end, start + _ROWS_PER_CALL)]
                wanted = min(k + 1, len(block))
                block_scores, block_rows = faiss.knn(query[None], block, wanted, metric=self._metric)
                scores = np.concatenate((scores, block_scores[0]))
                rows = np.concatenate((rows, block_rows[0] + start))
                order = best_first(scores, rows, self.options.is_similarity)[: k + 1]
                scores, rows = scores[order], rows[order]
            begin = end
            is_final = end == len(self)
            if is_final and len(rows) > k and scores[k - 1] == scores[k]:
                yield Stage(self.search(query, k), is_final)
            else:
                yield Stage(Neighbors(self._ids[rows[:k]], scores[:k]), is_final)

    def with_added(self, ids: Ids, vectors: Vectors) -> FlatIndex:
        native = faiss.clone_index(self._native)
        native.add_with_ids(vectors, ids)
        return FlatIndex(native, self.options)

    def without(self, ids: Ids) -> FlatIndex:
        native = faiss.clone_index(self._native)
        native.remove_ids(ids)
        return FlatIndex(native, self.options)
