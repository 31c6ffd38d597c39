"""What staging costs: the last stage of a staged search against the unmodified search of the same index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faiss
import numpy as np

from ragcache_core.retrieval.base import Cancellation, IndexOptions
from ragcache_core.retrieval.index.flat import FlatIndex
from ragcache_core.retrieval.index.hnsw import HNSWIndex
from ragcache_core.retrieval.index.ivf import IVFIndex
from tests.benchmarks.pairs import Comparison, compare

CUTS = (0.05, 0.15, 0.4, 1.0)
K = 5


def clustered_vectors(num_vectors: int, dimension: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return ``[num_vectors, dimension]`` float32 around a hundred centres, as text embeddings are."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(100, dimension))
    members = rng.integers(0, len(centres), num_vectors)
    return np.asarray(centres[members] + 0.5 * rng.normal(size=(num_vectors, dimension)), dtype=np.float32)


def compare_staged_search(
    num_vectors: int, dimension: int, *, pairs: int, seed: int, report: Callable[[str], None]
) -> list[Comparison]:
    """Return a comparison for each kind of index: plain search, and the same search in four geometric stages."""
    faiss.omp_set_num_threads(1)
    vectors = clustered_vectors(num_vectors, dimension, seed)
    queries = clustered_vectors(pairs + 8, dimension, seed + 1)
    ids = np.arange(num_vectors, dtype=np.int64)
    kinds: list[tuple[str, type[Any], IndexOptions]] = [
        ("IVF, flat", IVFIndex, IndexOptions("ivf")),
        ("IVF, SQ8", IVFIndex, IndexOptions("ivf", encoding="sq8")),
        ("IVF, PQ", IVFIndex, IndexOptions("ivf", encoding="pq")),
        ("HNSW", HNSWIndex, IndexOptions("hnsw")),
        ("Flat", FlatIndex, IndexOptions("flat")),
    ]
    rows = []
    for name, kind, options in kinds:
        report(f"building {name}")
        index = kind.build(ids, vectors, options)
        prepare = getattr(index, "prepare", None)
        if prepare is not None:
            prepare()

        def plain(i: int, index: Any = index) -> None:
            index.search(queries[i], K)

        def staged(i: int, index: Any = index) -> None:
            for _ in index.stages(queries[i], K, CUTS, Cancellation()):
                pass

        report(f"measuring {name}")
        rows.append(compare(f"{name}, {num_vectors:,} x {dimension}, k={K}", plain, staged, pairs=pairs))
    return rows
