"""How fast a store is searched is learnt from its searches, and decides how they are cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import DEFAULT_CUTS, MULTIPLY_ADDS_PER_MS, stage_cuts
from ragcache_core.retrieval.threads import SearchThreads

from .conftest import make_documents


class SteppingClock:
    """A clock that goes on by ``step_s`` whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize(("search_ms", "expected"), [(1.6, (1.0,)), (2.9, (0.4, 1.0)), (8, (0.15, 0.4, 1.0))])
def test_stages_are_cut_by_the_time_they_would_take(search_ms: float, expected: tuple[float, ...]) -> None:
    for per_ms in (1e3, 1e9):
        assert stage_cuts(None, search_ms * per_ms, per_ms) == expected
    assert stage_cuts(None, 20.1 * 7, 7) == DEFAULT_CUTS


def test_a_store_that_turns_out_slow_is_cut_in_stages_and_one_that_is_fast_again_is_not(folder: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
    clock = SteppingClock()
    with DocumentStore.create(folder, index="flat", embedder=PrecomputedEmbedder(16)) as store:
        store.add(make_documents(2000), embeddings=vectors)
        store._threads.close()
        store._threads = SearchThreads(str(folder), clock)

        async def num_stages(num_searches: int) -> int:
            for _ in range(num_searches):
                updates = [update async for update in store.search_vector_staged(vectors[0], 5)]
            return len(updates)

        assert asyncio.run(num_stages(1)) == 1
        clock.step_s = 0.005  # a stage takes 5 ms: so does a search of one, and one of four takes 20
        assert asyncio.run(num_stages(40)) > 1
        clock.step_s = 0.0003
        assert asyncio.run(num_stages(40)) == 1


def test_a_slow_hnsw_store_has_two_stages_by_default_and_more_on_request(folder: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((1000, 128)).astype(np.float32)
    clock = SteppingClock()
    clock.step_s = 0.05
    with DocumentStore.create(folder, index="hnsw", embedder=PrecomputedEmbedder(128)) as store:
        store.add(make_documents(1000), embeddings=vectors)
        store._threads.close()
        store._threads = SearchThreads(str(folder), clock)

        async def num_stages(stages: tuple[float, ...] | None) -> int:
            return len([update async for update in store.search_vector_staged(vectors[0], 5, stages=stages)])

        for _ in range(40):
            by_default = asyncio.run(num_stages(None))
        assert by_default == 2
        assert asyncio.run(num_stages((0.1, 0.2, 0.5, 1.0))) == 4


def test_a_search_that_is_left_early_is_not_learnt_from(folder: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    clock = SteppingClock()
    clock.step_s = 0.01
    with DocumentStore.create(folder, index="flat", embedder=PrecomputedEmbedder(8)) as store:
        store.add(make_documents(500), embeddings=vectors)
        store._threads.close()
        store._threads = SearchThreads(str(folder), clock)

        async def leave() -> None:
            updates = store.search_vector_staged(vectors[0], 5, stages=4)
            assert not (await anext(updates)).is_final
            await updates.aclose()

        asyncio.run(leave())
        assert store._threads._pace.multiply_adds_per_ms == MULTIPLY_ADDS_PER_MS
