"""IVF search in stages of probed lists, which continue Faiss's own result heap.

With ``PARALLEL_MODE_NO_HEAP_INIT`` Faiss neither initialises nor sorts the caller's heap, so that probing the lists
in slices replays the one-shot loop exactly: the same C++ over the same lists in the same order on the same heap.
Searching slices independently and merging them would NOT be exact where documents tie. The mode is set on a view
that shares quantizer and lists; the index itself stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.retrieval.base import (
    DEFAULT_CUTS,
    Cancellation,
    Encoding,
    Ids,
    IndexOptions,
    Metric,
    Neighbors,
    Stage,
    Vectors,
    best_first,
    cut_points,
    faiss,
)
from ragcache_core.retrieval.filters import Selection

_NO_HEAP_INIT = 1024
_WORST = np.finfo(np.float32).max  # Faiss's neutral heap value; infinity would not be
_PROBES_PER_CALL = 32
"""Lists between two looks at the cancel flag; a call costs 3 us."""
_LOOK_AT_SELECTOR = 8
"""Multiply-adds that take as long as asking the selector for a document."""
_POINTS_PER_LIST = 39
"""Vectors per centroid that Faiss's k-means requires."""
_LEAST_LISTS = 6
_PQ_CENTROIDS = 256

logger = logger_of(__name__)

_CONTINUABLE = ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ")


def least_vectors(options: IndexOptions) -> int:
    """Return the minimum number of vectors for training; with fewer, the exact flat index is used."""
    least = options.nlist if options.nlist is not None else _LEAST_LISTS * _POINTS_PER_LIST
    return max(least, _PQ_CENTROIDS) if options.encoding == "pq" else least


def choose_nlist(num_vectors: int, options: IndexOptions) -> int:
    """Return the number of lists: 4 sqrt(n), with at least 39 vectors each."""
    if options.nlist is not None:
        return options.nlist
    return max(1, min(int(4 * math.sqrt(num_vectors)), num_vectors // _POINTS_PER_LIST))


def choose_nprobe(nlist: int, options: IndexOptions) -> int:
    """Return the number of lists that a search probes: an eighth of them, at least 8."""
    return min(nlist, options.nprobe if options.nprobe is not None else max(8, math.ceil(nlist / 8)))


class IVFIndex:
    """``IndexIVFFlat``, ``IndexIVFScalarQuantizer`` or ``IndexIVFPQ``.

    See :class:`ragcache_core.retrieval.base.StagedIndex`.
    """

    layout = "ivf"
    max_default_stages = len(DEFAULT_CUTS)

    def __init__(self, native: Any, options: IndexOptions, trained_on: int) -> None:
        self.options = options
        self.trained_on = trained_on
        self._native = native
        self._nprobe = choose_nprobe(native.nlist, options)
        native.nprobe = self._nprobe
        # Fast-scan, RaBitQ and other kinds have their own loops: they are searched in one stage.
        self._view = _continuing_view(native) if type(native).__name__ in _CONTINUABLE else None

    @classmethod
    def build(cls, ids: Ids, vectors: Vectors, options: IndexOptions) -> IVFIndex:
        """Train on ``vectors`` and add them, with Faiss's seed: the same vectors give the same index."""
        dimension = vectors.shape[1]
        nlist = choose_nlist(len(ids), options)
        metric = faiss.METRIC_INNER_PRODUCT if options.is_similarity else faiss.METRIC_L2
        quantizer = faiss.IndexFlatIP(dimension) if options.is_similarity else faiss.IndexFlatL2(dimension)
        native: Any
        if options.encoding == "flat":
            native = faiss.IndexIVFFlat(quantizer, dimension, nlist, metric)
        elif options.encoding == "sq8":
            native = faiss.IndexIVFScalarQuantizer(
                quantizer, dimension, nlist, faiss.ScalarQuantizer.QT_8bit, metric, True
            )
        else:
            native = faiss.IndexIVFPQ(quantizer, dimension, nlist, choose_pq_m(dimension, options), 8, metric)
            native.pq.cp.min_points_per_centroid = 1
        native.cp.min_points_per_centroid = 1  # fewer is a matter of quality, not a reason to warn
        native.train(vectors)
        native.add_with_ids(vectors, ids)
        return cls(native, options, len(ids))

    @property
    def native(self) -> Any:
        return self._native

    @property
    def nlist(self) -> int:
        return int(self._native.nlist)

    @property
    def nprobe(self) -> int:
        return self._nprobe

    def __len__(self) -> int:
        return int(self._native.ntotal)

    def ids(self) -> Ids:
        lists = self._native.invlists
        sizes = [lists.list_size(i) for i in range(self.nlist)]
        parts = [faiss.rev_swig_ptr(lists.get_ids(i), n).copy() for i, n in enumerate(sizes) if n]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def probes(self, among: Selection | None = None) -> int:
        """Return how many lists a search probes: among some documents more, as many as hold ``nprobe`` lists' worth of
        them. Below a share of ``nprobe / nlist`` it is all lists, and the search is exact.
        """
        if not among:
            return self._nprobe
        return min(self.nlist, math.ceil(self._nprobe * len(self) / len(among)))

    def work(self, k: int, among: Selection | None = None) -> float:
        scanned = len(self) * self.probes(among) / self.nlist
        if among is None:
            return float((self.nlist + scanned) * self._native.d)
        compared = scanned * len(among) / max(1, len(self))
        return float((self.nlist + compared) * self._native.d + scanned * _LOOK_AT_SELECTOR)

    def search(self, query: Vectors, k: int, *, among: Selection | None = None) -> Neighbors:
        found = self._probe(query, k, self.probes(among), among)
        return self._filled(found, query, k, among)

    def _filled(self, found: Neighbors, query: Vectors, k: int, among: Selection | None) -> Neighbors:
        """Return ``found``, or the best of all lists if the probed lists hold fewer than ``k`` documents."""
        if len(found.ids) < min(k, len(self) if among is None else len(among)):
            return self._probe(query, k, self.nlist, among)
        return found

    def _probe(self, query: Vectors, k: int, nprobe: int, among: Selection | None) -> Neighbors:
        scores, ids = self._native.search(query[None], k, params=_parameters(nprobe, among))
        return Neighbors.from_faiss(scores[0], ids[0])

    def stages(
        self,
        query: Vectors,
        k: int,
        cuts: Sequence[float],
        cancel: Cancellation,
        among: Selection | None = None,
    ) -> Iterator[Stage]:
        if self._view is None or not _replays_exactly(self.options.encoding, self.options.metric):
            yield Stage(self.search(query, k, among=among), is_final=True)
        else:
            yield from self._continued(query, k, cuts, cancel, among)

    def _continued(
        self, query: Vectors, k: int, cuts: Sequence[float], cancel: Cancellation, among: Selection | None = None
    ) -> Iterator[Stage]:
        assert self._view is not None
        is_similarity = self.options.is_similarity
        nprobe = self.probes(among)
        x = np.ascontiguousarray(query[None])
        list_distances, lists = self._native.quantizer.search(x, nprobe)
        scores = np.full(k, -_WORST if is_similarity else _WORST, np.float32)
        ids = np.full(k, -1, np.int64)
        stats = faiss.IndexIVFStats()  # the global one would be a data race
        params = _parameters(nprobe, among)
        width = _PROBES_PER_CALL * nprobe // self._nprobe  # lists have fewer selected vectors
        begin = 0
        for end in cut_points(cuts, nprobe):
            for start in range(begin, end, width):
                if cancel.is_cancelled:
                    return
                stop = min(end, start + width)
                keys = np.ascontiguousarray(lists[0, start:stop])
                distances = np.ascontiguousarray(list_distances[0, start:stop])
                params.nprobe = stop - start
                self._view.search_preassigned_c(
                    1,
                    faiss.swig_ptr(x),
                    k,
                    faiss.swig_ptr(keys),
                    faiss.swig_ptr(distances),
                    faiss.swig_ptr(scores),
                    faiss.swig_ptr(ids),
                    False,
                    params,
                    stats,
                )
            begin = end
            order = best_first(scores, ids, is_similarity)
            neighbors = Neighbors.from_faiss(scores[order], ids[order])
            is_final = end == nprobe
            yield Stage(self._filled(neighbors, query, k, among) if is_final else neighbors, is_final)

    def with_added(self, ids: Ids, vectors: Vectors) -> IVFIndex:
        native = faiss.clone_index(self._native)
        native.add_with_ids(vectors, ids)
        return IVFIndex(native, self.options, self.trained_on)

    def without(self, ids: Ids) -> IVFIndex:
        native = faiss.clone_index(self._native)
        native.remove_ids(ids)
        return IVFIndex(native, self.options, self.trained_on)


def _parameters(nprobe: int, among: Selection | None) -> Any:
    if among is None:
        return faiss.SearchParametersIVF(nprobe=nprobe)
    return faiss.SearchParametersIVF(nprobe=nprobe, sel=among.selector)


@functools.cache
def _replays_exactly(encoding: Encoding, metric: Metric) -> bool:
    """Return whether this Faiss version continues a heap exactly, checked once on a small index with ties."""
    options = IndexOptions(metric=metric, encoding=encoding, nlist=8, nprobe=6)
    vectors = np.random.default_rng(0).integers(-1, 2, (300, 8)).astype(np.float32)
    index = IVFIndex.build(np.arange(300, dtype=np.int64), vectors, options)
    half = Selection(np.arange(0, 300, 2))
    for query, among in product(vectors[:8], (None, half)):
        expected = index.search(query, 7, among=among)
        *_, last = index._continued(query, 7, (0.2, 0.6, 1.0), Cancellation(), among)
        if not np.array_equal(last.neighbors.ids, expected.ids) or (
            last.neighbors.scores.tobytes() != expected.scores.tobytes()
        ):
            logger.warning(
                "RC-SEARCH-UNSTAGED: IVF (%s, %s) is searched in one stage: faiss %s differs",
                encoding,
                metric,
                faiss.__version__,
            )
            return False
    return True


def choose_pq_m(dimension: int, options: IndexOptions) -> int:
    """Return the bytes of a PQ code: about one per four dimensions.

    Raises:
        ConfigError: ``pq_m`` does not divide ``dimension``.
    """
    if options.pq_m is None:
        return max(m for m in range(1, max(1, dimension // 4) + 1) if dimension % m == 0)
    if dimension % options.pq_m:
        raise ConfigError(
            f"pq_m is {options.pq_m}, the embedder has {dimension} dimensions: choose a pq_m that divides them"
        )
    return options.pq_m


def _continuing_view(native: Any) -> Any:
    quantizer, d, nlist, metric = native.quantizer, native.d, native.nlist, native.metric_type
    if isinstance(native, faiss.IndexIVFFlat):
        view = faiss.IndexIVFFlat(quantizer, d, nlist, metric, False)
    elif isinstance(native, faiss.IndexIVFScalarQuantizer):
        view = faiss.IndexIVFScalarQuantizer(quantizer, d, nlist, native.sq.qtype, metric, native.by_residual, False)
        view.sq = native.sq
    else:
        view = faiss.IndexIVFPQ(quantizer, d, nlist, native.pq.M, native.pq.nbits, metric, False)
        view.pq = native.pq
        view.by_residual = native.by_residual
        view.scan_table_threshold = native.scan_table_threshold
        view.polysemous_ht = native.polysemous_ht
        view.use_precomputed_table = native.use_precomputed_table
        view.precomputed_table = native.precomputed_table
    view.own_fields = False
    view.replace_invlists(native.invlists, False)
    view.is_trained = True
    view.ntotal = native.ntotal
    view.parallel_mode = _NO_HEAP_INIT
    return view
