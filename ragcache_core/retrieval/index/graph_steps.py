"""The steps of an HNSW search in numba, bit-equal to ``HNSW::search`` of Faiss (bounded queue).

Distances come from Faiss's own kernels, called through their addresses, because a differently summed float is a
different float. Inner products are negated, so that one code finds the smallest; then ``tie_sign`` is -1, because
Faiss breaks ties of inner products by the smaller id and ties of distances by the larger.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ragcache_core.retrieval.extra import faiss

STATE_LENGTH = 4
# Where a run stands: an int64 array that the compiled code reads and writes.
_QUEUE_SIZE, _QUEUE_VALID, NUM_DISTANCES, IS_DONE = range(STATE_LENGTH)

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
def push_candidate(ids: Any, distances: Any, state: Any, id_: int, distance: float, tie_sign: int) -> None:
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
def offer_result(ids: Any, distances: Any, live: Any, id_: int, distance: float, tie_sign: int) -> None:
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
    def distances_to_four(query: Any, vectors: Any, dimension: int, rows: Any, distances: Any) -> None:
        """Measure ``rows`` [4] at once: on some processors the last bit differs from that of one by one."""
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

    @njit(nogil=True)
    def enter(
        query: Any,
        vectors: Any,
        dimension: int,
        links: Any,
        offsets: Any,
        level_starts: Any,
        row: int,
        top: int,
        rows: Any,
        distances: Any,
    ) -> Any:
        """Greedy descent from the entry point to level 0."""
        nearest = np.int64(row)
        nearest_distance = distance_to(query, vectors, dimension, nearest)
        for level in range(top, 0, -1):
            while True:
                previous = nearest
                first = np.int64(offsets[previous]) + level_starts[level]
                last = np.int64(offsets[previous]) + level_starts[level + 1]
                waiting = 0
                for at in range(first, last):
                    linked = np.int64(links[at])
                    if linked < 0:
                        break
                    rows[waiting] = linked
                    waiting += 1
                    if waiting == 4:
                        distances_to_four(query, vectors, dimension, rows, distances)
                        for i in range(4):
                            if nearest_distance > sign * distances[i]:
                                nearest = rows[i]
                                nearest_distance = sign * distances[i]
                        waiting = 0
                for i in range(waiting):
                    distance = distance_to(query, vectors, dimension, rows[i])
                    if nearest_distance > distance:
                        nearest = rows[i]
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
            if state[NUM_DISTANCES] >= stop_at or cancel[0] != 0:
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
                state[IS_DONE] = 1
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
                    distances_to_four(query, vectors, dimension, rows, distances)
                    for i in range(4):
                        distance = sign * distances[i]
                        offer_result(result_ids, result_distances, live, rows[i], distance, tie_sign)
                        push_candidate(queue_ids, queue_distances, state, rows[i], distance, tie_sign)
                    state[NUM_DISTANCES] += 4
                    waiting = 0
            for i in range(waiting):
                distance = distance_to(query, vectors, dimension, rows[i])
                offer_result(result_ids, result_distances, live, rows[i], distance, tie_sign)
                push_candidate(queue_ids, queue_distances, state, rows[i], distance, tie_sign)
            state[NUM_DISTANCES] += waiting
        state[IS_DONE] = 1

    return Compiled(enter, advance)
