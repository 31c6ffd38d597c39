"""The engines of a comparison: identical in all settings but the cache; and the options of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.bench.comparison import Amounts, Session, measure
from ragcache_core.bench.engines import BASELINES, Setup
from ragcache_core.bench.options import BenchOptions, prepare
from ragcache_core.bench.prompts import TracedPrompts
from ragcache_core.bench.results import Results
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.errors import ConfigError, TraceError
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace
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
    def say(self, what: str) -> None: ...
    def advance(self) -> None: ...


@pytest.mark.parametrize(("name", "num_cached"), [("ragcache", 2 * 60), ("ragcache-chunks", 2 * 10)])
def test_what_chunk_reuse_computes_on_the_way_is_not_cached(name: str, num_cached: int, demo_model: str) -> None:
    """vLLM tells of it as of cached tokens; the engine's counters know what was read."""
    chunks: dict[str, Any] = dict.fromkeys((each.name for each in fields(ChunkStats)), 0)
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


def test_the_random_model_of_8_billion_is_loaded_without_weights_and_asked_whole_prompts(
    launched: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = replace(SMALL, model="random-8b", dtype="bfloat16", max_num_batched_tokens=8_192, vllm_args=("--seed=1",))
    prepared = prepare(options)
    with prepared.open_engine(BASELINES["ragcache"], 1 << 30, tmp_path):
        pass
    assert prepared.facts["scale"] == 1
    assert prepared.facts["kv_bytes_per_token"] == 128 << 10
    assert launched[0]["extra_args"] == ("--load-format=dummy", "--seed=1")
    assert launched[0]["max_num_batched_tokens"] == 8_192


def test_results_of_another_trace_or_version_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"

    def facts(num_tokens: int) -> Mapping[str, Any]:
        write_trace(Trace.from_requests(TracedRequest(float(i), ("a",), (num_tokens,), 9, 1) for i in range(10)), path)
        return prepare(replace(SMALL, trace=path)).facts

    out = tmp_path / "out.json"
    Results.open(out, facts(99), {}).write()
    Results.open(out, facts(99), {}, resume=True)
    with pytest.raises(ConfigError, match="measured with trace_sha256 = .* the same options, trace and version"):
        Results.open(out, facts(98), {}, resume=True)
    monkeypatch.setattr("ragcache_core.bench.options.__version__", "0.0.0")
    with pytest.raises(ConfigError, match=r"measured with ragcache_version = .*, not '0\.0\.0'"):
        Results.open(out, facts(99), {}, resume=True)


def test_a_trace_that_is_too_short_or_broken_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace.from_requests(TracedRequest(float(i), ("a",), (99,), 9, 1) for i in range(9)), path)
    with pytest.raises(ConfigError, match="has 9 requests, 10 are needed"):
        prepare(replace(SMALL, trace=path))
    assert len(prepare(replace(SMALL, trace=path, requests=3)).prompts[0]) == 8
    path.write_text('{"t": 1}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=r"trace\.jsonl:1"):
        prepare(replace(SMALL, trace=path))


def test_a_server_that_runs_is_measured_as_it_is(demo_model: str) -> None:
    with ScriptedServer(max_model_len=200_000) as server:
        prepared = prepare(replace(SMALL, engine=server.url, scale=0.125))
        (baseline,) = prepared.comparison.baselines
        assert (baseline.name, baseline.uses_host, baseline.is_ragcache) == ("server", False, False)
        with prepared.open_engine(baseline, 0, Path()) as engine:
            assert engine.pid is None
