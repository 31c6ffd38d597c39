"""A search returns k documents, or all that there are: whatever the index, the metric and the filter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import Vectors
from ragcache_core.types import Document

NUM_DOCUMENTS = 900


def clustered_vectors(metric: str) -> Vectors:
    """Return vectors in 30 distant clusters, one of them large."""
    rng = np.random.default_rng(0)
    clusters = np.minimum(rng.integers(0, 60, NUM_DOCUMENTS), 29)
    vectors = rng.standard_normal((30, 8))[clusters] * 10 + rng.standard_normal((NUM_DOCUMENTS, 8)) * 0.1
    if metric == "ip":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


INDEXES: dict[str, dict[str, Any]] = {
    "flat": {"index": "flat"},
    "ivf": {"index": "ivf", "nprobe": 1},
    "sq8": {"index": "ivf", "encoding": "sq8", "nprobe": 1},
    "pq": {"index": "ivf", "encoding": "pq", "nprobe": 1},
    "hnsw": {"index": "hnsw", "hnsw_m": 2, "ef_construction": 1, "ef_search": 1},
}
FILTERS: dict[str, Any] = {
    "none": None,
    "expression": {"even": True},
    "function": lambda document: document.metadata["even"],
}


@pytest.fixture(params=INDEXES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], tuple[DocumentStore, Vectors]]:
    def make_store(metric: Any) -> tuple[DocumentStore, Vectors]:
        vectors = clustered_vectors(metric)
        documents = [Document(f"d{i}", f"text {i}", {"even": i % 2 == 0}) for i in range(NUM_DOCUMENTS)]
        store = DocumentStore.create(
            tmp_path / "store", embedder=PrecomputedEmbedder(), metric=metric, **INDEXES[request.param]
        )
        store.add(documents, embeddings=vectors)
        store.delete([f"d{i}" for i in range(100)])
        return store, vectors

    return make_store


@pytest.mark.parametrize("where", FILTERS)
@pytest.mark.parametrize("metric", ["l2", "ip"])
async def test_a_search_finds_k_documents_or_all_that_match(
    make: Callable[[str], tuple[DocumentStore, Vectors]], metric: str, where: str
) -> None:
    store, vectors = make(metric)
    with store:
        num_matching = (NUM_DOCUMENTS - 100) // (1 if where == "none" else 2)
        for query in vectors[100:200:50]:
            for k in (1, 40, 300, 400, 800, 5000):
                once = store.search_vector(query, k, where=FILTERS[where])
                assert len(once.documents) == min(k, num_matching)
                assert list(once.scores) == sorted(once.scores, reverse=metric == "ip")
                async with aclosing(store.search_vector_staged(query, k, stages=3, where=FILTERS[where])) as updates:
                    last = [update async for update in updates][-1]
                assert last.is_final
                assert (last.documents, last.scores) == (once.documents, once.scores)
