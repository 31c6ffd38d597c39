"""A model that two workers share: the same answers from every tier and with reused chunks, also after one has died.

One engine for all; the last test kills one of its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ragcache_core import CacheConfig
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.errors import EngineError
from tests.engine.parallel.scene import BLOCK, TIMEOUT_S, ask, documents, empty_the_gpu, launched, log_of
from tests.support.waiting import until

BLOCK_BYTES = 64 << 10
"""Of each of the two."""
MARKS = [f"tier {i}" for i in range(10)]
_ALL: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 1.0}
_THIRD: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 0.3}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose GPU holds six prompts of two documents, and whose host memory holds two, beside chunks."""
    folder = tmp_path_factory.mktemp("both")
    cache = CacheConfig(
        kv_cache_bytes=72 * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=128 * BLOCK_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
        chunk_reuse=ChunkReuse(share=0.5, is_default=False),
    )
    with launched(folder, cache, tensor_parallel_size=2, max_restarts=2) as running:
        yield running


def workers(engine: Engine) -> list[psutil.Process]:
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    return [p for p in children if "Worker_TP" in " ".join([p.name(), *p.cmdline()])]


def test_every_tier_serves_the_answers_that_were_computed(both: Engine) -> None:
    assert len(workers(both)) == 2
    assert {tier.name: tier.capacity_bytes for tier in both.stats().tiers}["gpu"] == 72 * BLOCK_BYTES
    answers = {}
    served = dict.fromkeys(("gpu", "host", "disk"), 0)
    for mark in MARKS:
        answers[mark], cold = ask(both, documents(mark))
        assert cold.num_cached_tokens < 2 * BLOCK, "no more than the static prefix"
    for asked in (MARKS[::-1], MARKS, MARKS[::-1]):
        for mark in asked:
            text, stats = ask(both, documents(mark))
            assert text == answers[mark]
            assert stats.num_cached_tokens >= stats.num_prompt_tokens - 2 * BLOCK, "some tier has all of it"
            for name, count in zip(
                served, (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens), strict=True
            ):
                served[name] += count or 0
        empty_the_gpu(both)
    assert all(served.values()), f"each tier serves some of it: {served}"


def test_reused_chunks_are_those_of_both_workers(both: Engine) -> None:
    shown = documents("chunk", 4, 60)
    exact, _ = ask(both, shown[::-1])
    empty_the_gpu(both)
    ask(both, shown, chunk_reuse=_ALL)
    text, stats = ask(both, [shown[3], *shown[:3]], chunk_reuse=_THIRD)
    assert stats.chunk_reuse is not None
    assert stats.chunk_reuse.num_chunks >= 3
    assert 0 < stats.chunk_reuse.num_recomputed_tokens < stats.chunk_reuse.num_reused_tokens
    empty_the_gpu(both)
    text, stats = ask(both, shown[::-1], chunk_reuse=_ALL)
    assert text == exact, "all of it is computed, through the slices of both workers"


def test_the_death_of_a_worker_restarts_the_engine_and_nothing_wrong_is_served(both: Engine) -> None:
    answers = {mark: ask(both, documents(mark))[0] for mark in MARKS}
    first, second = workers(both)
    second.kill()

    def has_other_workers() -> bool:
        try:
            return both.stats() is not None and not {first.pid, second.pid} & {w.pid for w in workers(both)}
        except (EngineError, psutil.Error):
            return False

    assert until(has_other_workers, TIMEOUT_S * 2)
    served_by_disk = 0
    for mark in MARKS:
        text, stats = ask(both, documents(mark))
        assert text == answers[mark]
        served_by_disk += stats.num_disk_tokens or 0
    assert served_by_disk > 0, "what was on disk is there again"
    assert "has host memory of their own" not in log_of(both)
