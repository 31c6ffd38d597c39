"""Two servers of one launch, a rank each: a fleet that answers as one engine, and ends as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ragcache_core import CacheConfig, Fleet, PromptLayout
from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.engine.parallel.scene import BLOCK, QUESTION, documents

BLOCK_BYTES = 128 << 10
MARKS = [f"server {i}" for i in range(12)]  # enough for a hash to spread them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Fleet]:
    cache = CacheConfig(
        kv_cache_bytes=96 * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=2 * 128 * BLOCK_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
    )
    settings = {**ENGINE_ARGS, "cache": cache}
    with Engine.launch(
        str(DEMO_MODEL), data_parallel_size=2, log_path=folder / "server.log", env={"OMP_NUM_THREADS": "1"}, **settings
    ) as running:
        yield running


def answers(engine: Fleet | Engine) -> list[str]:
    prompts = [PromptLayout().render(engine.tokenizer, documents(mark), QUESTION) for mark in MARKS]
    return [engine.generate(prompt, max_tokens=8).text for prompt in prompts]


def test_a_launch_of_two_ranks_answers_as_one_engine(two: Fleet, folder: Path) -> None:
    assert isinstance(two, Fleet)
    first, second = two.engines
    assert first.api_key == second.api_key
    cold = answers(two)
    assert answers(two) == cold, "from the ranks' caches"
    assert min(rank.stats().num_requests for rank in two.engines) > 0, "both are asked"
    assert two.stats().num_requests == 2 * len(MARKS)
    for rank in two.engines:
        assert answers(rank) == cold, "whichever engine computed it"
    tiers = {tier.name: tier for tier in two.stats().tiers}
    assert tiers["host"].capacity_bytes == 2 * 128 * BLOCK_BYTES, "they share what the launch gave"
    assert all((folder / "kv" / f"rank-{i}").is_dir() and (folder / f"server-rank-{i}.log").is_file() for i in (0, 1))


def test_all_ranks_end_together(two: Fleet) -> None:
    pids = [engine.pid for engine in two.engines]
    assert all(pid is not None and psutil.pid_exists(pid) for pid in pids)
    two.close()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)
