"""``make bench-chunks``: what reuse of documents anywhere saves, and what it costs; ``build/bench-chunks.json``.

Every figure is measured beside its baseline in the same run. Nothing is asserted: the table says which goals are met.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.chunks.ablations import measure_ablations
from benchmarks.chunks.answers import measure_answers, measure_curve
from benchmarks.chunks.focus import measure_focus
from benchmarks.chunks.guarded import measure_guarded
from benchmarks.chunks.layers import measure_layers
from benchmarks.chunks.load import measure_load
from benchmarks.chunks.ttft import measure_ttft
from benchmarks.command import benchmark
from benchmarks.report import BenchmarkPlan, Goal, Part

_MOST_COMPUTED = Goal("<=", 0.49)
_MOST_LOST = Goal("<=", 0.02)

GOALS: dict[str, Goal] = {
    "computed_tokens_ratio": _MOST_COMPUTED,
    "em_loss": _MOST_LOST,
    "computed_tokens_ratio_single": _MOST_COMPUTED,
    "em_single_loss": _MOST_LOST,
    "computed_tokens_ratio_two_hop": _MOST_COMPUTED,
    "em_two_hop_loss": _MOST_LOST,
    "computed_tokens_ratio_cont": _MOST_COMPUTED,
    "em_cont_loss": _MOST_LOST,
    "ttft_ratio": Goal(">", 2.4),
    "load_response_ratio": Goal(">=", 2.1),
    "load_throughput_ratio": Goal(">=", 1.6),
}

PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "answers": measure_answers,
    "ttft": measure_ttft,
    "load": measure_load,
    "curve": measure_curve,
    "ablations": measure_ablations,
    "layers": measure_layers,
    "focus": measure_focus,
    "guarded": measure_guarded,
}

main = benchmark(
    "bench-chunks",
    "Measure chunk reuse: computed tokens, right answers by kind, alphas, ablations, times alone and loaded.",
    PARTS,
    GOALS,
    """  python -m examples.demo_model_training.recurring --out build/recurring-questions.jsonl
  python -m benchmarks.chunks
  python -m benchmarks.chunks --quick --output build/smoke.json
  python -m benchmarks.chunks --only answers --only ttft
  python -m benchmarks.chunks --only load --resume""",
    keeps_runs=True,
)

if __name__ == "__main__":
    main()
