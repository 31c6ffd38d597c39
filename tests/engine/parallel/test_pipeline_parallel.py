"""A model whose layers two workers share unevenly: all tiers where the first has more, none below the GPU otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragcache_core import CacheConfig
from tests.engine.parallel.scene import BLOCK, ask, documents, empty_the_gpu, launched, log_of

LAYER_BYTES = 32 << 10
"""Of a block's keys and values."""
MARKS = [f"stage {i}" for i in range(8)]


TWO_STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    # vLLM for the CPU warms up what is compiled alone, and a second stage gets its buffers then.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


def cache(folder: Path) -> CacheConfig:
    """Return GPU memory for six prompts of two documents on a stage of three layers, and host memory for three."""
    return CacheConfig(
        kv_cache_bytes=3 * 72 * LAYER_BYTES,
        block_size=BLOCK,
        host_bytes=6 * 40 * LAYER_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
    )


def test_a_first_stage_with_more_layers_has_every_tier_and_the_same_answers(tmp_path: Path) -> None:
    env = {"VLLM_PP_LAYER_PARTITION": "3,1"}
    with launched(tmp_path, cache(tmp_path), env, **TWO_STAGES) as engine:
        answers = {mark: ask(engine, documents(mark))[0] for mark in MARKS}
        served = {"gpu": 0, "host": 0, "disk": 0}
        for asked in (MARKS, MARKS[::-1], MARKS[::-1]):
            for mark in asked:
                text, stats = ask(engine, documents(mark))
                assert text == answers[mark]
                served["gpu"] += stats.num_gpu_tokens or 0
                served["host"] += stats.num_host_tokens or 0
                served["disk"] += stats.num_disk_tokens or 0
            empty_the_gpu(engine)
        assert all(served.values()), f"each tier serves some of it: {served}"
        assert "keeps nothing" not in log_of(engine)


def test_a_later_stage_with_more_layers_leaves_gpu_memory_alone_and_reports_it_once(tmp_path: Path) -> None:
    env = {"VLLM_PP_LAYER_PARTITION": "1,3"}
    with launched(tmp_path, cache(tmp_path), env, **TWO_STAGES) as engine:
        answers = {mark: ask(engine, documents(mark))[0] for mark in MARKS[:2]}
        for mark, answer in answers.items():
            text, stats = ask(engine, documents(mark))
            assert text == answer
            assert (stats.num_gpu_tokens or 0) >= stats.num_prompt_tokens - 2 * BLOCK
        assert [tier.name for tier in engine.stats().tiers] == ["gpu"]
        log = log_of(engine)
    takes = f"a block of KV takes {LAYER_BYTES}, {3 * LAYER_BYTES} bytes on the workers"
    assert log.count(f"RAGCache keeps nothing below the GPU: {takes}") == 1
