"""The engines of a comparison: identical in all settings but the cache; and the options of a comparison."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.bench import comparison
from ragcache_core.bench.comparison import Amounts, Session, measure
from ragcache_core.bench.engines import BASELINES, Setup
from ragcache_core.bench.options import BenchOptions, prepare
from ragcache_core.bench.prompts import TracedPrompts
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.stats import ChunkStats
from tests.support.scripted_server import THREE_TIERS, Reply, ScriptedServer, Seen

SETUP = Setup("model", "float32", 40 << 20, 32, 2_048, vllm_args=("--seed", "1"))
SMALL = BenchOptions(compare=("vllm", "ragcache"), seeds=1, requests=4, warm_up=2, rates=(1.0, 2.0), are_shares=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``Engine.launch`` was told, instead of an engine."""
    seen: list[dict[str, Any]] = []

    def launch(model: str, **settings: Any) -> AbstractContextManager[None]:
        seen.append({"model": model, **settings})
        return nullcontext()

    monkeypatch.setattr(Engine, "launch", launch)
    return seen


def test_all_engines_get_the_same_model_memory_and_batches(launched: list[dict[str, Any]], tmp_path: Path) -> None:
    for baseline in BASELINES.values():
        baseline.launch(SETUP, 64 << 20, tmp_path)
    for settings in launched:
        ours = isinstance(settings["cache"], CacheConfig)
        assert settings["max_restarts"] == 0
        assert (settings["cache"].kv_cache_bytes if ours else settings["kv_cache_memory_bytes"]) == 40 << 20
        assert (settings["cache"].block_size if ours else settings["block_size"]) == 32
    differ = ("cache", "kv_cache_memory_bytes", "block_size", "enable_prefix_caching")
    shared = [{name: value for name, value in settings.items() if name not in differ} for settings in launched]
    assert all(settings == shared[0] for settings in shared)
    assert shared[0]["max_model_len"] == 2_048


def test_each_engine_is_what_its_name_says(launched: list[dict[str, Any]], tmp_path: Path) -> None:
    by_name = {}
    for name, baseline in BASELINES.items():
        baseline.launch(SETUP, 64 << 20, tmp_path)
        by_name[name] = launched[-1]
    prefix_caching = [by_name[name].get("enable_prefix_caching") for name in BASELINES]
    assert prefix_caching == [False, True, True, True, None, None, None]
    assert by_name["vllm"]["cache"] is None
    assert by_name["vllm-host-lru"]["cache"] == VLLMOffload(64 << 20, "lru")
    assert by_name["vllm-host-arc"]["cache"] == VLLMOffload(64 << 20, "arc")
    assert by_name["ragcache"]["cache"] == by_name["ragcache-cache-aware"]["cache"]
    assert by_name["ragcache"]["cache"] == CacheConfig(kv_cache_bytes=40 << 20, block_size=32, host_bytes=64 << 20)
    chunks = by_name["ragcache-chunks"]["cache"]
    assert chunks == CacheConfig(kv_cache_bytes=40 << 20, block_size=32, host_bytes=64 << 20, chunk_reuse=ChunkReuse())
    ours = ["ragcache", "ragcache-cache-aware", "ragcache-chunks"]
    assert [name for name, baseline in BASELINES.items() if baseline.is_ragcache] == ours
    assert [name for name, baseline in BASELINES.items() if not baseline.uses_host] == ["no-cache", "vllm"]
    assert "ragcache-chunks" not in BenchOptions().compare, "an approximate engine is compared where it is named"


class Silent:
    """Progress that nothing shows."""

    def plan(self, num_requests: int) -> None: ...
    def show(self, what: str) -> None: ...
    def advance(self) -> None: ...


@pytest.mark.parametrize(("name", "num_cached"), [("ragcache", 2 * 60), ("ragcache-chunks", 2 * 10)])
def test_what_chunk_reuse_computes_on_the_way_is_not_cached(
    name: str, num_cached: int, demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells of it as of cached tokens; the engine's counters know what was read."""
    monkeypatch.setattr(comparison, "_LAST_STEP_S", 0.0)  # the server's counters stay as they are
    chunks: dict[str, Any] = {**dict.fromkeys((each.name for each in fields(ChunkStats)), 0), "kinds": []}
    trace = Trace.from_requests(TracedRequest(0.0, ("a", "b"), (40, 30), 8, 1) for _ in range(2))

    def reusing(seen: Seen) -> Reply | None:
        if "prompt" not in seen.body:
            return None
        chunks["num_reused_tokens"] += 10
        return Reply("x", num_cached_tokens=60)

    cache = {**THREE_TIERS, "chunks": chunks}
    with (
        ScriptedServer(cache=cache, rules=[reusing]) as server,
        Engine.connect(server.url) as engine,
    ):
        session = Session(BASELINES[name], 1, 0, (0,))
        prompts = TracedPrompts(trace, 1_024, seed=0)
        runs = list(measure(engine, session, prompts, (50.0,), Amounts(0, 2), Silent()))
    assert [run.num_cached_tokens for run in runs] == [num_cached]
    assert [set(run.tokens_by_tier) for run in runs] == [{"gpu", "host", "disk"}]


def test_a_server_that_runs_is_measured_as_it_is(demo_model: str) -> None:
    with ScriptedServer(max_model_len=200_000) as server:
        prepared = prepare(replace(SMALL, engine=server.url, scale=0.125))
        (baseline,) = prepared.comparison.baselines
        assert (baseline.name, baseline.uses_host, baseline.is_ragcache) == ("server", False, False)
        with prepared.open_engine(baseline, 0, Path()) as engine:
            assert engine.pid is None
