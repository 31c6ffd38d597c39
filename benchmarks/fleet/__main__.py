"""``make bench-fleet``: what several replicas are worth; writes ``build/bench-fleet.json``.

Real engines answer what plain vLLM answers, while they are killed and their store is damaged. In virtual time the
project's own choice of a replica divides the requests, and every ratio is against runs of the same requests. Nothing is
asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.command import benchmark
from benchmarks.fleet.exactness import measure_exactness
from benchmarks.fleet.virtual import measure, measure_curve
from benchmarks.report import BenchmarkPlan, Goal, Part

_SIZES = (8, 64)
_WORKLOADS = ("mmlu", "sysx")

GOALS: dict[str, Goal] = {
    **{f"{workload}_{num}_hit_of_pooled": Goal(">=", 0.95) for workload in _WORKLOADS for num in _SIZES},
    **{f"{workload}_{num}_busiest": Goal("<=", 1.3) for workload in _WORKLOADS for num in _SIZES},
    **{
        f"{workload}_{num}_{load}ttft_ratio": Goal("<=", 0.6)
        for workload in _WORKLOADS
        for num in _SIZES
        for load in ("", "light_")
    },
    "exact_requests": Goal(">=", 500),
    "exact_mismatches": Goal("=", 0),
    "exact_shared_tokens": Goal(">", 0),
    "exact_damage_seen": Goal(">", 0),
    "exact_restarts": Goal(">=", 4),
}

PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    **{f"{workload}_{num}": measure(workload, num) for num in _SIZES for workload in _WORKLOADS},
    "curve": measure_curve,
    "exactness": measure_exactness,
}

main = benchmark(
    "bench-fleet",
    "Measure fleets: in virtual time, and the exactness of real engines over one store.",
    PARTS,
    GOALS,
    "  python -m benchmarks.fleet --only exactness\n"
    "  python -m benchmarks.fleet --only mmlu_8 --only sysx_8\n"
    "  python -m benchmarks.fleet --quick",
    keeps_runs=True,
)

if __name__ == "__main__":
    main()
