"""HNSW search in stages with increasing ``efSearch``.

Faiss cannot pause a search of a graph. So an early stage is a search of its own with a share of ``efSearch``, and the
last stage is the unmodified search. Early stages therefore add to the work: by default a search has two stages.

Faiss cannot remove a vector from the graph. Deleted vectors stay in it as waypoints, and an ``IDSelector`` keeps them
out of the results. The store rebuilds the graph when a fifth of it is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragcache_core.retrieval.base import Cancellation, Ids, IndexOptions, Neighbors, Stage, Vectors, cut_points, faiss
from ragcache_core.retrieval.filters import Mask, Selection
from ragcache_core.retrieval.index.flat import RowScan

_LARGEST_DELETED_SHARE = 0.2


class HNSWIndex:
    """``IndexIDMap2(IndexHNSWFlat)``. See :class:`ragcache_core.retrieval.base.StagedIndex`."""

    layout = "hnsw"
    max_default_stages = 2

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

    def __len__(self) -> int:
        return self._num_live

    def ids(self) -> Ids:
        return self._ids if self._live is None else self._ids[self._live]

    def ef(self, k: int, among: Selection | None = None) -> int:
        """Return ``efSearch`` of a complete search for ``k`` vectors."""
        return self._scaled(max(self.options.ef_search, k), among)

    def _scaled(self, num_candidates: int, among: Selection | None) -> int:
        """Return ``efSearch`` with a margin for deleted and unselected vectors."""
        num_eligible = self._num_live if among is None else len(among)
        return min(len(self._ids), math.ceil(num_candidates * len(self._ids) / max(1, num_eligible)))

    def scans(self, k: int, among: Selection | None) -> bool:
        """Return whether a search compares each selected vector, as the graph would visit as many."""
        return among is not None and len(among) <= self.ef(k, among) * self.options.hnsw_m

    def work(self, k: int, among: Selection | None = None) -> float:
        if among is not None and self.scans(k, among):
            return float(len(among) * self._graph.d)
        visited = min(len(self._ids), self.ef(k, among) * self.options.hnsw_m)
        return float(visited * self._graph.d)

    def search(self, query: Vectors, k: int, *, among: Selection | None = None) -> Neighbors:
        if not self.scans(k, among):
            found = self._search_graph(query, k, self.ef(k, among), among)
            if len(found.ids) == min(k, self._num_live if among is None else len(among)):
                return found
        return self._scan.search(query, k, self._rows_of(among))  # parts of the graph can be unreachable

    def _search_graph(self, query: Vectors, k: int, ef: int, among: Selection | None) -> Neighbors:
        params = faiss.SearchParametersHNSW(efSearch=ef)
        rows = self._rows_of(among)
        if rows is not None:
            params.sel = rows.selector
        scores, found = self._graph.search(query[None], k, params=params)
        is_found = found[0] >= 0
        return Neighbors(self._ids[found[0][is_found]], scores[0][is_found])

    def _rows_of(self, among: Selection | None) -> Selection | None:
        return self._live_rows if among is None else among.rows_in(self._ids)

    def stages(
        self,
        query: Vectors,
        k: int,
        cuts: Sequence[float],
        cancel: Cancellation,
        among: Selection | None = None,
    ) -> Iterator[Stage]:
        if among is not None and self.scans(k, among):
            yield from self._scan.stages(query, k, cuts, cancel, self._rows_of(among))
            return
        *early, _ = cut_points(cuts, self.ef(k, among), least=self._scaled(k, among))
        for ef in early:
            if cancel.is_cancelled:
                return
            yield Stage(self._search_graph(query, k, ef, among), is_final=False)
        if not cancel.is_cancelled:
            yield Stage(self.search(query, k, among=among), is_final=True)

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
