"""Host memory that holds no block of the model's KV: an engine goes on without, unless somebody asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.errors import EngineStartError
from tests.conftest import DEMO_MODEL, ENGINE_ARGS

MIB = 1 << 20
BLOCK = 512
"""Tokens of a block, which needs 2 MiB with this model."""


def launch(log_path: Path, **settings: Any) -> Engine:
    cache = CacheConfig(kv_cache_bytes=16 * MIB, block_size=BLOCK, **settings)
    return Engine.launch(str(DEMO_MODEL), log_path=log_path, **{**ENGINE_ARGS, "cache": cache})


def test_an_engine_whose_default_of_host_memory_holds_no_block_goes_on_without_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.config._default_host_bytes", lambda kv_bytes, memory: MIB)
    monkeypatch.setattr(CacheConfig, "most_host_bytes", lambda self: MIB)
    log_path = tmp_path / "server.log"
    with launch(log_path) as engine:
        prompt = "The river Mel ends in the lake of Tar. " * 60
        first, again = (engine.generate(prompt, max_tokens=4) for _ in range(2))
        assert first.text == again.text
        assert again.stats.num_gpu_tokens == BLOCK
        assert [tier.name for tier in engine.stats().tiers] == ["gpu"]
    assert (
        log_path.read_text(encoding="utf-8", errors="replace").count("RAGCache keeps nothing in host memory: its") == 1
    )


def test_host_memory_that_somebody_chose_and_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EngineStartError, match=r"host_bytes is 1048576, a block of KV of this model needs 2097152: raise"
    ):
        launch(tmp_path / "server.log", host_bytes=MIB)
