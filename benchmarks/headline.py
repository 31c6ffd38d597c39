"""``make bench-headline``: docs/evaluate/index.md again; ``build/bench-headline.json``.

Parts of the other benchmarks as they are there, but for four that are smaller: the engines side by side, the disk, the
policy against the bound, and what the cache costs where nothing comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.chunks.__main__ import GOALS as CHUNKS
from benchmarks.chunks.answers import measure_answers
from benchmarks.command import benchmark
from benchmarks.fleet.__main__ import GOALS as FLEET
from benchmarks.fleet.virtual import measure as measure_fleet
from benchmarks.pipeline.__main__ import GOALS as PIPELINE
from benchmarks.pipeline.overlap import measure_overlap
from benchmarks.report import BenchmarkPlan, Figure, Goal, Part, PlanProgress
from benchmarks.simulation.__main__ import GOALS as SIMULATION
from benchmarks.simulation.__main__ import measure_bound
from benchmarks.tiers.__main__ import GOALS as TIERS
from benchmarks.tiers.disk_ttft import measure_disk_ttft
from benchmarks.tiers.exactness import measure_exactness
from benchmarks.tiers.idle_overhead import measure_idle
from ragcache_core.bench.comparison import run_comparison
from ragcache_core.bench.options import BenchOptions, prepare
from ragcache_core.bench.report import summarise, write_report
from ragcache_core.bench.results import Results
from ragcache_core.bench.summary import Point
from ragcache_core.reports.machine import machine

_OURS, _OTHERS = "ragcache-cache-aware", {"no-cache": 6.0, "vllm": 4.0, "vllm-host-arc": 1.5}
"""By what the mean TTFT of each other engine is to be higher than ours."""
_RATES_RPS = (2.3, 3.5)
COMPARISON = Path("build/bench-headline-compare.json")


def measure_side_by_side(plan: BenchmarkPlan) -> Part:
    """Put the same load on four engines; draws ``build/bench-headline-compare.html`` and its pictures as well."""
    options = BenchOptions(
        compare=(*_OTHERS, _OURS),
        rates=_RATES_RPS,
        are_shares=False,
        seeds=1,
        first_seed=1 + plan.seed,
        requests=plan.sized(50, 4),
        warm_up=plan.sized(300, 4),
        host_memory=("256MiB",),
    )
    COMPARISON.parent.mkdir(exist_ok=True)
    COMPARISON.unlink(missing_ok=True)
    prepared = prepare(options)
    results = Results.open(COMPARISON, prepared.facts, machine())
    progress = PlanProgress(plan, "side by side")
    run_comparison(prepared.comparison, results, prepared.prompts.__getitem__, prepared.open_engine, progress)
    write_report(COMPARISON.with_suffix(".html"), results)
    summary, figures = summarise(results), []
    for baseline in _OTHERS:
        for rate in range(len(_RATES_RPS)):
            ours, theirs = summary.point(_OURS, rate), summary.point(baseline, rate)
            assert ours is not None
            assert theirs is not None
            note = f"mean TTFT at {_RATES_RPS[rate]:g}/s: {_ms(theirs)} against {_ms(ours)} ms"
            note += f"; {theirs.cached_share.mean:.0%} and {ours.cached_share.mean:.0%} of tokens cached"
            ratio = theirs.ttft_mean_s.mean / ours.ttft_mean_s.mean
            figures.append(Figure(_key(baseline, rate), round(ratio, 3), 1.0, note=note))
    return Part(f"{options.warm_up} requests on each engine", tuple(figures), {"summary": summary.to_dict()})


def _ms(point: Point) -> str:
    return f"{point.ttft_mean_s.mean * 1000:,.0f}"


def _key(baseline: str, rate: int) -> str:
    return f"sooner_than_{baseline.replace('-', '_')}_{_RATES_RPS[rate]:g}"


PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "exactness": measure_exactness,
    "side-by-side": measure_side_by_side,
    "disk-ttft": partial(measure_disk_ttft, waiting=(1, 8)),
    "overlap": measure_overlap,
    "answers": measure_answers,
    "mmlu_8": measure_fleet("mmlu", 8),
    "bound": measure_bound,
    "idle": partial(measure_idle, num_starts=1, num_batches=3),
}

GOALS: dict[str, Goal] = {
    **{
        _key(baseline, rate): Goal(">=", times)
        for baseline, times in _OTHERS.items()
        for rate in range(len(_RATES_RPS))
    },
    **{key: goal for key, goal in TIERS.items() if key.startswith(("exact_", "disk_"))},
    "idle_throughput_ratio": TIERS["idle_throughput_ratio"],
    **{key: PIPELINE[key] for key in ("unhidden_search_ratio", "ttft_ratio_balanced")},
    **{key: goal for key, goal in CHUNKS.items() if key.startswith(("computed_", "em_"))},
    **{key: goal for key, goal in FLEET.items() if key.startswith("mmlu_8_")},
    **{key: goal for key, goal in SIMULATION.items() if "hit_of_bound" in key},
}

main = benchmark(
    "bench-headline",
    "Measure docs/evaluate/index.md again, smaller.",
    PARTS,
    GOALS,
    """  python -m examples.demo_model_training.recurring --out build/recurring-questions.jsonl
  python -m benchmarks.headline
  python -m benchmarks.headline --quick --output build/smoke.json
  python -m benchmarks.headline --only side-by-side --only overlap""",
    keeps_runs=True,
)

if __name__ == "__main__":
    main()
