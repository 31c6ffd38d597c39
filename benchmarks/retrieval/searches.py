"""What staging costs: the last stage of a staged search against the unmodified search of the same index.

And what filters cost: the same among some of the documents, against Faiss with a selector and against all of them.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from benchmarks.retrieval.pairs import Comparison, compare
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import DEFAULT_CUTS, Cancellation, IndexOptions, StagedIndex, stage_cuts
from ragcache_core.retrieval.filters import Selection, parse_filter
from ragcache_core.retrieval.index.flat import FlatIndex
from ragcache_core.retrieval.index.hnsw import HNSWIndex
from ragcache_core.retrieval.index.ivf import IVFIndex
from ragcache_core.types import Document

K = 5
SHARES = (0.5, 0.1, 0.01)


def clustered_vectors(num_vectors: int, dimension: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return ``[num_vectors, dimension]`` float32 around a hundred centres, as text embeddings are."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(100, dimension))
    members = rng.integers(0, len(centres), num_vectors)
    return np.asarray(centres[members] + 0.5 * rng.normal(size=(num_vectors, dimension)), dtype=np.float32)


def default_cuts(index: StagedIndex) -> tuple[float, ...]:
    """Return the stages of a long search that names none: 5, 15, 40 and 100 % of the work; of HNSW 5 and 100 %."""
    return stage_cuts(None, math.inf, max_default_stages=index.max_default_stages)


def compare_staged_search(
    num_vectors: int, dimension: int, *, pairs: int, seed: int, report: Callable[[str], None]
) -> list[Comparison]:
    """Return comparisons for each kind of index: plain search, and the same search in default stages and in four."""
    faiss.omp_set_num_threads(1)
    vectors = clustered_vectors(num_vectors, dimension, seed)
    queries = clustered_vectors(pairs + 8, dimension, seed + 1)
    ids = np.arange(num_vectors, dtype=np.int64)
    kinds: list[tuple[str, type[Any], IndexOptions]] = [
        ("IVF, flat", IVFIndex, IndexOptions("ivf")),
        ("IVF, SQ8", IVFIndex, IndexOptions("ivf", encoding="sq8")),
        ("IVF, PQ", IVFIndex, IndexOptions("ivf", encoding="pq")),
        ("HNSW", HNSWIndex, IndexOptions("hnsw")),
        ("HNSW, efSearch 1024", HNSWIndex, IndexOptions("hnsw", ef_search=1024)),
        ("Flat", FlatIndex, IndexOptions("flat")),
    ]
    rows = []
    for name, kind, options in kinds:
        report(f"building {name}")
        index = kind.build(ids, vectors, options)

        def plain(i: int, index: Any = index) -> None:
            index.search(queries[i], K)

        def staged(i: int, cuts: tuple[float, ...], index: Any = index) -> None:
            for _ in index.stages(queries[i], K, cuts, Cancellation()):
                pass

        for cuts in dict.fromkeys((default_cuts(index), DEFAULT_CUTS)):
            report(f"measuring {name}")
            shown = f"{name}, {len(cuts)} stages, {num_vectors:,} x {dimension}, k={K}"
            rows.append(compare(shown, plain, partial(staged, cuts=cuts), pairs=pairs))
    return rows


def compare_filtered_search(
    num_vectors: int, dimension: int, *, pairs: int, seed: int, report: Callable[[str], None]
) -> dict[str, list[Comparison]]:
    """Return two comparisons for each kind of index and share of documents that a filter selects.

    The search among them in its default stages, against Faiss's own with a selector, and against the same search of
    all. The third table has a filter itself: its documents found among ``num_vectors``, the first time and later.
    """
    faiss.omp_set_num_threads(1)
    vectors = clustered_vectors(num_vectors, dimension, seed)
    queries = clustered_vectors(pairs + 8, dimension, seed + 1)
    ids = np.arange(num_vectors, dtype=np.int64)
    rng = np.random.default_rng(seed + 2)
    selections = {share: Selection(np.flatnonzero(rng.random(num_vectors) < share)) for share in SHARES}
    kinds: list[tuple[str, type[Any], IndexOptions]] = [
        ("IVF, flat", IVFIndex, IndexOptions("ivf")),
        ("HNSW", HNSWIndex, IndexOptions("hnsw")),
        ("Flat", FlatIndex, IndexOptions("flat")),
    ]
    native, unfiltered = [], []
    for name, kind, options in kinds:
        report(f"building {name}")
        index = kind.build(ids, vectors, options)
        cuts = default_cuts(index)

        def plain(i: int, index: Any = index, among: Selection | None = None) -> None:
            index.search(queries[i], K, among=among)

        def staged(i: int, index: Any = index, cuts: tuple[float, ...] = cuts, among: Selection | None = None) -> None:
            for _ in index.stages(queries[i], K, cuts, Cancellation(), among):
                pass

        for share, among in selections.items():
            report(f"measuring {name} among {share:.0%}")
            shown = f"{name}, {share:.0%} of {num_vectors:,} x {dimension}, k={K}"
            filtered = partial(staged, among=among)
            native.append(compare(shown, partial(plain, among=among), filtered, pairs=pairs))
            unfiltered.append(compare(shown, staged, filtered, pairs=pairs))
    return {"filtered, Faiss with a selector": native, "filtered, all documents": unfiltered}


def settled_shares(num_vectors: int, dimension: int, *, queries: int, seed: int) -> dict[str, list[float]]:
    """Return for which share of questions each stage of an IVF search names the two documents that are found at last,
    by what share of the documents a filter selects.
    """
    faiss.omp_set_num_threads(1)
    ids = np.arange(num_vectors, dtype=np.int64)
    index = IVFIndex.build(ids, clustered_vectors(num_vectors, dimension, seed), IndexOptions("ivf"))
    rng = np.random.default_rng(seed + 2)
    shares = {}
    for share in (1.0, *SHARES):
        among = None if share == 1.0 else Selection(np.flatnonzero(rng.random(num_vectors) < share))
        settled = np.zeros(len(DEFAULT_CUTS))
        for query in clustered_vectors(queries, dimension, seed + 1):
            found = [
                stage.neighbors.ids.tolist() for stage in index.stages(query, 2, DEFAULT_CUTS, Cancellation(), among)
            ]
            settled += [found[min(i, len(found) - 1)] == found[-1] for i in range(len(DEFAULT_CUTS))]
        shares[f"{share:.0%}"] = (settled / queries).tolist()
    return shares


def time_filters(num_documents: int, *, pairs: int, report: Callable[[str], None]) -> list[Comparison]:
    """Return how long it takes to find the documents of a filter that is new, of a field that is in memory, and of the
    same filter again.
    """
    report("filtering")
    metadata = [{"tenant": f"tenant-{i % 100}", "year": 1990 + i % 35, "path": f"docs/{i}.md"} for i in range(1000)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with DocumentStore.create(path, embedder=PrecomputedEmbedder(), index="flat") as store:
            vectors = np.zeros((num_documents, 8), np.float32)
            store.add([Document(f"d{i}", "text", metadata[i % 1000]) for i in range(num_documents)], embeddings=vectors)
        with DocumentStore.open(path, embedder=PrecomputedEmbedder(), read_only=True) as store:
            table, _ = store.begin_search()
            began_s = time.perf_counter()
            table.documents.selected(parse_filter({"tenant": "tenant-1", "year": {"$gte": 2020}}))
            first_s = time.perf_counter() - began_s

            def new(i: int) -> None:
                table.documents.selected(
                    parse_filter({"tenant": f"tenant-{i % 100}", "year": {"$gte": 1990 + i / 100}})
                )

            def again(_: int) -> None:
                table.documents.selected(parse_filter({"tenant": "tenant-1", "year": {"$gte": 2020}}))

            name = f"a filter on 2 fields of {num_documents:,} documents; first of all {first_s * 1000:.0f} ms"
            return [compare(name, new, again, pairs=pairs)]
