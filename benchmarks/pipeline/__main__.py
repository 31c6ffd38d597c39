"""``make bench-pipeline``: what overlap and the order of the queue bring; ``build/bench-pipeline.json``.

Every figure is measured beside its baseline, the same without speculation or reordering, in the same run. Nothing is
asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.command import benchmark
from benchmarks.pipeline.batch import measure_batch
from benchmarks.pipeline.exactness import measure_pipeline_exactness
from benchmarks.pipeline.overlap import measure_never_settles, measure_overlap
from benchmarks.pipeline.queue import measure_reordering
from benchmarks.pipeline.retention import measure_retention
from benchmarks.report import BenchmarkPlan, Goal, Part

GOALS: dict[str, Goal] = {
    "unhidden_search_ratio": Goal(">=", 4.0),
    "ttft_ratio_balanced": Goal(">=", 1.6),
    "ttft_ratio_never_settles": Goal("<=", 1.03),
    "ttft_ratio_never_settles_new": Goal("<=", 1.03),
    "reorder_ttft_ratio": Goal(">=", 1.5),
    "reorder_p99_ratio": Goal("<=", 1.0),
    "max_overtaken": Goal("<=", 32),
    "retention_mismatches": Goal("=", 0),
    "tool_names_mismatches": Goal("=", 0),
    "pipeline_mismatches": Goal("=", 0),
    "requests_left": Goal("=", 0),
    "tasks_left": Goal("=", 0),
}

PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "overlap": measure_overlap,
    "never-settles": measure_never_settles,
    "reordering": measure_reordering,
    "batch": measure_batch,
    "retention": measure_retention,
    "exactness": measure_pipeline_exactness,
}

main = benchmark(
    "bench-pipeline",
    "Measure overlap and order: search hidden, time to the first token, wrong speculation, the queue, exactness.",
    PARTS,
    GOALS,
    """  python -m benchmarks.pipeline
  python -m benchmarks.pipeline --quick --output build/smoke.json
  python -m benchmarks.pipeline --only overlap --only reordering""",
)

if __name__ == "__main__":
    main()
