"""A resumable HNSW level-0 traversal in numba, bit-equal to ``HNSW::search`` of Faiss (bounded queue).

Distances come from Faiss's own kernels, called through their addresses, because a differently summed float is a
different float. Inner products are negated, so that one code finds the smallest; then ``tie_sign`` is -1, because
Faiss breaks ties of inner products by the smaller id and ties of distances by the larger.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from numba import njit
from numpy.typing import NDArray

from ragcache_core.retrieval.base import Ids, Vectors

_WORST = np.finfo(np.float32).max
_UNLIMITED = np.iinfo(np.int64).max

# Where a run stands: an int64 array that the compiled code reads and writes.
_QUEUE_SIZE, _QUEUE_VALID, _NUM_DISTANCES, _IS_DONE = range(4)

_KERNELS = {  # private symbols of Faiss: one distance, and four at once
    False: ("_ZN5faiss10fvec_L2sqrEPKfS1_m", "_ZN5faiss18fvec_L2sqr_batch_4EPKfS1_S1_S1_S1_mRfS2_S2_S2_"),
    True: (
        "_ZN5faiss18fvec_inner_productEPKfS1_m",
        "_ZN5faiss26fvec_inner_product_batch_4EPKfS1_S1_S1_S1_mRfS2_S2_S2_",
    ),
}


@njit(nogil=True)
def _after(a: float, b: float, id_a: int, id_b: int, tie_sign: int) -> bool:
    return a > b or (a == b and tie_sign * id_a > tie_sign * id_b)


@njit(nogil=True)
def _sift_down(distances: Any, ids: Any, size: int, distance: float, id_: int, tie_sign: int) -> int:
    """Move the hole at the root down to where ``distance`` belongs; return that place."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if not (
            child + 1 == size or _after(distances[child], distances[child + 1], ids[child], ids[child + 1], tie_sign)
        ):
            child += 1
        if _after(distance, distances[child], id_, ids[child], tie_sign):
            break
        distances[place] = distances[child]
        ids[place] = ids[child]
        place = child
    return place


@njit(nogil=True)
def _push_candidate(ids: Any, distances: Any, state: Any, id_: int, distance: float, tie_sign: int) -> None:
    """``MinimaxHeap::push``: a bounded max-heap whose taken entries have id -1."""
    size = state[_QUEUE_SIZE]
    if size == ids.shape[0]:
        if not distance < distances[0]:
            return
        if ids[0] != -1:
            state[_QUEUE_VALID] -= 1
        size -= 1
        hole = _sift_down(distances, ids, size + 1, distances[size], ids[size], tie_sign)
        distances[hole] = distances[size]
        ids[hole] = ids[size]
    place = size
    size += 1
    while place > 0:
        parent = (place - 1) // 2
        if not _after(distance, distances[parent], id_, ids[parent], tie_sign):
            break
        distances[place] = distances[parent]
        ids[place] = ids[parent]
        place = parent
    distances[place] = distance
    ids[place] = id_
    state[_QUEUE_SIZE] = size
    state[_QUEUE_VALID] += 1


@njit(nogil=True)
def _offer_result(ids: Any, distances: Any, live: Any, id_: int, distance: float, tie_sign: int) -> None:
    """``add_result``: replace the worst result, unless the row is deleted."""
    if live.shape[0] > 0 and not live[id_]:
        return
    if not distance < distances[0]:
        return
    place = _sift_down(distances, ids, ids.shape[0], distance, id_, tie_sign)
    distances[place] = distance
    ids[place] = id_


class Compiled(NamedTuple):
    """The traversal for one metric: into the graph, and through its lowest level."""

    enter: Callable[..., tuple[int, float]]
    advance: Callable[..., None]


@functools.cache
def compiled(is_similarity: bool) -> Compiled:
    """Return the traversal for a metric, around Faiss's kernels. numba compiles it at the first call."""
    library = ctypes.CDLL(str(Path(faiss.__file__).with_name("libfaiss.so")))
    one_name, four_name = _KERNELS[is_similarity]
    one, four = getattr(library, one_name), getattr(library, four_name)
    one.restype, one.argtypes = ctypes.c_float, [ctypes.c_size_t] * 3
    four.restype, four.argtypes = None, [ctypes.c_size_t] * 10
    sign = np.float32(-1 if is_similarity else 1)
    tie_sign = -1 if is_similarity else 1

    @njit(nogil=True)
    def distance_to(query: Any, vectors: Any, dimension: int, row: int) -> Any:
        return sign * np.float32(one(query.ctypes.data, vectors.ctypes.data + row * dimension * 4, dimension))

    @njit(nogil=True)
    def enter(
        query: Any, vectors: Any, dimension: int, links: Any, offsets: Any, level_starts: Any, row: int, top: int
    ) -> Any:
        """Greedy descent from the entry point to level 0."""
        nearest = np.int64(row)
        nearest_distance = distance_to(query, vectors, dimension, nearest)
        for level in range(top, 0, -1):
            while True:
                previous = nearest
                first = np.int64(offsets[previous]) + level_starts[level]
                last = np.int64(offsets[previous]) + level_starts[level + 1]
                for at in range(first, last):
                    linked = np.int64(links[at])
                    if linked < 0:
                        break
                    distance = distance_to(query, vectors, dimension, linked)
                    if nearest_distance > distance:
                        nearest = linked
                        nearest_distance = distance
                if nearest == previous:
                    break
        return nearest, nearest_distance

    @njit(nogil=True)
    def advance(
        query: Any,
        vectors: Any,
        dimension: int,
        links: Any,
        offsets: Any,
        num_links: int,
        visited: Any,
        epoch: int,
        live: Any,
        queue_ids: Any,
        queue_distances: Any,
        result_ids: Any,
        result_distances: Any,
        state: Any,
        ef: int,
        stop_at: int,
        rows: Any,
        distances: Any,
        cancel: Any,
    ) -> None:
        """Visit nodes until ``stop_at`` distances were computed in all, or the search is over."""
        while state[_QUEUE_VALID] > 0:
            if state[_NUM_DISTANCES] >= stop_at or cancel[0] != 0:
                return
            nearest = -1
            nearest_distance = np.float32(0)
            for i in range(state[_QUEUE_SIZE] - 1, -1, -1):
                if queue_ids[i] != -1 and (nearest < 0 or nearest_distance > queue_distances[i]):
                    nearest = i
                    nearest_distance = queue_distances[i]
            node = np.int64(queue_ids[nearest])
            queue_ids[nearest] = -1
            state[_QUEUE_VALID] -= 1
            num_below = 0
            for i in range(state[_QUEUE_SIZE]):
                if nearest_distance > queue_distances[i]:
                    num_below += 1
            if num_below >= ef:
                state[_IS_DONE] = 1
                return
            first = np.int64(offsets[node])
            waiting = 0
            for at in range(first, first + num_links):
                row = np.int64(links[at])
                if row < 0:
                    break
                if visited[row] == epoch:
                    continue
                visited[row] = epoch
                rows[waiting] = row
                waiting += 1
                if waiting == 4:
                    base = vectors.ctypes.data
                    out = distances.ctypes.data
                    width = dimension * 4
                    four(
                        query.ctypes.data,
                        base + rows[0] * width,
                        base + rows[1] * width,
                        base + rows[2] * width,
                        base + rows[3] * width,
                        dimension,
                        out,
                        out + 4,
                        out + 8,
                        out + 12,
                    )
                    for i in range(4):
                        distance = sign * distances[i]
                        _offer_result(result_ids, result_distances, live, rows[i], distance, tie_sign)
                        _push_candidate(queue_ids, queue_distances, state, rows[i], distance, tie_sign)
                    state[_NUM_DISTANCES] += 4
                    waiting = 0
            for i in range(waiting):
                distance = distance_to(query, vectors, dimension, rows[i])
                _offer_result(result_ids, result_distances, live, rows[i], distance, tie_sign)
                _push_candidate(queue_ids, queue_distances, state, rows[i], distance, tie_sign)
            state[_NUM_DISTANCES] += waiting
        state[_IS_DONE] = 1

    return Compiled(enter, advance)


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

    def start(self, query: Vectors, k: int, ef: int, cancel: NDArray[np.uint8]) -> Run:
        """Return a search that stands at its entry point."""
        return Run(self, np.ascontiguousarray(query, np.float32), k, ef, cancel)

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

    def __init__(self, graph: GraphTraversal, query: Vectors, k: int, ef: int, cancel: NDArray[np.uint8]) -> None:
        capacity = max(ef, k)
        self._graph, self._query, self._ef, self._cancel = graph, query, ef, cancel
        self._queue_ids = np.empty(capacity, np.int32)
        self._queue_distances = np.empty(capacity, np.float32)
        self.rows: Ids = np.full(k, -1, np.int64)
        self._distances = np.full(k, _WORST, np.float32)
        self._state = np.zeros(4, np.int64)
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
        )
        entered = row, np.float32(distance), self._tie_sign
        _push_candidate(self._queue_ids, self._queue_distances, self._state, *entered)
        _offer_result(self.rows, self._distances, graph.live, *entered)
        self._table.marks[row] = self._table.epoch

    def advance(self, stop_at: int | None) -> None:
        """Go on until ``stop_at`` distances were computed in all; ``None``: to the end."""
        graph = self._graph
        if self._state[_IS_DONE]:
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
            graph.live,
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
        if self._state[_IS_DONE]:
            graph.return_table(self._table)

    @property
    def scores(self) -> Vectors:
        return -self._distances if self._graph.is_similarity else self._distances

    @property
    def is_done(self) -> bool:
        return bool(self._state[_IS_DONE])

    @property
    def num_distances(self) -> int:
        return int(self._state[_NUM_DISTANCES])
