"""Engines under the same load with a model of 8 billion weights, each in a part of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.device.sizes import GRAPHS, model_8b
from benchmarks.engines import BLOCK_SIZE
from benchmarks.report import BenchmarkPlan, Figure, Part, PlanProgress, percentiles_ms
from ragcache_core.bench.comparison import Amounts, Session, measure
from ragcache_core.bench.engines import BASELINES, Setup
from ragcache_core.bench.options import HOST_TOKENS, KV_TOKENS, window
from ragcache_core.bench.prompts import TracedPrompts, scaled
from ragcache_core.bench.results import TimedRun
from ragcache_core.profiles.model_facts import ModelFacts
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

COMPARED = ("vllm", "vllm-host-lru", "ragcache", "ragcache-cache-aware")
_WORKLOAD = "mmlu"
_RATE_RPS = 5.0
_SMALL_SCALE = 0.05
_DTYPE_ARGS = ("--no-enforce-eager", *GRAPHS, "--load-format=dummy")


def parts() -> dict[str, Callable[[BenchmarkPlan], Part]]:
    """Return a part for each engine; plain vLLM, which the others are compared with, is the first."""
    return {f"compare-{name}": partial(_measure, name) for name in COMPARED}


def _measure(name: str, plan: BenchmarkPlan) -> Part:
    model, baseline = model_8b(plan), BASELINES[name]
    scale = _SMALL_SCALE if model.is_small else 1.0
    amounts = Amounts(plan.sized(300, 4), plan.sized(150, 4))
    num_requests = amounts.num_warm_up + amounts.num_requests
    facts = ModelFacts.read(model.path, model.dtype)
    prompts = TracedPrompts(
        scaled(make_trace(WORKLOADS[_WORKLOAD], num_requests, plan.seed), scale),
        facts.vocab_size,
        seed=plan.seed,
        num_output_tokens=plan.sized(64, 4),
    )
    kv_bytes = facts.memory_bytes(2 * KV_TOKENS, scale, BLOCK_SIZE)
    host_bytes = facts.memory_bytes(HOST_TOKENS, scale, BLOCK_SIZE) if baseline.uses_host else 0
    needed = window({plan.seed: prompts}, facts, num_requests=num_requests, kv_bytes=kv_bytes, block_size=BLOCK_SIZE)
    vllm_args = () if model.is_small else _DTYPE_ARGS
    setup = Setup(model.path, model.dtype, kv_bytes, BLOCK_SIZE, needed, 16, 8192, vllm_args=vllm_args)
    plan.report(f"compare-{name}: starting")
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-gpu-check-") as folder,
        baseline.opened(setup, host_bytes, Path(folder)) as engine,
    ):
        session = Session(baseline, host_bytes, plan.seed, (0,))
        (run,) = measure(engine, session, prompts, (_RATE_RPS,), amounts, PlanProgress(plan, f"compare-{name}"))
    return Part(f"{amounts.num_warm_up} requests", _figures(plan, name, run), run.to_dict())


def _figures(plan: BenchmarkPlan, name: str, run: TimedRun) -> tuple[Figure, ...]:
    key = f"compare_{name.replace('-', '_')}"
    note = f"{len(run.ttft_s)} requests of {_WORKLOAD} at {run.requests_per_s:g} a second, mean"
    ttft_ms, tpot_ms = (round(1e3 * fmean(times), 3) for times in (run.ttft_s, run.tpot_s))
    figures = [
        Figure(f"{key}_ttft_ms", ttft_ms, plan.found.get("compare_vllm_ttft_ms"), *percentiles_ms(run.ttft_s), note),
        Figure(f"{key}_tpot_ms", tpot_ms, plan.found.get("compare_vllm_tpot_ms"), *percentiles_ms(run.tpot_s)),
        Figure(f"{key}_cached", round(run.cached_share, 4), plan.found.get("compare_vllm_cached")),
    ]
    plain_ms = plan.found.get("compare_vllm_ttft_ms")
    if plain_ms is not None and name != COMPARED[0]:
        figures.append(Figure(f"{key}_ttft_ratio", round(plain_ms / ttft_ms, 3), 1.0, note="plain vLLM's over its own"))
    return tuple(figures)
