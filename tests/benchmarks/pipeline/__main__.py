"""``make bench-pipeline``: what overlap and the order of the queue bring; ``build/bench-pipeline.json``.

Every figure is measured beside its baseline, the same without speculation or reordering, in the same run. Nothing is
asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.command import benchmark
from tests.benchmarks.pipeline.agents import measure_agents
from tests.benchmarks.pipeline.document_order import measure_arranging
from tests.benchmarks.pipeline.exactness import measure_pipeline_exactness
from tests.benchmarks.pipeline.first_searches import measure_first_searches
from tests.benchmarks.pipeline.live import measure_live
from tests.benchmarks.pipeline.overlap import measure_never_settles, measure_overlap
from tests.benchmarks.pipeline.queue import measure_queue_step, measure_reordering
from tests.benchmarks.report import Goal, Part, Plan

GOALS: dict[str, Goal] = {
    "unhidden_search_ratio": Goal(">=", 4.0),
    "ttft_ratio_balanced": Goal(">=", 1.6),
    "ttft_ratio_never_settles": Goal("<=", 1.03),
    "ttft_ratio_never_settles_new": Goal("<=", 1.03),
    "reorder_ttft_ratio": Goal(">=", 1.5),
    "reorder_p99_ratio": Goal("<=", 1.0),
    "max_overtaken": Goal("<=", 32),
    "reorder_step_p99_ms": Goal("<", 0.2),
    "arrange_p99_ms": Goal("<", 2.0),
    "pipeline_mismatches": Goal("=", 0),
    "requests_left": Goal("=", 0),
    "tasks_left": Goal("=", 0),
}

PARTS: dict[str, Callable[[Plan], Part]] = {
    "overlap": measure_overlap,
    "agents": measure_agents,
    "never-settles": measure_never_settles,
    "first-searches": measure_first_searches,
    "reordering": measure_reordering,
    "queue-step": measure_queue_step,
    "exactness": measure_pipeline_exactness,
    "order": measure_arranging,
    "live": measure_live,
}

main = benchmark(
    "bench-pipeline",
    "Measure overlap and order: search hidden, time to the first token, wrong speculation, the queue, exactness.",
    PARTS,
    GOALS,
    """  python -m tests.benchmarks.pipeline
  python -m tests.benchmarks.pipeline --quick --output build/smoke.json
  python -m tests.benchmarks.pipeline --only overlap --only queue-step""",
)

if __name__ == "__main__":
    main()
