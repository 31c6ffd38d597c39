"""``make bench-fleet``: what several replicas are worth; writes ``build/bench-fleet.json``.

Real engines answer what plain vLLM answers, while they are killed and their store is damaged. In virtual time the
project's own choice of a replica divides the requests, and every ratio is against runs of the same requests. Nothing is
asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.command import benchmark
from tests.benchmarks.fleet.choosing import measure_choosing
from tests.benchmarks.fleet.engines import measure_engines, measure_kill
from tests.benchmarks.fleet.exactness import measure_exactness
from tests.benchmarks.fleet.virtual import measure, measure_curve
from tests.benchmarks.report import Goal, Part, Plan

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
    "choice_p99_ms": Goal("<", 1.0),
    "engines_2_hit_of_pooled": Goal(">=", 0.9),
    "engines_3_hit_of_pooled": Goal(">=", 0.9),
    "kill_failed_requests": Goal("=", 0),
    "kill_hit_rate_after": Goal(">=", 0.9),
    "kill_back_of_cold": Goal("<=", 1.0),
    "exact_requests": Goal(">=", 500),
    "exact_mismatches": Goal("=", 0),
    "exact_shared_tokens": Goal(">", 0),
    "exact_damage_seen": Goal(">", 0),
    "exact_restarts": Goal(">=", 4),
}

PARTS: dict[str, Callable[[Plan], Part]] = {
    "choosing": measure_choosing,
    **{f"{workload}_{num}": measure(workload, num) for num in _SIZES for workload in _WORKLOADS},
    "curve": measure_curve,
    "engines": measure_engines,
    "kill": measure_kill,
    "exactness": measure_exactness,
}

main = benchmark(
    "bench-fleet",
    "Measure fleets: in virtual time, on real engines, and what a choice costs.",
    PARTS,
    GOALS,
    "  python -m tests.benchmarks.fleet --only choosing\n"
    "  python -m tests.benchmarks.fleet --only mmlu_8 --only sysx_8\n"
    "  python -m tests.benchmarks.fleet --quick",
    keeps_runs=True,
)

if __name__ == "__main__":
    main()
