"""``make bench-simulation``: what policy, order and queue bring in virtual time; ``build/bench-simulation.json``.

Every seed gives one trace, and all systems run on it: ratios are taken seed by seed, and reported as their mean with
the spread over the seeds. The baseline is the paper's Algorithm 1 to the letter: PGDSF whose counts end with a
document's eviction, documents in the order of the search; ``policies``, ``histories``, ``imported`` and ``tools`` have
rivals and traces of their own. Nothing is asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import benchmark
from benchmarks.papers.ratios import DEFAULT_POLICY, Ratio, Summary
from benchmarks.report import BenchmarkPlan, Figure, Goal, Part
from benchmarks.simulated import simulate_runs
from benchmarks.simulated.laboratory import LabOptions
from benchmarks.simulation import decisions, rivals, tools
from benchmarks.simulation.batch import measure_batches
from ragcache_core.sim.options import BELADY
from ragcache_core.sim.sweep import plan as plan_runs
from ragcache_core.sim.traces.trace import Trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, Workload, make_trace

GOALS: dict[str, Goal] = {
    "mmlu_ttft_ratio_8": Goal("<=", 0.88),
    "mmlu_ttft_ratio_32": Goal("<=", 0.90),
    "mmlu_ttft_ratio_128": Goal("<=", 0.98),
    "mmlu_hit_of_bound_8": Goal(">=", 0.82),
    "mmlu_hit_of_bound_32": Goal(">=", 0.85),
    "mmlu_hit_of_bound_128": Goal(">=", 0.88),
    "nq_ttft_ratio_8": Goal("<=", 0.91),
    "nq_ttft_ratio_32": Goal("<=", 0.91),
    "nq_ttft_ratio_128": Goal("<=", 0.97),
    "drift_ttft_ratio_max": Goal("<=", 1.02),
    "order_ttft_ratio_8": Goal("<=", 0.77),
    "order_ttft_ratio_32": Goal("<=", 0.79),
    "order_ttft_ratio_128": Goal("<=", 0.85),
    "order_vs_canonical_max": Goal("<=", 1.0),
    "load_ttft_ratio": Goal("<=", 0.5),
    "load_p99_ratio": Goal("<=", 1.0),
    **rivals.goals(),
    **decisions.GOALS,
}

_FIRST_SEED = 101  # on seeds below this one policies were chosen and tuned
_NUM_SEEDS, _NUM_SEEDS_OF_BOUND = 10, 3
_NUM_REQUESTS, _NUM_WARM_UP = 15_000, 3_000
_GPU_TOKENS = 40_960
_TOKENS_PER_GIB = 8_192
_HOST_GIB = (8, 32, 128)
_LOAD = 1.05
_IDLE_RPS = 1e-3


@dataclass(frozen=True, slots=True)
class System:
    """What is compared: a policy with an order of documents and a queue."""

    name: str
    policy: str
    order: str = "retrieval"
    queue: str = "fifo"

    def settings(self) -> dict[str, Any]:
        """Return the simulator's options that differ between systems."""
        return {"policy": self.policy, "order": self.order, "queue": self.queue}


ALGORITHM_1 = System("algorithm 1", "pgdsf")
KEPT_ORDER = System("order kept", DEFAULT_POLICY)
CANONICAL = System("canonical", DEFAULT_POLICY, "canonical")
CACHE_AWARE = System("cache_aware", DEFAULT_POLICY, "cache_aware")
BOUND = System("bound", BELADY)
PAPERS_QUEUE = System("the paper's reordering", "pgdsf", queue="cache-aware")
OUR_QUEUE = System("our reordering", DEFAULT_POLICY, queue="cache-aware")


@dataclass(frozen=True, slots=True)
class Setting:
    """A workload and a host tier; ``load`` None: at the workload's own rate."""

    workload: str
    host_gib: int
    load: float | None = None

    def __str__(self) -> str:
        return f"{self.workload}, {self.host_gib} GiB" + (f", load {self.load:g}" if self.load else "")


Results = Mapping[Setting, Mapping[System, Sequence[Summary]]]
"""For each setting and system a summary for each seed."""


def workload(name: str) -> Workload:
    """Return a workload as it is measured here; ``nq-drift`` is ``nq`` with the drift and sessions of ``drift``."""
    drift = WORKLOADS["drift"]
    if name == "nq-drift":
        of = replace(WORKLOADS["nq"], drift_every=drift.drift_every, repeat_share=drift.repeat_share)
    else:
        of = WORKLOADS[name]
    return replace(of, documents_per_request=2, requests_per_s=0.8)


def measure_mmlu(plan: BenchmarkPlan) -> Part:
    """Compare policies, and orders of documents, where few documents get most requests."""
    results = _compare(plan, ["mmlu"], [ALGORITHM_1, KEPT_ORDER, CACHE_AWARE, BOUND])
    return _part(plan, [*_against_baseline(results), *_orders(results)], results)


def measure_nq(plan: BenchmarkPlan) -> Part:
    """Compare policies where popularity is spread over more documents."""
    results = _compare(plan, ["nq"], [ALGORITHM_1, KEPT_ORDER, BOUND])
    return _part(plan, _against_baseline(results), results)


def measure_bound(plan: BenchmarkPlan) -> Part:
    """Compare the default policy with the bound alone, on fewer seeds: a part of ``make bench-headline``."""
    results = _compare(plan, ["mmlu", "nq"], [KEPT_ORDER, BOUND], num_seeds=_NUM_SEEDS_OF_BOUND)
    return _part(plan, [_of_bound(setting, of) for setting, of in results.items()], results)


def measure_drift(plan: BenchmarkPlan) -> Part:
    """Compare policies where what is popular changes: the worst of all capacities."""
    results = _compare(plan, ["drift", "nq-drift"], [ALGORITHM_1, KEPT_ORDER])
    return _part(plan, _worst("drift_ttft_ratio", KEPT_ORDER, ALGORITHM_1, results), results)


def measure_canonical(plan: BenchmarkPlan) -> Part:
    """Compare the two orders of documents that are not the search's: the worst of all workloads and capacities."""
    results = _compare(plan, ["mmlu", "nq", "drift"], [CANONICAL, CACHE_AWARE])
    return _part(plan, _worst("order_vs_canonical", CACHE_AWARE, CANONICAL, results), results)


def _worst(key: str, ours: System, other: System, results: Results) -> list[Figure]:
    """Return our mean TTFT over the other's where that is worst, and in the worst seed of all."""
    ratios = {setting: Ratio.of("mean_ttft_s", of[ours], of[other]) for setting, of in results.items()}
    worst = max(ratios, key=lambda setting: ratios[setting].mean)
    seeds = max(max(ratio.pairs) for ratio in ratios.values())
    return [
        _figure(ratios[worst], f"{key}_max", f"at {worst}"),
        Figure(f"{key}_seed", round(seeds, 4), note="the worst of all seeds and capacities"),
    ]


def measure_load(plan: BenchmarkPlan) -> Part:
    """Compare queues where 1.05 times as many requests arrive as Algorithm 1 can serve first come, first served.

    Both queues reorder as the paper has it, in a window of 32. The paper's runs over its own policy, ours over the
    default one.
    """
    results = _compare(plan, ["mmlu"], [PAPERS_QUEUE, OUR_QUEUE], load=_LOAD)
    ratios = {
        key: {setting: Ratio.of(of_key, of[OUR_QUEUE], of[PAPERS_QUEUE]) for setting, of in results.items()}
        for key, of_key in (("load_ttft_ratio", "mean_ttft_s"), ("load_p99_ratio", "p99_ttft_s"))
    }
    figures = []
    for key, of in ratios.items():
        worst = max(of, key=lambda setting: of[setting].mean)
        figures.append(_figure(of[worst], key, f"at {worst}, the worst capacity"))
        figures += [_figure(ratio, f"{key}_{setting.host_gib}", "") for setting, ratio in of.items()]
    return _part(plan, figures, results)


def _figure(ratio: Ratio, key: str, note: str) -> Figure:
    return Figure(key, round(ratio.mean, 4), baseline=1.0, note=f"+-{ratio.spread:.3f}; {note}")


def _against_baseline(results: Results) -> list[Figure]:
    figures = []
    for setting, of in results.items():
        ttft = Ratio.of("mean_ttft_s", of[KEPT_ORDER], of[ALGORITHM_1])
        name, gib = setting.workload, setting.host_gib
        figures.append(
            _figure(ttft, f"{name}_ttft_ratio_{gib}", _versus("mean_ttft_s", "s", of, KEPT_ORDER, ALGORITHM_1))
        )
        figures.append(_of_bound(setting, of))
    return figures


def _of_bound(setting: Setting, of: Mapping[System, Sequence[Summary]]) -> Figure:
    hits = Ratio.of("token_hit_rate", of[KEPT_ORDER], of[BOUND])
    note = _versus("token_hit_rate", "", of, KEPT_ORDER, BOUND)
    return _figure(hits, f"{setting.workload}_hit_of_bound_{setting.host_gib}", note)


def _orders(results: Results) -> list[Figure]:
    figures = []
    for setting, of in results.items():
        ratio = Ratio.of("mean_ttft_s", of[CACHE_AWARE], of[ALGORITHM_1])
        reordered = fmean(summary["reordered_share"] for summary in of[CACHE_AWARE])
        note = f"{_versus('mean_ttft_s', 's', of, CACHE_AWARE, ALGORITHM_1)}; {reordered:.0%} reordered"
        figures.append(_figure(ratio, f"order_ttft_ratio_{setting.host_gib}", note))
    return figures


def _versus(key: str, unit: str, of: Mapping[System, Sequence[Summary]], ours: System, other: System) -> str:
    values = [f"{fmean(summary[key] for summary in of[system]):.3f} {unit}".rstrip() for system in (ours, other)]
    return f"{values[0]} against {values[1]}"


def _compare(
    plan: BenchmarkPlan,
    workloads: Sequence[str],
    systems: Sequence[System],
    load: float | None = None,
    num_seeds: int = _NUM_SEEDS,
) -> Results:
    """Return what every system does on the traces of every seed."""
    num_requests = plan.sized(_NUM_REQUESTS, 200)
    warm_up = plan.sized(_NUM_WARM_UP, 50)
    seeds = range(_FIRST_SEED + plan.seed, _FIRST_SEED + plan.seed + plan.sized(num_seeds, 2))
    settings = [Setting(name, gib, load) for name in workloads for gib in _HOST_GIB]
    with TemporaryDirectory(prefix="ragcache-simulation-") as folder:
        traces = _write_traces(plan, settings, seeds, Path(folder))
        runs = {}
        for (setting, seed), path in traces.items():
            for system in systems:
                options = _options(system, setting, warm_up)
                (runs[setting, system, seed],) = plan_runs([path], options)
        done = simulate_runs(plan, ", ".join(workloads), list(runs.values()), num_requests * len(runs))
    summaries = {at: finished.summary for at, finished in zip(runs, done, strict=True)}
    return {
        setting: {system: [summaries[setting, system, seed] for seed in seeds] for system in systems}
        for setting in settings
    }


def _options(system: System, setting: Setting, warm_up: int) -> LabOptions:
    host_tokens = setting.host_gib * _TOKENS_PER_GIB
    return LabOptions(gpu_tokens=_GPU_TOKENS, host_tokens=host_tokens, warm_up=warm_up, **system.settings())


def _write_traces(
    plan: BenchmarkPlan, settings: Sequence[Setting], seeds: Sequence[int], folder: Path
) -> dict[tuple[Setting, int], Path]:
    """Return the trace of each setting and seed: that of the workload, at the setting's load where it has one."""
    num_requests, warm_up = plan.sized(_NUM_REQUESTS, 200), plan.sized(_NUM_WARM_UP, 50)
    made: dict[tuple[str, int], Trace] = {}
    for name in dict.fromkeys(setting.workload for setting in settings):
        for seed in seeds:
            plan.report(f"{name}: trace of seed {seed}")
            made[name, seed] = make_trace(workload(name), num_requests, seed)
    paths = {}
    for (name, seed), trace in made.items():
        path = folder / f"{name}-{seed}.jsonl"
        is_loaded = any(setting.load for setting in settings if setting.workload == name)
        write_trace(trace.with_rate(_IDLE_RPS) if is_loaded else trace, path)
        paths.update({(setting, seed): path for setting in settings if setting.workload == name})
    loaded = [at for at in paths if at[0].load]
    if not loaded:
        return paths
    idle = [run for at in loaded for run in plan_runs([paths[at]], _options(ALGORITHM_1, at[0], warm_up))]
    done = simulate_runs(plan, f"what {ALGORITHM_1.name} can serve", idle, num_requests * len(idle))
    for (setting, seed), run in zip(loaded, done, strict=True):
        service_s = run.summary["mean_ttft_s"] - run.options["retrieval_s"]  # without queueing
        assert setting.load
        path = paths[setting, seed] = folder / f"{setting}-{seed}.jsonl"
        write_trace(made[setting.workload, seed].with_rate(setting.load / service_s), path)
    return paths


def _part(plan: BenchmarkPlan, figures: Sequence[Figure], results: Results) -> Part:
    keys = ("mean_ttft_s", "p50_ttft_s", "p99_ttft_s", "token_hit_rate", "document_hit_rate", "reordered_share")
    details = {
        str(setting): {
            system.name: {key: [round(summary[key], 5) for summary in of[system]] for key in keys} for system in of
        }
        for setting, of in results.items()
    }
    num_seeds = len(next(iter(next(iter(results.values())).values())))
    warm_up = f"{plan.sized(_NUM_WARM_UP, 50):,} of {plan.sized(_NUM_REQUESTS, 200):,} requests, {num_seeds} seeds"
    return Part(warm_up, tuple(figures), details)


PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "mmlu": measure_mmlu,
    "nq": measure_nq,
    "drift": measure_drift,
    "canonical": measure_canonical,
    "load": measure_load,
    "batches": measure_batches,
    "policies": rivals.measure_policies,
    "histories": rivals.measure_histories,
    "imported": rivals.measure_imported,
    "decisions": decisions.measure_decisions,
    "tools": tools.measure_tools,
}

main = benchmark(
    "bench-simulation",
    "Simulate policies, orders of documents and queues against the paper's Algorithm 1, and policies against others.",
    PARTS,
    GOALS,
    """  python -m benchmarks.simulation
  python -m benchmarks.simulation --quick --output build/smoke.json
  python -m benchmarks.simulation --only mmlu --only load
  python -m benchmarks.simulation --resume""",
    keeps_runs=True,
)

if __name__ == "__main__":
    main()
