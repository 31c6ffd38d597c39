"""HNSW search, cut by distance computations: a traversal in numba over Faiss's own graph and vectors, zero-copy.

The traversal (``traversal.py``) is an exact port of Faiss's bounded-queue search, tie-breaks included, and calls
Faiss's own distance kernels. Before it is trusted it answers a few queries on this very index beside the index
itself; where one bit differs, or numba or the kernels are missing, the index is searched in one stage.

Faiss cannot remove a vector from the graph. Deleted ones stay in it as way-points, and an ``IDSelector`` keeps them
out of the results; when a fifth of the graph is deleted, the store builds it anew.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragcache_core.retrieval.base import (
    Cancellation,
    Ids,
    IndexOptions,
    Metric,
    Neighbors,
    Stage,
    Vectors,
    best_first,
)
from ragcache_core.retrieval.extra import faiss
from ragcache_core.retrieval.index.flat import RowScan
from ragcache_core.retrieval.selection import Mask, Selection

_LARGEST_DELETED_SHARE = 0.2
_SELF_CHECK_QUERIES = 4
_logger = logging.getLogger(__name__)


class HNSWIndex:
    """``IndexIDMap2(IndexHNSWFlat)``. See :class:`ragcache_core.retrieval.base.StagedIndex`."""

    layout = "hnsw"

    def __init__(self, native: Any, options: IndexOptions, trained_on: int, live: Mask | None = None) -> None:
        self.options = options
        self.trained_on = trained_on
        self._native = native
        self._graph = faiss.downcast_index(native.index)
        self._ids: Ids = faiss.vector_to_array(native.id_map)
        self._live = live
        self._num_live = len(self._ids) if live is None else int(live.sum())
        self._live_rows = None if live is None else Selection(np.flatnonzero(live), len(live))
        self._scan = RowScan(faiss.downcast_index(self._graph.storage), self._ids, is_similarity=options.is_similarity)
        self._traversal: Any = None
        self._is_prepared = False
        self._preparing = threading.Lock()
        self._work_share = 1.0

    @classmethod
    def build(cls, ids: Ids, vectors: Vectors, options: IndexOptions) -> HNSWIndex:
        metric = faiss.METRIC_INNER_PRODUCT if options.is_similarity else faiss.METRIC_L2
        graph = faiss.IndexHNSWFlat(vectors.shape[1], options.hnsw_m, metric)
        graph.hnsw.efConstruction = options.ef_construction
        graph.hnsw.efSearch = options.ef_search
        native = faiss.IndexIDMap2(graph)
        native.add_with_ids(vectors, ids)
        return cls(native, options, len(ids))

    @property
    def native(self) -> Any:
        return self._native

    @property
    def is_staged(self) -> bool:
        """Whether the traversal proved itself equal to this index's own search."""
        self.prepare()
        return self._traversal is not None

    def __len__(self) -> int:
        return self._num_live

    def ids(self) -> Ids:
        return self._ids if self._live is None else self._ids[self._live]

    def ef(self, k: int, among: Selection | None = None) -> int:
        """Return the queue's length: at least ``ef_search`` and ``k``, more where vectors that are deleted, or not
        selected, take places.
        """
        least = max(self.options.ef_search, k)
        wanted = self._num_live if among is None else len(among)
        return min(len(self._ids), math.ceil(least * len(self._ids) / max(1, wanted)))

    def scans(self, k: int, among: Selection | None) -> bool:
        """Return whether a search compares the selected vectors one by one: so few that the graph would see as many."""
        return among is not None and len(among) <= self.ef(k, among) * self.options.hnsw_m

    def work(self, k: int, among: Selection | None = None) -> float:
        if among is not None and self.scans(k, among):
            return float(len(among) * self._graph.d)
        visited = min(len(self._ids), self.ef(k, among) * self.options.hnsw_m)
        return float(visited * self._graph.d)

    def search(self, query: Vectors, k: int, *, among: Selection | None = None) -> Neighbors:
        rows = self._live_rows if among is None else among.rows_in(self._ids)
        if not self.scans(k, among):
            found = self._mapped(*self._search_rows(query, k, self.ef(k, among), rows))
            if len(found.ids) == self._num_found(k, among):
                return found
        return self._scan.search(query, k, rows)  # the graph may have parts that no path leads to

    def _num_found(self, k: int, among: Selection | None) -> int:
        return min(k, self._num_live if among is None else len(among))

    def _search_rows(self, query: Vectors, k: int, ef: int, rows: Selection | None) -> tuple[Vectors, Ids]:
        params = faiss.SearchParametersHNSW(efSearch=ef)
        if rows is not None:
            params.sel = rows.selector
        scores, found = self._graph.search(query[None], k, params=params)
        return scores[0], found[0]

    def _mapped(self, scores: Vectors, rows: Ids) -> Neighbors:
        found = rows >= 0
        return Neighbors(self._ids[rows[found]], scores[found])

    def stages(
        self,
        query: Vectors,
        k: int,
        cuts: Sequence[float],
        cancel: Cancellation,
        among: Selection | None = None,
    ) -> Iterator[Stage]:
        if among is not None and self.scans(k, among):
            yield from self._scan.stages(query, k, cuts, cancel, among.rows_in(self._ids))
            return
        if len(cuts) == 1 or not self.is_staged:
            yield Stage(self.search(query, k, among=among), is_final=True)
            return
        ef = self.ef(k, among)
        run = self._traversal.start(query, k, ef, cancel.flag, None if among is None else among.rows_in(self._ids).mask)
        expected = self._work_share * ef * self.options.hnsw_m
        for cut in cuts:
            run.advance(None if cut == 1.0 else max(1, int(cut * expected)))
            if cancel.is_cancelled:
                return
            order = best_first(run.scores, run.rows, self.options.is_similarity)
            neighbors = self._mapped(run.scores[order], run.rows[order])
            if run.is_done:
                if len(neighbors.ids) < self._num_found(k, among):
                    neighbors = self.search(query, k, among=among)
                self._work_share += 0.1 * (run.num_distances / (ef * self.options.hnsw_m) - self._work_share)
            yield Stage(neighbors, is_final=run.is_done)
            if run.is_done:
                return

    def prepare(self) -> None:
        """Compile the traversal and let it prove itself. Takes a second or two the first time in a process."""
        with self._preparing:
            if self._is_prepared:
                return
            self._traversal = self._proved_traversal()
            self._is_prepared = True

    def _proved_traversal(self) -> Any:
        try:
            from ragcache_core.retrieval.index.traversal import GraphTraversal

            traversal = GraphTraversal(self._graph, self._live)
            _prove(self.options.metric)
            shares = self._self_check(traversal, _SELF_CHECK_QUERIES, k=10)
        except Exception as error:  # numba, the kernels or their names: whatever it is, one stage always works
            _logger.warning("HNSW is searched in one stage: %r", error)
            return None
        self._work_share = float(np.mean(shares)) if shares else 1.0
        return traversal

    def _self_check(self, traversal: Any, num_queries: int, k: int) -> list[float]:
        """Return the share of the estimated work that some queries took; raise if one is not answered bit-equal."""
        shares = []
        k = min(k, len(self._ids))
        for query in traversal.sample_queries(num_queries):
            ef = self.ef(k)
            run = traversal.start(query, k, ef, np.zeros(1, np.uint8))
            run.advance(1)
            run.advance(None)
            order = best_first(run.scores, run.rows, self.options.is_similarity)
            scores, rows = self._search_rows(query, k, ef, self._live_rows)
            num_found = int((rows >= 0).sum())
            same_rows = np.array_equal(run.rows[order][:num_found], rows[:num_found])
            if not same_rows or run.scores[order][:num_found].tobytes() != scores[:num_found].tobytes():
                raise AssertionError(f"the traversal differs from faiss {faiss.__version__}")
            shares.append(run.num_distances / (ef * self.options.hnsw_m))
        return shares

    def with_added(self, ids: Ids, vectors: Vectors) -> HNSWIndex:
        native = faiss.clone_index(self._native)
        native.add_with_ids(vectors, ids)
        live = None if self._live is None else np.concatenate((self._live, np.ones(len(ids), np.bool_)))
        return HNSWIndex(native, self.options, self.trained_on, live)

    def without(self, ids: Ids) -> HNSWIndex | None:
        live = ~np.isin(self._ids, ids)
        if self._live is not None:
            live &= self._live
        if live.all():
            return self
        if live.mean() < 1 - _LARGEST_DELETED_SHARE:
            return None
        return HNSWIndex(self._native, self.options, self.trained_on, live)


@functools.cache
def _prove(metric: Metric) -> None:
    """Raise if the traversal is not this version of Faiss's: on a small index full of ties, and with a short queue."""
    from ragcache_core.retrieval.index.traversal import GraphTraversal

    rng = np.random.default_rng(0)
    ties = rng.integers(-1, 2, (300, 4)).astype(np.float32)
    sparse = rng.standard_normal((600, 8)).astype(np.float32)
    for vectors, hnsw_m, ef_search, k in ((ties, 8, 16, 10), (sparse, 3, 1, 1), (sparse, 3, 4, 4)):
        options = IndexOptions(kind="hnsw", metric=metric, hnsw_m=hnsw_m, ef_search=ef_search)
        index = HNSWIndex.build(np.arange(len(vectors), dtype=np.int64), vectors, options)
        index._self_check(GraphTraversal(index._graph, None), 64, k)
