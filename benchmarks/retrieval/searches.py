"""Staged search, to its last stage, against the unmodified search of the same index, also with filters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np

from ragcache_core.retrieval.base import DEFAULT_CUTS, Cancellation, IndexOptions, StagedIndex, stage_cuts
from ragcache_core.retrieval.filters import Selection
from ragcache_core.retrieval.index.flat import FlatIndex
from ragcache_core.retrieval.index.hnsw import HNSWIndex
from ragcache_core.retrieval.index.ivf import IVFIndex

K = 5
SHARES = (0.5, 0.1, 0.01)


@dataclass(frozen=True, slots=True)
class SearchComparison:
    """Times of a baseline and of its rival in seconds, pair by pair: ``baseline_s[i]`` ran next to ``rival_s[i]``."""

    name: str
    baseline_s: tuple[float, ...]
    rival_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the pairs of rival / baseline: 1.05 is 5 % slower."""
        return float(np.median(np.array(self.rival_s) / np.array(self.baseline_s)))

    def to_dict(self) -> dict[str, float | str | int]:
        return {
            "name": self.name,
            "pairs": len(self.baseline_s),
            "baseline_p50_ms": _percentile_ms(self.baseline_s, 50),
            "baseline_p99_ms": _percentile_ms(self.baseline_s, 99),
            "rival_p50_ms": _percentile_ms(self.rival_s, 50),
            "rival_p99_ms": _percentile_ms(self.rival_s, 99),
            "ratio": round(self.ratio, 3),
        }


def compare(
    name: str, baseline: Callable[[int], object], rival: Callable[[int], object], *, pairs: int, warm_up: int = 3
) -> SearchComparison:
    """Run both with 0, 1, 2, ... in turn, the first of each pair alternating, and return their times."""
    for i in range(warm_up):
        baseline(i)
        rival(i)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        for side in order:
            started_s = time.perf_counter()
            (baseline, rival)[side](i)
            times[side].append(time.perf_counter() - started_s)
    return SearchComparison(name, tuple(times[0]), tuple(times[1]))


def table(rows: Sequence[SearchComparison], baseline: str, rival: str) -> str:
    """Return a table of comparisons."""
    line = "{:<44}  {:>6}  {:>12}  {:>12}  {:>12}  {:>12}  {:>7}"
    heads = ("", "pairs", f"{baseline} p50", "p99 ms", f"{rival} p50", "p99 ms", "ratio")
    lines = [line.format(*heads)]
    for row in rows:
        d = row.to_dict()
        figures = (f"{d[key]:.3f}" for key in ("baseline_p50_ms", "baseline_p99_ms", "rival_p50_ms", "rival_p99_ms"))
        lines.append(line.format(row.name, d["pairs"], *figures, f"{row.ratio:.3f}"))
    return "\n".join(lines)


def _percentile_ms(times_s: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(times_s, percent)) * 1000, 4)


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
) -> list[SearchComparison]:
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
) -> dict[str, list[SearchComparison]]:
    """Return two comparisons for each kind of index and share of documents that a filter selects.

    The search among them in its default stages, against Faiss's own with a selector, and against the same search of
    all.
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
