"""Fleets in virtual time, beside one cache as large as all of theirs and beside routers that know less."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.sweep import FinishedRun, Journal, Run, run_all
from ragcache_core.sim.sweep import plan as plan_runs
from ragcache_core.sim.traces.trace import Trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from tests.benchmarks.report import Figure, Part, Plan

LOAD = 0.8
SIMPLE_ROUTINGS = ("round-robin", "hash", "bounded")
CURVE = (1, 2, 4, 8, 16, 32, 64)
_FIRST_SEED = 201  # the rule was chosen on seed 101
_WARM_UP, _MEASURED = 300, 300
_IDLE_RPS = 1e-3
_OPTIONS = SimulationOptions(order="cache_aware")

Summary = dict[str, Any]


def measure(workload: str, num_replicas: int) -> Callable[[Plan], Part]:
    """Return the part that compares every way to choose a replica on one workload."""

    def part(plan: Plan) -> Part:
        seeds = plan.sized(2 if num_replicas <= 8 else 1, 1)
        found = [
            compare(plan, workload, num_replicas, _FIRST_SEED + plan.seed + i, (*SIMPLE_ROUTINGS, "joint"))
            for i in range(seeds)
        ]
        key = f"{workload}_{num_replicas}"
        hits = [of["joint"]["token_hit_rate"] / of["pooled"]["token_hit_rate"] for of in found]
        best = [min(of[name]["mean_ttft_s"] for name in SIMPLE_ROUTINGS) for of in found]
        ttft = [of["joint"]["mean_ttft_s"] for of in found]
        busiest = fmean(of["joint"]["busiest_over_mean"] for of in found)
        figures = (
            Figure(f"{key}_hit_of_pooled", round(fmean(hits), 4), baseline=1.0, note=_hits(found)),
            Figure(f"{key}_busiest", round(busiest, 3), baseline=1.0, note="seconds of the busiest over the mean"),
            Figure(
                f"{key}_ttft_ratio",
                round(fmean(a / b for a, b in zip(ttft, best, strict=True)), 4),
                baseline=1.0,
                note=f"{fmean(ttft):.3f} s against {fmean(best):.3f} s, the best of {', '.join(SIMPLE_ROUTINGS)}",
            ),
        )
        warm_up = f"{plan.sized(_WARM_UP, 40)} requests a replica; {seeds} seeds at {LOAD:g} of capacity"
        return Part(warm_up, figures, {"runs": found})

    return part


def measure_curve(plan: Plan) -> Part:
    """Let a fleet grow: hit rate beside one large cache's, and what it serves, on mmlu."""
    rows = []
    for num_replicas in CURVE if not plan.is_quick else CURVE[:3]:
        of = compare(plan, "mmlu", num_replicas, _FIRST_SEED + plan.seed, ("bounded", "joint"))
        rows.append({"replicas": num_replicas, **of})
    last = rows[-1]
    per_minute = 60 * 2 * last["rate_rps"]
    figures = (
        Figure("curve_hit_rate", round(last["joint"]["token_hit_rate"], 4), note=f"of {last['replicas']} replicas"),
        Figure("curve_documents_per_minute", round(per_minute), note=f"at {LOAD:g} of capacity, two in each prompt"),
    )
    return Part(f"{plan.sized(_WARM_UP, 40)} requests a replica", figures, {"rows": rows})


def compare(plan: Plan, workload: str, num_replicas: int, seed: int, routings: Sequence[str]) -> dict[str, Any]:
    """Return the summary of each routing, of the pooled cache, and the rate at which requests arrived.

    ``pooled`` is one cache as large as those of all replicas, asked one request after another. Capacity is what the
    replicas would serve if each prompt cost what it does there; requests arrive at :data:`LOAD` of it.
    """
    warm_up, measured = plan.sized(_WARM_UP, 40), plan.sized(_MEASURED, 40)
    trace = make_trace(WORKLOADS[workload], num_replicas * (warm_up + measured), seed)
    trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))  # a first token each, as TTFT counts
    options = replace(_OPTIONS, warm_up=num_replicas * warm_up)
    larger = {name: num_replicas * getattr(options, name) for name in ("gpu_tokens", "host_tokens")}
    name = f"{workload}, {num_replicas} replicas, seed {seed}"
    (pooled,) = _run(plan, f"{name}: one cache", trace.with_rate(_IDLE_RPS), [replace(options, **larger)])
    rate_rps = LOAD * num_replicas * pooled["num_requests"] / pooled["prefill_s"]
    fleets = [replace(options, replicas=num_replicas, routing=routing) for routing in routings]  # type: ignore[arg-type]  # ours
    found = _run(plan, name, trace.with_rate(rate_rps), fleets)
    return {"rate_rps": rate_rps, "pooled": pooled, **dict(zip(routings, found, strict=True))}


def _run(plan: Plan, name: str, trace: Trace, options: Sequence[SimulationOptions]) -> list[Summary]:
    num_done = 0

    def count(num_requests: int) -> None:
        nonlocal num_done
        num_done += num_requests
        plan.report(f"{name}: {num_done / len(trace) / len(options):.0%}")

    with TemporaryDirectory(prefix="ragcache-fleet-") as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(trace, path)
        runs: list[Run] = [run for each in options for run in plan_runs([path], each)]
        journal = None if plan.kept_at is None else Journal(plan.kept_at)
        keep: Callable[[FinishedRun], None] = (lambda _: None) if journal is None else journal.append
        finished = {} if journal is None else journal.read()
        done = run_all(runs, jobs=os.cpu_count() or 1, finished=finished, keep=keep, report=count)
    return [dict(run.summary) for run in done]


def _hits(found: Sequence[dict[str, Any]]) -> str:
    values = [fmean(of[name]["token_hit_rate"] for of in found) for name in ("joint", "pooled")]
    return "{:.3f} against {:.3f} of one cache as large as all".format(*values)
