"""Chunk reuse under load: response times and throughput of engines, by the machinery of ``ragcache bench``.

Requests arrive at random, whatever became of those before, and are batched as they come, at rates that are shares of
what an engine without a cache can serve (Cache-Craft §5.3, Figure 22). Engines are opened one after the other and asked
the same; as in :mod:`~benchmarks.chunks.ttft`, each has first read what comes again of a longer history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.chunks.ttft import HISTORY, HOST_BYTES, RECOMPUTED, REUSE, SCALE, condensed
from benchmarks.engines import BLOCK_SIZE
from benchmarks.report import BenchmarkPlan, Figure, Part, PlanProgress, percentiles_ms
from ragcache_core.bench.comparison import Amounts, Comparison, run_comparison
from ragcache_core.bench.engines import BASELINES, Baseline, Setup
from ragcache_core.bench.options import KV_TOKENS
from ragcache_core.bench.prompts import TracedPrompts, scaled
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.client import Engine
from ragcache_core.profiles.model_facts import ModelFacts
from ragcache_core.profiles.random_model import random_model
from ragcache_core.reports.machine import machine
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

SHARES = (0.5, 1.0, 2.0)
"""Rates, as shares of what is served without a cache."""
OUTPUT_TOKENS = 16
_BASELINE, _CHUNKS = "vllm", "ragcache-chunks"


def measure_load(plan: BenchmarkPlan) -> Part:
    """Put all engines under each rate, one engine after the other; what is finished is kept in ``plan.kept_at``."""
    num_history, num_recent, num_timed = plan.sized(HISTORY, 8), plan.sized(16, 2), plan.sized(48, 3)
    model = str(random_model())
    facts = ModelFacts.read(model, "float32")
    drawn = scaled(make_trace(WORKLOADS["sysx"], num_history + num_recent + len(SHARES) * num_timed, plan.seed), SCALE)
    trace = condensed(drawn, num_history)
    prompts = TracedPrompts(trace, facts.vocab_size, seed=plan.seed, num_output_tokens=OUTPUT_TOKENS)
    kv_bytes = facts.memory_bytes(KV_TOKENS, SCALE, BLOCK_SIZE)
    longest = max(map(prompts.num_tokens, range(len(trace))))
    setup = Setup(model, "float32", kv_bytes, BLOCK_SIZE, -(-(longest + 1) // BLOCK_SIZE) * BLOCK_SIZE)
    num_warm_up = len(trace) - len(SHARES) * num_timed
    comparison = Comparison(baselines(), (HOST_BYTES,), SHARES, True, (plan.seed,), Amounts(num_warm_up, num_timed))
    path = plan.kept_at or Path("build/bench-chunks-load.json")
    options = {"shares": list(SHARES), "seed": plan.seed, "quick": plan.is_quick, "num_requests": len(trace)}
    results = Results.open(path, options, machine(), resume=plan.kept_at is not None)

    def open_engine(baseline: Baseline, size: int, folder: Path) -> Engine:
        return baseline.launch(setup, size, folder)

    run_comparison(comparison, results, lambda _: prompts, open_engine, PlanProgress(plan, "load"))
    details = {
        "capacity_rps": results.capacity_rps,
        "machine": results.machine,
        "kv_bytes": kv_bytes,
        "host_bytes": HOST_BYTES,
        "runs": [run.to_dict() for run in results.runs],
    }
    warm_up = (
        f"{num_warm_up} requests: documents of {num_history} before them that come again, and the last {num_recent}"
    )
    return Part(warm_up, load_figures(results.runs), details)


def baselines() -> tuple[Baseline, ...]:
    """Return the engines: without a cache, with the prefixes of GPU memory, of all tiers, and with chunks reused."""
    exact = (BASELINES[name] for name in ("no-cache", _BASELINE, "ragcache"))
    return (*exact, replace(BASELINES[_CHUNKS], chunk_reuse=REUSE))


def load_figures(runs: Sequence[TimedRun]) -> tuple[Figure, ...]:
    """Return each engine's mean response time at each rate, beside prefix caching's, and what reuse is worth at most.

    A response is whole when its last token is there; it begins when the request was due.
    """
    by_place = {(run.engine, run.rate): run for run in runs}
    figures = []
    for (engine, rate), run in sorted(by_place.items(), key=lambda item: item[0][1]):
        baseline, times_s = by_place[_BASELINE, rate], responses_s(run)
        figures.append(
            Figure(
                f"load_{SHARES[rate]:g}_{engine}_ms",
                round(1000 * fmean(times_s), 1),
                round(1000 * fmean(responses_s(baseline)), 1),
                *percentiles_ms(times_s),
                f"TTFT {1000 * fmean(run.ttft_s):.0f} ms, {run.completed_rps:.2f} of {run.requests_per_s:.2f}/s, "
                f"{(run.cpu_s or 0.0) / len(run.ttft_s):.2f} core seconds a request",
            )
        )
    chunks, baseline = (by_place[engine, len(SHARES) - 1] for engine in (_CHUNKS, _BASELINE))
    response = fmean(responses_s(baseline)) / fmean(responses_s(chunks))
    throughput = chunks.completed_rps / baseline.completed_rps
    note = f"{100 * RECOMPUTED:.0f} % recomputed, at the highest rate, against prefix caching"
    return (
        Figure("load_response_ratio", round(response, 3), 1.0, note=note),
        Figure("load_throughput_ratio", round(throughput, 3), 1.0, note="requests answered a second, as above"),
        *figures,
    )


def responses_s(run: TimedRun) -> list[float]:
    """Return how long each request of a run took; all answers have as many tokens."""
    num_later = run.num_output_tokens // len(run.ttft_s) - 1
    return [first + num_later * later for first, later in zip(run.ttft_s, run.tpot_s, strict=True)]
