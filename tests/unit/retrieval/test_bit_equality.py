"""The last stage is the unmodified index's answer, ids and distances, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache_core.retrieval import base
from ragcache_core.retrieval.base import Cancellation, Ids, IndexOptions, StagedIndex, Vectors
from ragcache_core.retrieval.filters import Selection
from ragcache_core.retrieval.index.choice import build_index
from ragcache_core.retrieval.index.flat import FlatIndex
from ragcache_core.retrieval.index.hnsw import HNSWIndex
from ragcache_core.retrieval.index.ivf import IVFIndex

KINDS = {
    "flat": {"kind": "flat"},
    "ivf": {"kind": "ivf"},
    "ivf-sq8": {"kind": "ivf", "encoding": "sq8"},
    "ivf-pq": {"kind": "ivf", "encoding": "pq"},
    "hnsw": {"kind": "hnsw"},
}

cuts = st.lists(st.floats(0.01, 0.99), max_size=6, unique=True).map(lambda some: (*sorted(some), 1.0))


def make_vectors(rng: np.random.Generator, num_vectors: int, dimension: int, ties: str) -> Vectors:
    """Return vectors that tie never, often (few values) or always (copies of a few)."""
    if ties == "none":
        vectors = rng.standard_normal((num_vectors, dimension))
    elif ties == "few values":
        vectors = rng.integers(-1, 2, (num_vectors, dimension))
    else:
        vectors = rng.standard_normal((5, dimension))[rng.integers(0, 5, num_vectors)]
    return vectors.astype(np.float32)


def native_search(
    index: StagedIndex, query: Vectors, k: int, among: Selection | None = None, *, exhaustive: bool = False
) -> tuple[Ids, Vectors]:
    """Ask Faiss itself, with the parameters that the index names."""
    live = index.ids() if among is None else among.ids
    native, selector, params = index.native, faiss.IDSelectorBatch(live), None
    if isinstance(index, HNSWIndex) and not exhaustive and not index.scans(k, among):
        params = faiss.SearchParametersHNSW(efSearch=index.ef(k, among))
    elif isinstance(index, HNSWIndex):
        rows, ids = native.index.reconstruct_n(0, native.ntotal), faiss.vector_to_array(native.id_map)
        native = FlatIndex.build(ids, rows, index.options).native
        params = faiss.SearchParameters()
    elif isinstance(index, IVFIndex):
        params = faiss.SearchParametersIVF(nprobe=index.nlist if exhaustive else index.probes(among))
    elif among is not None:
        params = faiss.SearchParameters()
    if params is not None and len(live) < index.native.ntotal:
        params.sel = selector
    scores, ids = native.search(query[None], k, params=params)
    if not exhaustive and (ids[0] >= 0).sum() < min(k, len(live)):
        return native_search(index, query, k, among, exhaustive=True)
    return ids[0], scores[0]


def assert_last_stage_is_native(
    index: StagedIndex, query: Vectors, k: int, at: tuple[float, ...], among: Selection | None = None
) -> int:
    expected_ids, expected_scores = native_search(index, query, k, among)
    found = expected_ids >= 0
    stages = list(index.stages(query, k, at, Cancellation(), among))
    assert [stage.is_final for stage in stages] == [False] * (len(stages) - 1) + [True]
    last = stages[-1].neighbors
    np.testing.assert_array_equal(last.ids, expected_ids[found])
    assert last.scores.tobytes() == expected_scores[found].tobytes()
    once = index.search(query, k, among=among)
    np.testing.assert_array_equal(once.ids, expected_ids[found])
    assert once.scores.tobytes() == expected_scores[found].tobytes()
    assert len(last.ids) == min(k, len(index) if among is None else len(among))
    if among is not None:
        assert all(among.has(stage.neighbors.ids).all() for stage in stages)
    return len(stages)


@pytest.mark.parametrize("ties", ["none", "few values", "copies"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_last_stage_is_bit_equal_to_the_unmodified_index(kind: str, metric: str, ties: str, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    least = 256 if kind == "ivf-pq" else 1
    num_vectors = data.draw(st.integers(least, 700), label="num_vectors")
    dimension = data.draw(st.sampled_from([1, 4, 7, 16, 33]), label="dimension")
    extra: dict[str, Any] = {}
    if kind.startswith("ivf"):
        extra["nlist"] = data.draw(st.integers(1, min(40, num_vectors)), label="nlist")
        extra["nprobe"] = data.draw(st.integers(1, 60), label="nprobe")
    if kind == "hnsw":
        extra = {"hnsw_m": 8, "ef_construction": 16, "ef_search": data.draw(st.sampled_from([1, 5, 16, 64, 300]))}
    vectors = make_vectors(rng, num_vectors, dimension, ties)
    first = data.draw(st.integers(0, 1000), label="first id")
    ids = first + np.cumsum(rng.integers(1, 4, num_vectors)).astype(np.int64)
    index = build_index(ids, vectors, IndexOptions(metric=metric, **KINDS[kind], **extra))  # type: ignore[arg-type]

    removed = data.draw(st.sampled_from([0.0, 0.1, 0.19]), label="removed")
    gone = ids[rng.random(num_vectors) < removed][: num_vectors // 5]
    if len(gone) and len(gone) < num_vectors:
        index = index.without(gone) or index
    if data.draw(st.booleans(), label="added to"):
        more = make_vectors(rng, 9, dimension, ties)
        index = index.with_added(ids[-1] + 1 + np.arange(9, dtype=np.int64), more)

    for _ in range(4):
        k = data.draw(st.integers(1, min(130, len(index))), label="k")
        query = vectors[rng.integers(num_vectors)] if rng.random() < 0.5 else make_vectors(rng, 1, dimension, ties)[0]
        assert_last_stage_is_native(index, query, k, data.draw(cuts, label="cuts"))
        share = data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]), label="share that is selected")
        live = np.sort(index.ids())
        selected = live[rng.random(len(live)) < share]
        if len(selected):
            assert_last_stage_is_native(index, query, k, data.draw(cuts, label="cuts"), Selection(selected))


@pytest.mark.parametrize("removed", [0, 300])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_each_stage_of_hnsw_is_the_unmodified_search_with_a_share_of_ef(metric: Any, removed: int) -> None:
    vectors = make_vectors(np.random.default_rng(0), 2000, 16, "none")
    options = IndexOptions(kind="hnsw", metric=metric, hnsw_m=4, ef_search=200)
    index = HNSWIndex.build(np.arange(2000), vectors, options).without(np.arange(removed))
    assert index is not None
    ef, num_differing = index.ef(5), 0
    for query in vectors[:40]:
        stages = list(index.stages(query, 5, (0.001, 0.1, 1.0), Cancellation()))
        for stage, effort in zip(stages, (math.ceil(5 * ef / 200), math.ceil(0.1 * ef), ef), strict=True):
            params = faiss.SearchParametersHNSW(efSearch=effort)
            if removed:
                selector = params.sel = faiss.IDSelectorBatch(index.ids())  # noqa: F841  kept while Faiss reads it
            scores, ids = index.native.search(query[None], 5, params=params)
            np.testing.assert_array_equal(stage.neighbors.ids, ids[0])
            assert stage.neighbors.scores.tobytes() == scores[0].tobytes()
        num_differing += stages[0].neighbors.ids.tolist() != stages[-1].neighbors.ids.tolist()
    assert num_differing, "the first stage did as much as the last"


@pytest.mark.parametrize("share", [0.02, 0.6])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_among_some_documents_is_cut_in_stages_and_ends_as_filtering_all_of_them(
    kind: str, metric: Any, share: float
) -> None:
    rng = np.random.default_rng(2)
    vectors = make_vectors(rng, 4000, 16, "none")
    options = IndexOptions(metric=metric, nprobe=40, nlist=64, hnsw_m=8, **KINDS[kind])  # type: ignore[arg-type]
    index = build_index(np.arange(4000), vectors, options)
    flat = FlatIndex.build(np.arange(4000), vectors, options)  # a graph need not reach all of them
    among = Selection(np.flatnonzero(rng.random(4000) < share))
    for query in vectors[:20]:
        assert assert_last_stage_is_native(index, query, 5, (0.05, 0.15, 0.4, 1.0), among) >= 3
        everything = (flat if kind == "hnsw" else index).search(query, 4000)
        passing = among.has(everything.ids)
        exact = index.search(query, len(among), among=among)
        np.testing.assert_array_equal(exact.ids, everything.ids[passing])
        assert exact.scores.tobytes() == everything.scores[passing].tobytes()


def test_ivf_that_fails_its_self_check_is_searched_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragcache_core.retrieval.index import ivf

    vectors = make_vectors(np.random.default_rng(0), 500, 8, "none")
    index = build_index(np.arange(500), vectors, IndexOptions(nlist=8, nprobe=8))
    for broken in (0, 1024):  # a Faiss that starts a new heap, and ours
        monkeypatch.setattr(ivf, "_NO_HEAP_INIT", broken)
        ivf._replays_exactly.cache_clear()
        assert assert_last_stage_is_native(index, vectors[0], 5, (0.3, 1.0)) == (2 if broken else 1)


def test_the_index_itself_is_left_as_it_was_by_staged_searches() -> None:
    vectors = make_vectors(np.random.default_rng(0), 1000, 8, "none")
    index = build_index(np.arange(1000), vectors, IndexOptions())
    list(index.stages(vectors[0], 5, (0.1, 1.0), Cancellation()))
    assert index.native.parallel_mode == 0
    assert index.native.ntotal == 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_search_ends_without_a_last_stage(kind: str) -> None:
    vectors = make_vectors(np.random.default_rng(0), 3000, 8, "none")
    options = IndexOptions(nprobe=40, **KINDS[kind])  # type: ignore[arg-type]
    index = build_index(np.arange(3000), vectors, options)
    cancel = Cancellation()
    stages = index.stages(vectors[0], 5, (0.05, 0.15, 0.4, 1.0), cancel)
    assert not next(stages).is_final
    cancel.cancel()
    assert not any(stage.is_final for stage in stages)


def test_stage_cuts_are_geometric_and_omit_too_small_stages() -> None:
    assert base.stage_cuts(None, 1e9) == base.DEFAULT_CUTS
    assert base.stage_cuts(None, 1e5) == (1.0,)
    assert base.stage_cuts(None, 2e7) == (0.4, 1.0)
    assert base.stage_cuts(None, 1e9, max_default_stages=2) == (0.05, 1.0)
    assert base.stage_cuts(None, 2e7, max_default_stages=2) == (0.4, 1.0)
    assert base.stage_cuts(1, 1e9) == (1.0,)
    assert base.stage_cuts(4, 0) == pytest.approx((0.05, 0.1357, 0.3684, 1.0), abs=1e-3)
    assert base.stage_cuts((0.2, 1), 0) == (0.2, 1.0)
