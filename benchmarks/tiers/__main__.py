"""``make bench-tiers``: what the tiers bring, what they cost, and whether they are right; ``build/bench-tiers.json``.

Every figure is measured beside its baseline in the same run. Nothing is asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.command import benchmark
from benchmarks.report import BenchmarkPlan, Goal, Part
from benchmarks.tiers.compiled import measure_compiled
from benchmarks.tiers.compression import measure_compression
from benchmarks.tiers.disk_ttft import measure_disk_ttft
from benchmarks.tiers.exactness import measure_exactness
from benchmarks.tiers.group_share import measure_share_by_groups
from benchmarks.tiers.hit_share import measure_share
from benchmarks.tiers.idle_overhead import measure_idle, measure_idle_large
from benchmarks.tiers.mixed import measure_mixed
from benchmarks.tiers.shared_ttft import measure_shared_ttft

GOALS: dict[str, Goal] = {
    "exact_requests": Goal(">=", 500),
    "exact_mismatches": Goal("=", 0),
    "exact_host_hits": Goal(">", 0),
    "exact_disk_hits": Goal(">", 0),
    "exact_evicted_blocks": Goal(">", 0),
    "exact_preemptions": Goal(">", 0),
    "exact_chunked_prefills": Goal(">", 0),
    "exact_restarts": Goal(">", 0),
    "mixed_requests": Goal(">=", 2000),
    "mixed_mismatches": Goal("=", 0),
    "mixed_restarts": Goal("=", 2),
    "cached_share_ratio": Goal(">=", 1.4),
    "cached_share_ratio_gpt_oss": Goal(">=", 1.3),
    "cached_share_ratio_gemma_3": Goal(">=", 1.3),
    "idle_throughput_ratio": Goal(">=", 0.97),
    "idle_throughput_ratio_30m": Goal(">=", 0.97),
    "disk_ttft_mismatches": Goal("=", 0),
    "compressed_bytes_auto": Goal("<=", 0.8),
    "compiled_mismatches": Goal("=", 0),
    "shared_ttft_ratio": Goal("<=", 0.25),
    "shared_mismatches": Goal("=", 0),
    "shared_dead_excess_s": Goal("<=", 0.2),
}

PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "exactness": measure_exactness,
    "mixed": measure_mixed,
    "share": measure_share,
    "share-by-groups": measure_share_by_groups,
    "disk-ttft": measure_disk_ttft,
    "shared-ttft": measure_shared_ttft,
    "compression": measure_compression,
    "compiled": measure_compiled,
    "idle": measure_idle,
    "idle-30m": measure_idle_large,
}

main = benchmark(
    "bench-tiers",
    "Measure the tiers: exactness, cached share, time to first token, throughput.",
    PARTS,
    GOALS,
    """  python -m benchmarks.tiers
  python -m benchmarks.tiers --quick --output build/smoke.json
  python -m benchmarks.tiers --only share --only idle""",
)

if __name__ == "__main__":
    main()
