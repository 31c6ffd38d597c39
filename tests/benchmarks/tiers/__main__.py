"""``make bench-tiers``: what the tiers bring, what they cost, and whether they are right; ``build/bench-tiers.json``.

Every figure is measured beside its baseline in the same run. Nothing is asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.command import benchmark
from tests.benchmarks.report import Goal, Part, Plan
from tests.benchmarks.tiers.disk_ttft import measure_disk_ttft
from tests.benchmarks.tiers.exactness import measure_exactness
from tests.benchmarks.tiers.group_share import measure_share_by_groups
from tests.benchmarks.tiers.hit_share import measure_share, measure_share_by_policy, measure_swap_out
from tests.benchmarks.tiers.idle_overhead import measure_idle, measure_idle_large
from tests.benchmarks.tiers.mixed import measure_mixed
from tests.benchmarks.tiers.policies import LOSS_ALLOWED, measure_policies
from tests.benchmarks.tiers.shared_ttft import measure_shared_ttft
from tests.benchmarks.tiers.store import measure_index, measure_killpoints
from tests.benchmarks.tiers.tree import measure_decisions
from tests.benchmarks.tiers.warming import measure_forecast, measure_seeds, measure_warming

GOALS: dict[str, Goal] = {
    "exact_requests": Goal(">=", 500),
    "exact_mismatches": Goal("=", 0),
    "exact_host_hits": Goal(">", 0),
    "exact_disk_hits": Goal(">", 0),
    "exact_evicted_blocks": Goal(">", 0),
    "exact_preemptions": Goal(">", 0),
    "exact_chunked_prefills": Goal(">", 0),
    "exact_restarts": Goal(">", 0),
    "mixed_requests": Goal(">=", 500),
    "mixed_mismatches": Goal("=", 0),
    "mixed_search_mismatches": Goal("=", 0),
    "mixed_replaced": Goal(">", 0),
    "mixed_speculations": Goal(">", 0),
    "mixed_host_hits": Goal(">", 0),
    "mixed_disk_hits": Goal(">", 0),
    "mixed_forgotten_blocks": Goal(">", 0),
    "cached_share_ratio": Goal(">=", 1.4),
    "cached_share_ratio_gpt_oss": Goal(">=", 1.3),
    "cached_share_ratio_gemma_3": Goal(">=", 1.3),
    "decision_p99_ms_1k": Goal("<", 1.0),
    "decision_p99_ms_100k": Goal("<", 1.0),
    "bytes_per_node": Goal("<", 1200),
    "idle_throughput_ratio": Goal(">=", 0.97),
    "idle_throughput_ratio_30m": Goal(">=", 0.97),
    "swap_out_ratio": Goal("<=", 1.0),
    "killpoints": Goal(">=", 1000),
    "killpoint_lost": Goal("=", 0),
    "killpoint_wrong": Goal("=", 0),
    "index_open_s": Goal("<", 5.0),
    "disk_ttft_mismatches": Goal("=", 0),
    "shared_ttft_ratio": Goal("<=", 0.25),
    "shared_mismatches": Goal("=", 0),
    "shared_dead_excess_s": Goal("<=", 0.2),
    "warm_ttft_ratio": Goal("<", 1.0),
    "warm_mismatches": Goal("=", 0),
    "policy_worst_drift_ratio": Goal(">=", 1 - LOSS_ALLOWED),
}

PARTS: dict[str, Callable[[Plan], Part]] = {
    "decisions": measure_decisions,
    "index": measure_index,
    "killpoints": measure_killpoints,
    "policies": measure_policies,
    "exactness": measure_exactness,
    "mixed": measure_mixed,
    "share": measure_share,
    "share-by-groups": measure_share_by_groups,
    "share-by-policy": measure_share_by_policy,
    "swap-out": measure_swap_out,
    "disk-ttft": measure_disk_ttft,
    "shared-ttft": measure_shared_ttft,
    "warm": measure_warming,
    "warm-seeds": measure_seeds,
    "warm-forecast": measure_forecast,
    "idle": measure_idle,
    "idle-30m": measure_idle_large,
}

main = benchmark(
    "bench-tiers",
    "Measure the tiers: exactness, cached share, decision time, throughput, copies, crashes, policies, warming.",
    PARTS,
    GOALS,
    """  python -m tests.benchmarks.tiers
  python -m tests.benchmarks.tiers --quick --output build/smoke.json
  python -m tests.benchmarks.tiers --only decisions --only idle""",
)

if __name__ == "__main__":
    main()
