"""Two engines behind one server: requests go where their documents are, and the server speaks for both.

The last test kills one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.errors import EngineError
from tests.engine.parallel.scene import BLOCK, QUESTION, TIMEOUT_S, ask, documents, empty_the_gpu, launched
from tests.support.asking_ahead import speculate
from tests.support.waiting import until

BLOCK_BYTES = 128 << 10
MARKS = [f"rank {i}" for i in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Engine]:
    cache = CacheConfig(
        kv_cache_bytes=96 * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=2 * 2 * 128 * BLOCK_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
        chunk_reuse=ChunkReuse(share=0.5, is_default=False),
    )
    with launched(folder, cache, extra_args=["--data-parallel-size", "2"], max_restarts=2) as running:
        yield running


def counted(engine: Engine, name: str) -> dict[str, float]:
    """Return a series by the number of the engine."""
    text = httpx.get(f"{engine.base_url.removesuffix('/v1')}/metrics", timeout=30).text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_a_request_goes_to_the_engine_that_has_its_documents(two: Engine) -> None:
    answers = {}
    for mark in MARKS:
        answers[mark], _ = ask(two, documents(mark))
    assert until(lambda: sum(counted(two, "ragcache_requests_total").values()) == len(MARKS), TIMEOUT_S)
    before = counted(two, "ragcache_requests_total")
    assert set(before) == {"0", "1"}
    assert all(before.values()), "new documents are spread over both"
    for mark in [*MARKS, *MARKS[::-1]]:
        text, stats = ask(two, documents(mark))
        assert text == answers[mark]
        assert stats.num_cached_tokens >= stats.num_prompt_tokens - 2 * BLOCK, (
            f"{mark} went where its documents are not"
        )
    assert until(lambda: sum(counted(two, "ragcache_requests_total").values()) == 3 * len(MARKS), TIMEOUT_S)
    assert counted(two, "ragcache_requests_total") == {index: 3 * count for index, count in before.items()}


def test_the_statistics_are_those_of_both(two: Engine) -> None:
    by_engine = counted(two, "ragcache_prompt_tokens_total")
    stats = two.stats()
    assert stats.num_requests == sum(counted(two, "ragcache_requests_total").values())
    assert stats.num_prompt_tokens == sum(by_engine.values())
    tiers = {tier.name: tier for tier in stats.tiers}
    assert list(tiers) == ["gpu", "host", "disk"]
    assert tiers["gpu"].capacity_bytes == 2 * 96 * BLOCK_BYTES
    assert tiers["host"].capacity_bytes == 2 * 128 * BLOCK_BYTES, "they share what the launch gave"
    assert tiers["disk"].capacity_bytes <= 64 << 20
    assert {use.doc_id for use in stats.hottest_documents} <= {d.doc_id for mark in MARKS for d in documents(mark)}


def test_each_engine_has_host_memory_and_disk_of_its_own(two: Engine) -> None:
    first = {mark: ask(two, documents(mark))[0] for mark in MARKS}
    empty_the_gpu(two)
    for mark in MARKS:
        text, stats = ask(two, documents(mark))
        assert text == first[mark]
        assert (stats.num_host_tokens or 0) + (stats.num_disk_tokens or 0) > 0, f"{mark} went to the other"


def test_each_engine_reuses_the_chunks_that_it_has(two: Engine) -> None:
    shown = documents("chunk", 4, 60)
    third = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 0.3}
    for rank in ("0", "1"):
        here: dict[str, Any] = {"extra_headers": {"X-data-parallel-rank": rank}}
        ask(two, shown, chunk_reuse={**third, "max_recompute": 1.0}, **here)
        _, stats = ask(two, [shown[3], *shown[:3]], chunk_reuse=third, **here)
        assert stats.chunk_reuse is not None
        assert stats.chunk_reuse.num_chunks >= 3
    chunks = two.stats().chunks
    assert chunks is not None
    assert chunks.num_captured_chunks >= 2 * len(shown), "each has computed them"


def test_a_confirmation_reaches_the_engine_that_speculates(two: Engine) -> None:
    before = two.stats().num_confirmed_speculations
    for i in range(2):  # whichever engine takes them
        start_speculation(two, documents(f"ahead {i}"))
    assert until(lambda: two.stats().num_confirmed_speculations == before + 2, TIMEOUT_S)


def start_speculation(engine: Engine, shown: list[Document]) -> None:
    prompt = PromptLayout().render(engine.tokenizer, shown, QUESTION)
    expected = engine.generate(prompt, max_tokens=8).text
    ahead = speculate(engine, lambda: engine.generate(prompt, max_tokens=8))
    assert engine.generate(prompt, max_tokens=8).text == expected
    assert not ahead.is_failed


def test_documents_are_ordered_by_what_any_engine_has(two: Engine) -> None:
    for mark in MARKS[:4]:
        shown = documents(mark)
        assert until(lambda shown=shown: is_brought_back(two, shown), TIMEOUT_S)


def test_the_death_of_one_engine_restarts_both_and_nothing_is_lost_below_the_gpu(two: Engine) -> None:
    answers = {mark: ask(two, documents(mark))[0] for mark in MARKS}
    first, second = cores(two)
    second.kill()

    def has_other_engines() -> bool:
        try:
            return two.stats() is not None and not {first.pid, second.pid} & {core.pid for core in cores(two)}
        except (EngineError, psutil.Error):
            return False

    assert until(has_other_engines, 2 * TIMEOUT_S)
    num_found = 0
    for rank in ("0", "1"):  # who had what is forgotten
        here: dict[str, Any] = {"extra_headers": {"X-data-parallel-rank": rank}}
        for mark in MARKS:
            text, stats = ask(two, documents(mark), **here)
            assert text == answers[mark]
            num_found += (stats.num_host_tokens or 0) + (stats.num_disk_tokens or 0) > 0
    assert num_found >= len(MARKS), "each engine finds its own again"


def cores(engine: Engine) -> list[psutil.Process]:
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    return [p for p in children if "EngineCore_DP" in " ".join([p.name(), *p.cmdline()])]


def is_brought_back(engine: Engine, shown: list[Document]) -> bool:
    """Return whether documents in the reverse order are put back into the one in which they were asked about."""
    return engine.arrange_documents(shown[::-1], "cache_aware").documents == tuple(shown)
