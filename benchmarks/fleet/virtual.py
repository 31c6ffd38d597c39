"""Fleets in virtual time, beside one cache as large as all of theirs and beside routers that know less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.simulated import simulate_runs
from benchmarks.simulated.laboratory import LabOptions, Routing
from ragcache_core.bench.summary import Estimate
from ragcache_core.reports.plots import Plot, beside, lines
from ragcache_core.sim.sweep import SweepRun
from ragcache_core.sim.sweep import plan as plan_runs
from ragcache_core.sim.traces.trace import Trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

LOAD = 0.8
OTHERS: tuple[Routing, ...] = ("round-robin", "power-of-two", "hash", "bounded", "vllm-router")
_BY_DOCUMENTS: tuple[Routing, ...] = ("hash", "bounded", "vllm-router")
CURVE = (1, 2, 4, 8, 16, 32, 64)
CURVE_PICTURE = Path("build/bench-fleet-curve.png")
_FITTED_FROM = 8
_PER_PROMPT = 2
"""Documents in each prompt of mmlu."""
_MILLION = 1_000_000
_FIRST_SEED = 201  # the rule was chosen on seed 101
_WARM_UP, _MEASURED = 200, 150
"""Requests a replica."""
_IDLE_RPS = 1e-3
_OPTIONS = LabOptions(order="cache_aware")

Summary = dict[str, Any]


def measure(workload: str, num_replicas: int) -> Callable[[BenchmarkPlan], Part]:
    """Return the part that compares every way to choose a replica on one workload."""

    def part(plan: BenchmarkPlan) -> Part:
        num_seeds = plan.sized(3 if num_replicas <= 8 else 1, 1)
        seeds = [_FIRST_SEED + plan.seed + i for i in range(num_seeds)]
        found = [compare(plan, workload, num_replicas, seed, OTHERS, is_light_too=True) for seed in seeds]
        key = f"{workload}_{num_replicas}"
        hits = [of["joint"]["token_hit_rate"] / of["pooled"]["token_hit_rate"] for of in found]
        figures = (
            _figure(f"{key}_hit_of_pooled", hits, _hits(found)),
            _figure(f"{key}_busiest", [of["joint"]["busiest_over_mean"] for of in found], "seconds, over the mean"),
            _ttft(f"{key}_ttft_ratio", found),
            _ttft(f"{key}_light_ttft_ratio", [of["light"] for of in found]),
        )
        warm_up = f"{plan.sized(_WARM_UP, 40)} requests a replica; {num_seeds} seeds at {LOAD:g} of capacity"
        return Part(warm_up, figures, {"runs": found})

    return part


def measure_curve(plan: BenchmarkPlan) -> Part:
    """Let a fleet grow: what is found beside one cache as large as all, and what it serves, on mmlu.

    Draws ``build/bench-fleet-curve.png`` as well. Beyond the largest that is simulated, the share that is not found and
    the requests of a replica go on as powers of the number of replicas, fitted to fleets of 8 and more.
    """
    rows: list[dict[str, Any]] = []
    for num_replicas in CURVE if not plan.is_quick else CURVE[:3]:
        of = compare(plan, "mmlu", num_replicas, _FIRST_SEED + plan.seed, ("round-robin", "vllm-router"))
        rows.append({"replicas": num_replicas, **of})
    CURVE_PICTURE.parent.mkdir(exist_ok=True)
    curve_plot(rows).save_png(CURVE_PICTURE)
    fitted = [row for row in rows if row["replicas"] >= _FITTED_FROM or plan.is_quick]
    missed = _power([(row["replicas"], 1 - row["joint"]["token_hit_rate"]) for row in fitted])
    served = _power([(row["replicas"], row["rate_rps"] / row["replicas"]) for row in fitted])
    enough = (num for num in range(1, _MILLION) if num * served(num) * 60 * _PER_PROMPT >= _MILLION)
    for_a_million = next(enough, _MILLION)
    last = rows[-1]
    figures = (
        Figure("curve_hit_rate", round(last["joint"]["token_hit_rate"], 4), note=f"of {last['replicas']} replicas"),
        Figure(
            "curve_documents_per_minute",
            round(60 * _PER_PROMPT * last["rate_rps"]),
            note=f"of {last['replicas']} replicas at {LOAD:g} of capacity, two in each prompt",
        ),
        Figure("extrapolated_1000_hit_rate", round(1 - missed(1_000), 4), note="of 1,000 replicas: not simulated"),
        Figure(
            "extrapolated_1000_documents_per_minute",
            round(60 * _PER_PROMPT * 1_000 * served(1_000)),
            note="of 1,000 replicas: not simulated",
        ),
        Figure("extrapolated_replicas_for_a_million", for_a_million, note="documents a minute: not simulated"),
    )
    return Part(f"{plan.sized(_WARM_UP, 40)} requests a replica", figures, {"rows": rows})


def curve_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Return document tokens found and mean TTFT against the number of replicas, as :func:`compare` has them."""
    names = {"joint": "a Fleet", "vllm-router": "vllm-router, cache_aware", "round-robin": "round robin"}

    def points(key: str, of: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
        return {shown: [(row["replicas"], row[name][key]) for row in rows] for name, shown in of.items()}

    found = {"pooled": "one cache as large as all", **names}
    hits = lines("Found", "replicas", "share of document tokens", points("token_hit_rate", found), log_x=True)
    ttft = lines("TTFT", "replicas", "mean TTFT, s", points("mean_ttft_s", names), log_x=True, log_y=True)
    note = f"mmlu, {LOAD:g} of what the replicas would serve if together they were one cache; virtual time"
    return beside("A fleet that grows", [hits, ttft], note)


def _power(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return the power of x that is nearest to these points, on logarithmic scales."""
    x, y = zip(*points, strict=True)
    slope, offset = np.polyfit(np.log(x), np.log(y), 1)
    return lambda x: float(np.exp(offset + slope * np.log(x)))


def compare(
    plan: BenchmarkPlan,
    workload: str,
    num_replicas: int,
    seed: int,
    others: Sequence[Routing],
    *,
    is_light_too: bool = False,
) -> dict[str, Any]:
    """Return the summaries of a fleet's choice, of the others, of the pooled cache, and how requests arrived.

    ``pooled`` is one cache as large as those of all replicas, asked one request after another. Capacity is what the
    replicas would serve if each prompt cost what it does there; requests arrive at :data:`LOAD` of it. With
    ``is_light_too``, ``light`` is the same at that share of what they would serve if each prompt cost what it does with
    the other choice that finds most, beside those that go by documents: at the first load, none of them may keep up.
    """
    warm_up, measured = plan.sized(_WARM_UP, 40), plan.sized(_MEASURED, 40)
    trace = make_trace(WORKLOADS[workload], num_replicas * (warm_up + measured), seed)
    trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))  # a first token each, as TTFT counts
    options = replace(_OPTIONS, warm_up=num_replicas * warm_up)
    larger = {name: num_replicas * getattr(options, name) for name in ("gpu_tokens", "host_tokens")}
    name = f"{workload}, {num_replicas} replicas, seed {seed}"
    (pooled,) = _run(plan, f"{name}: one cache", trace.with_rate(_IDLE_RPS), [replace(options, **larger)])

    def at(capacity_s: float, others: Sequence[Routing]) -> dict[str, Any]:
        routings: tuple[Routing, ...] = ("joint", *others)
        fleets = [replace(options, replicas=num_replicas, routing=routing) for routing in routings]
        rate_rps = LOAD * num_replicas * pooled["num_requests"] / capacity_s
        found = _run(plan, f"{name}, {rate_rps:.1f} requests/s", trace.with_rate(rate_rps), fleets)
        return {"rate_rps": rate_rps, **dict(zip(routings, found, strict=True))}

    found = at(pooled["prefill_s"], others)
    light = at(min(found[other]["prefill_s"] for other in others), _BY_DOCUMENTS) if is_light_too else {}
    return {"pooled": pooled, **found, "light": light}


def _run(plan: BenchmarkPlan, name: str, trace: Trace, options: Sequence[LabOptions]) -> list[Summary]:
    with TemporaryDirectory(prefix="ragcache-fleet-") as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(trace, path)
        runs: list[SweepRun] = [run for each in options for run in plan_runs([path], each)]
        done = simulate_runs(plan, name, runs, len(trace) * len(runs))
    return [dict(run.summary) for run in done]


def _figure(key: str, values: Sequence[float], note: str) -> Figure:
    of = Estimate.of(values)
    spread = "" if of.low is None or of.high is None else f" [{of.low:.3f}, {of.high:.3f}] of {len(values)} seeds"
    return Figure(key, round(of.mean, 4), baseline=1.0, note=f"{note}{spread}")


def _ttft(key: str, found: Sequence[dict[str, Any]]) -> Figure:
    ours = [of["joint"]["mean_ttft_s"] for of in found]
    best = [min((of[name]["mean_ttft_s"], name) for name in OTHERS if name in of) for of in found]
    names = " and ".join(sorted({name for _, name in best}))
    note = f"{fmean(ours):.3f} s against {fmean(seconds for seconds, _ in best):.3f} s, {names}"
    return _figure(key, [mine / seconds for mine, (seconds, _) in zip(ours, best, strict=True)], note)


def _hits(found: Sequence[dict[str, Any]]) -> str:
    values = [fmean(of[name]["token_hit_rate"] for of in found) for name in ("joint", "pooled")]
    return "{:.3f} against {:.3f} of one cache as large as all".format(*values)
