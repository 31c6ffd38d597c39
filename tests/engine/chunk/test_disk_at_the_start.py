"""What an engine does at its start with the disk of chunks, and with what older ones left there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.config import ChunkReuse
from ragcache_core.errors import CacheLockedError, ConfigError
from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.tree import KnowledgeTree
from ragcache_core.vllm_plugin.chunks import build
from ragcache_core.vllm_plugin.chunks.build import open_disk
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.page_layout import LayerShape
from ragcache_core.vllm_plugin.chunks.storage.host_pool import ChunkMemory, PagesPlace
from ragcache_core.vllm_plugin.settings import PluginSettings

T, NUM_PAGES = 16, 4


class Start:
    """Starts engines on one directory, as far as their chunks go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: list[Any] = []

    def __call__(self, *, num_workers: int = 1, **settings: Any) -> ChunkManager:
        workers = [
            ChunkMemory(layers=[LayerShape(2, 8)], dtype=torch.float32, tokens_per_page=T, num_pages=NUM_PAGES)
            for _ in range(num_workers)
        ]
        cost = PrefillCostModel.default()
        ranks = ChunkEviction(KnowledgeTree(make_policy("lru", cost)), cost)
        library = ChunkManager(ranks, num_pages=NUM_PAGES, tokens_per_page=T, max_variants=5)
        self._opened += [library, *workers]
        given = {"disk_bytes": 1 << 20, "directory": self.directory, "chunk_reuse": ChunkReuse(share=1.0)}
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0), cache_config=SimpleNamespace(block_size=T)
        )
        open_disk(library, [each.place for each in workers], PluginSettings(**{**given, **settings}), config)
        return library

    def close(self) -> None:
        for each in self._opened:
            each.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(build, "chunk_identity", lambda _: {"weights": "ours"})
    started = Start(tmp_path)
    yield started
    started.close()


def test_an_engine_that_served_before_goes_on_without_a_disk_that_it_can_no_longer_have(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start().is_disk_down
    with pytest.raises(CacheLockedError):
        start()
    with pytest.raises(ConfigError, match="key cannot be read"):
        start(disk_key_file=start.directory / "key")
    monkeypatch.setenv(STARTED_AGAIN_ENV, "1")
    for without in (start(), start(disk_key_file=start.directory / "key")):
        assert without.is_disk_down
        ids = list(range(T))
        assert without.reserve(b"k" * 32, ids, b"c" * 32, "r", inherits=0.0) is not None
        without.release("r")
        assert without.num_used_pages == 0, "workers fill them in the order in which they are told"


def test_workers_on_several_hosts_keep_no_chunks_on_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PagesPlace, "map", lambda _: None)
    assert start(num_workers=2).report()["disk_capacity_tokens"] == 0
    assert "RC-WORKERS-APART" in plugin_log.text


def test_what_each_of_several_workers_once_kept_is_deleted_and_named(
    start: Start, plugin_log: pytest.LogCaptureFixture
) -> None:
    places = [
        (folder, holds) for folder in ("worker-0", "worker-1", "") for holds in ("chunks", "statistics of chunks")
    ]
    paths = []
    for folder, holds in places:
        identity = {"weights": "others", "holds": holds}
        with ChunkStore(start.directory / folder, identity, chunk_bytes=4096, capacity_bytes=1 << 16) as store:
            paths.append(store.path)
    assert not start(num_workers=2).is_disk_down
    assert [path.exists() for path in paths] == [False, False, False, False, True, True]
    assert plugin_log.text.count("RC-OLD-CACHE-DELETED") == 4
