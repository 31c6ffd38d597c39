"""A resumable HNSW search over a graph of Faiss's, whose steps ``graph_steps.py`` takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_core.retrieval.base import Ids, Vectors
from ragcache_core.retrieval.extra import faiss
from ragcache_core.retrieval.index.graph_steps import (
    IS_DONE,
    NUM_DISTANCES,
    STATE_LENGTH,
    compiled,
    offer_result,
    push_candidate,
)

_WORST = np.finfo(np.float32).max
_UNLIMITED = np.iinfo(np.int64).max


class GraphTraversal:
    """Searches one ``IndexHNSWFlat``, which must outlive it and stay as it is.

    Raises:
        NotImplementedError: the index searches in a way that was not ported.
    """

    def __init__(self, graph: Any, live: NDArray[np.bool_] | None) -> None:
        hnsw = graph.hnsw
        if not hnsw.search_bounded_queue or not hnsw.check_relative_distance:
            raise NotImplementedError("only the bounded queue with relative distances is ported")
        storage = faiss.downcast_index(graph.storage)
        if type(storage) not in (faiss.IndexFlat, faiss.IndexFlatL2, faiss.IndexFlatIP):
            raise NotImplementedError(f"{type(storage).__name__} is not stored as float32")
        self.dimension = int(graph.d)
        self.num_rows = int(graph.ntotal)
        self.vectors: Vectors = faiss.rev_swig_ptr(storage.get_xb(), self.num_rows * self.dimension)
        self.links = faiss.rev_swig_ptr(hnsw.neighbors.data(), hnsw.neighbors.size())
        self.offsets = faiss.rev_swig_ptr(hnsw.offsets.data(), hnsw.offsets.size())
        self.level_starts = faiss.vector_to_array(hnsw.cum_nneighbor_per_level).astype(np.int64)
        self.entry_point, self.top_level = int(hnsw.entry_point), int(hnsw.max_level)
        self.is_similarity = faiss.is_similarity_metric(graph.metric_type)
        self.live = np.zeros(0, np.bool_) if live is None else live
        self.compiled = compiled(self.is_similarity)
        self._free_tables: deque[VisitedTable] = deque()

    def start(
        self, query: Vectors, k: int, ef: int, cancel: NDArray[np.uint8], live: NDArray[np.bool_] | None = None
    ) -> Run:
        """Return a search that stands at its entry point. It finds rows that are ``live``: by default all that are."""
        return Run(self, np.ascontiguousarray(query, np.float32), k, ef, cancel, self.live if live is None else live)

    def sample_queries(self, count: int) -> Iterator[Vectors]:
        """Yield queries near, on and off stored vectors."""
        stored = self.vectors.reshape(self.num_rows, self.dimension)
        center = stored[:256].mean(axis=0)
        for i in range(min(count, self.num_rows)):
            row = stored[i * self.num_rows // count]
            yield row if i % 2 else row * np.float32(0.9) + center * np.float32(0.1)

    def take_table(self) -> VisitedTable:
        try:
            table = self._free_tables.pop()
        except IndexError:
            table = VisitedTable(np.zeros(self.num_rows, np.uint16))
        table.next_epoch()
        return table

    def return_table(self, table: VisitedTable) -> None:
        self._free_tables.append(table)


class VisitedTable:
    """Which rows a search has seen: those whose mark is the current epoch."""

    def __init__(self, marks: NDArray[np.uint16]) -> None:
        self.marks = marks
        self.epoch = 0

    def next_epoch(self) -> None:
        self.epoch += 1
        if self.epoch > np.iinfo(np.uint16).max:
            self.marks[:] = 0
            self.epoch = 1


class Run:
    """One search. ``rows`` and ``scores`` are its result heap, unordered, with -1 where nothing was found."""

    def __init__(
        self,
        graph: GraphTraversal,
        query: Vectors,
        k: int,
        ef: int,
        cancel: NDArray[np.uint8],
        live: NDArray[np.bool_],
    ) -> None:
        capacity = max(ef, k)
        self._graph, self._query, self._ef, self._cancel, self._live = graph, query, ef, cancel, live
        self._queue_ids = np.empty(capacity, np.int32)
        self._queue_distances = np.empty(capacity, np.float32)
        self.rows: Ids = np.full(k, -1, np.int64)
        self._distances = np.full(k, _WORST, np.float32)
        self._state = np.zeros(STATE_LENGTH, np.int64)
        self._buffers = np.empty(4, np.int64), np.empty(4, np.float32)
        self._tie_sign = -1 if graph.is_similarity else 1
        self._table = graph.take_table()
        row, distance = graph.compiled.enter(
            query,
            graph.vectors,
            graph.dimension,
            graph.links,
            graph.offsets,
            graph.level_starts,
            graph.entry_point,
            graph.top_level,
            *self._buffers,
        )
        entered = row, np.float32(distance), self._tie_sign
        push_candidate(self._queue_ids, self._queue_distances, self._state, *entered)
        offer_result(self.rows, self._distances, live, *entered)
        self._table.marks[row] = self._table.epoch

    def advance(self, stop_at: int | None) -> None:
        """Go on until ``stop_at`` distances were computed in all; ``None``: to the end."""
        graph = self._graph
        if self._state[IS_DONE]:
            return
        graph.compiled.advance(
            self._query,
            graph.vectors,
            graph.dimension,
            graph.links,
            graph.offsets,
            graph.level_starts[1],
            self._table.marks,
            np.uint16(self._table.epoch),
            self._live,
            self._queue_ids,
            self._queue_distances,
            self.rows,
            self._distances,
            self._state,
            self._ef,
            _UNLIMITED if stop_at is None else stop_at,
            *self._buffers,
            self._cancel,
        )
        if self._state[IS_DONE]:
            graph.return_table(self._table)

    @property
    def scores(self) -> Vectors:
        return -self._distances if self._graph.is_similarity else self._distances

    @property
    def is_done(self) -> bool:
        return bool(self._state[IS_DONE])

    @property
    def num_distances(self) -> int:
        return int(self._state[NUM_DISTANCES])
