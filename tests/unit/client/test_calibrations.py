"""What was measured of chunk reuse: on disk, at a launch, and in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragcache_core import CacheConfig, ChunkReuse
from ragcache_core.chunk import AlphaPoint
from ragcache_core.client.launch import launch
from ragcache_core.client.launch.arguments import cache_arguments, check_worker
from ragcache_core.config import ChunkReuseRequest
from ragcache_core.errors import ConfigError
from ragcache_core.profiles.calibration import (
    Calibration,
    calibration_path,
    find_calibration,
    load_calibration,
    save_calibration,
)
from ragcache_core.vllm_plugin.settings import PluginSettings

POINTS = (AlphaPoint(0.5, 0.7, 0.1, 20), AlphaPoint(1.0, 0.9, 0.2, 20), AlphaPoint(2.0, 0.95, 0.4, 20))
CALIBRATION = Calibration("model-1", "whole_chunks", 1.0, "2030-01-01T00:00:00+00:00", POINTS)


@pytest.fixture(autouse=True)
def _data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / name))


def transfer_config(cache: CacheConfig, **settings: Any) -> dict[str, Any]:
    arguments = cache_arguments(cache, engine_id="ragcache-1-2-ab", **settings)
    read: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return read


# On disk


def test_what_is_saved_is_found_and_loaded() -> None:
    assert find_calibration("org/model", "whole_chunks") is None
    save_calibration(CALIBRATION, calibration_path("org/model", "whole_chunks"))
    path = find_calibration("org/model", "whole_chunks")
    assert path is not None
    assert load_calibration(path) == CALIBRATION
    assert find_calibration("org/model", "cache_craft") is None
    assert find_calibration("org/other", "whole_chunks") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        json.dumps({**CALIBRATION.to_dict(), "format": 99}).encode(),
        json.dumps({**CALIBRATION.to_dict(), "selection": "best"}).encode(),
        json.dumps({**CALIBRATION.to_dict(), "max_recompute": 2}).encode(),
        json.dumps({**CALIBRATION.to_dict(), "points": [{"alpha": 1}]}).encode(),
        json.dumps({**CALIBRATION.to_dict(), "points": [{"alpha": -1, "quality": 1, "recomputed": 0}]}).encode(),
    ],
)
def test_a_damaged_file_is_refused_with_the_hint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.json cannot be used .*: run 'ragcache calibrate' again"):
        load_calibration(tmp_path / "c.json")


# At a launch


def test_an_unmeasured_quality_is_rejected_at_launch() -> None:
    with pytest.raises(ConfigError, match="run 'ragcache calibrate', or give alpha"):
        launch._alphas("org/model", ChunkReuse(quality=0.9))
    assert launch._alphas("org/model", ChunkReuse(alpha=0.9)) == ()
    assert launch._alphas("org/model", None) == ()


def test_what_was_measured_with_another_budget_does_not_count() -> None:
    save_calibration(CALIBRATION, calibration_path("org/model", "whole_chunks"))
    with pytest.raises(ConfigError, match=r"max_recompute is 0\.3, .* was measured with 1"):
        launch._alphas("org/model", ChunkReuse(quality=0.9, max_recompute=0.3))
    assert launch._alphas("org/model", ChunkReuse(max_recompute=0.3)) == ()


def test_memory_is_shared_between_chunks_and_exact_documents_within_what_was_given(tmp_path: Path) -> None:
    cache = CacheConfig(
        host_bytes=1001, disk_bytes=2001, directory=tmp_path, chunk_reuse=ChunkReuse(share=0.25, quality=0.9)
    )
    transfer = transfer_config(cache, alphas=POINTS)
    extra = transfer["kv_connector_extra_config"]
    settings = PluginSettings.from_extra_config(extra)
    assert settings.for_chunks() == (250, 500)
    assert (settings.directory, settings.chunk_reuse, settings.points) == (tmp_path, cache.chunk_reuse, POINTS)
    assert extra["cpu_bytes_to_use"] == 751
    assert extra["secondary_tiers"][0]["capacity_bytes"] == 1501
    assert transfer["kv_connector"] == "ChunkRAGCacheConnector"


def test_without_chunk_reuse_a_launch_says_no_word_of_it() -> None:
    arguments = cache_arguments(CacheConfig(host_bytes=1000), engine_id="ragcache-1-2-ab")
    assert "chunk" not in " ".join(arguments)
    assert arguments[arguments.index("--worker-cls") + 1] == "ragcache_core.vllm_plugin.worker.SeededWorker"
    with_it = cache_arguments(CacheConfig(host_bytes=1000, chunk_reuse={}), engine_id="ragcache-1-2-ab")
    assert with_it[with_it.index("--worker-cls") + 1] == "ragcache_core.vllm_plugin.worker.RAGCacheWorker"


@pytest.mark.parametrize("given", [["--worker-cls", "mine"], ["--worker-cls=mine"], ["--worker_cls", "mine"]])
def test_another_worker_beside_chunk_reuse_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        check_worker(CacheConfig(chunk_reuse={}), given)
    check_worker(CacheConfig(), given)
    check_worker(None, given)


# In the engine


def of_engine(**reuse: Any) -> PluginSettings:
    return PluginSettings(chunk_reuse=reuse, points=POINTS)


def test_a_request_gets_the_alpha_it_asks_for_or_the_engines() -> None:
    settings = of_engine(alpha=0.4)
    assert settings.alpha_for(ChunkReuseRequest()) == 0.4
    assert settings.alpha_for(ChunkReuseRequest(alpha=3.0)) == 3.0
    assert settings.alpha_for(ChunkReuseRequest(quality=0.9)) == 1.0
    assert settings.alpha_for(ChunkReuseRequest(selection="cache_craft")) == 1.0, "the engine's is of another selection"
    assert of_engine().alpha_for(ChunkReuseRequest()) == 1.7
    assert of_engine().alpha_for(ChunkReuseRequest(selection="cache_craft")) == 1.0
    assert of_engine(quality=0.7).alpha_for(ChunkReuseRequest()) == 0.5


@pytest.mark.parametrize(
    "asked",
    [
        ChunkReuseRequest(quality=0.99),
        ChunkReuseRequest(quality=0.9, selection="cache_craft"),
        ChunkReuseRequest(quality=0.9, max_recompute=0.1),
    ],
)
def test_a_quality_that_was_not_measured_so_is_answered_exactly(asked: ChunkReuseRequest) -> None:
    assert of_engine().alpha_for(asked) is None
