"""Right answers and computed tokens of the demo model, by kind of question, where documents recur in new company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.engines import BLOCK_SIZE
from benchmarks.report import BenchmarkPlan, Figure, Part
from ragcache_core.config import CacheConfig
from ragcache_core.quality import (
    FULL,
    NAIVE,
    PREFIX,
    Method,
    QualitySummary,
    Question,
    ScoredAnswer,
    chunk_methods,
    read_questions,
    summarise,
)
from ragcache_core.quality.run import QualityRun
from ragcache_core.reports.plots import Plot, Points, lines
from ragcache_core.types import DEFAULT_ALPHA, SelectionName

QUESTIONS = Path("build/recurring-questions.jsonl")
"""Written by ``python -m examples.demo_model_training.recurring``, as ``make bench-chunks`` does it first."""
CURVE_PICTURE = Path("build/bench-chunks-curve.png")
ALPHA = DEFAULT_ALPHA["whole_chunks"]
CURVE: dict[SelectionName, tuple[float, ...]] = {
    "whole_chunks": (1.2, 1.4, 1.5, 1.6, 1.8, 2.0, 3.0),
    "cache_craft": (0.3, 0.6, 1.0, 2.0),
}
_KINDS = {"": "all", "_single": "single-hop", "_two_hop": "two-hop", "_cont": "continued"}
"""What a figure's name has -> the kind of question."""
WARM_UP = "none: every engine starts empty, and what fills it is counted; naive reuse has read each document alone"


def measure_answers(plan: BenchmarkPlan) -> Part:
    """Answer with everything computed, with prefix caching, with naive reuse, and with whole chunks mended."""
    (chunks,) = chunk_methods("whole_chunks", [ALPHA])
    by_method = _summaries(plan, [FULL, PREFIX, NAIVE, chunks])
    full, prefix, naive, reuse = (by_method[method.name] for method in (FULL, PREFIX, NAIVE, chunks))
    figures: list[Figure] = []
    for name, kind in _KINDS.items():
        figures += _figures(name, kind, full[kind], prefix[kind], naive[kind], reuse[kind])
    details = {"selection": "whole_chunks", "alpha": ALPHA, "summaries": _details(by_method)}
    return Part(WARM_UP, tuple(figures), details)


def measure_curve(plan: BenchmarkPlan) -> Part:
    """Answer with several alphas of our selection and of Cache-Craft's: how quality grows with what is computed.

    Draws ``build/bench-chunks-curve.png`` as well.
    """
    methods = [method for selection, alphas in CURVE.items() for method in chunk_methods(selection, alphas)]
    by_method = _summaries(plan, [FULL, PREFIX, *methods])
    prefix = by_method[PREFIX.name]["all"]
    figures = tuple(
        Figure(
            f"em_{method.name.replace(' ', '_')}",
            round(by_method[method.name]["all"].exact_match, 4),
            round(by_method[FULL.name]["all"].exact_match, 4),
            note=f"computed {by_method[method.name]['all'].computed_ratio(prefix):.3f} of prefix caching; "
            f"continued {by_method[method.name]['continued'].exact_match:.3f}",
        )
        for method in methods
    )
    curve_plot(by_method, plan.model).save_png(CURVE_PICTURE)
    return Part(WARM_UP, figures, {"summaries": _details(by_method)})


def curve_plot(by_method: Mapping[str, Mapping[str, QualitySummary]], model: str) -> Plot:
    """Return right answers to the hard kind of question against computed tokens, a line for each selection."""
    kind = _KINDS["_cont"]
    prefix = by_method[PREFIX.name][kind]
    series: dict[str, Points] = {}
    for selection in CURVE:
        found = [by_kind[kind] for name, by_kind in by_method.items() if name.startswith(f"{selection} ")]
        points = [(100.0 * each.computed_ratio(prefix), 100.0 * each.exact_match) for each in found]
        series[selection] = sorted(points)
    for method in (PREFIX, FULL):
        found_at = by_method[method.name][kind]
        series[method.name] = [(100.0 * found_at.computed_ratio(prefix), 100.0 * found_at.exact_match)]
    drawn = lines(
        f"Right answers to {kind} questions",
        "computed tokens, % of prefix caching's",
        "exact match, %",
        series,
    )
    note = (
        f"{prefix.num_questions} {kind} questions whose documents recur in new company, asked of {model}; each "
        "point of a line computes more of what is reused (its alpha)."
    )
    return replace(drawn, note=note)


def _figures(
    name: str, kind: str, full: QualitySummary, prefix: QualitySummary, naive: QualitySummary, reuse: QualitySummary
) -> tuple[Figure, ...]:
    exact = round(full.exact_match, 4)
    note = f"{kind}, {full.num_questions} questions"
    return (
        Figure(f"computed_tokens_ratio{name}", round(reuse.computed_ratio(prefix), 4), 1.0, note=note),
        Figure(f"em{name}_full", exact, note="everything computed"),
        Figure(f"em{name}_prefix", round(prefix.exact_match, 4), exact, note="prefix caching"),
        Figure(f"em{name}_naive", round(naive.exact_match, 4), exact, note="documents computed alone"),
        Figure(f"em{name}_chunks", round(reuse.exact_match, 4), exact, note=f"recomputed {reuse.recomputed:.3f}"),
        Figure(f"em{name}_loss", round(full.exact_match - reuse.exact_match, 4), note="em_full less em_chunks"),
    )


def _summaries(plan: BenchmarkPlan, methods: Sequence[Method]) -> dict[str, dict[str, QualitySummary]]:
    """Return by method and kind what the methods came to.

    Raises:
        ConfigError: the questions are not there, or of other kinds.
    """
    questions = read_questions(QUESTIONS, limit=30 if plan.is_quick else None)
    return {
        method.name: {summary.kind: summary for summary in summarise(method.name, answers)}
        for method, answers in asked(plan, plan.model, questions, methods)
    }


def asked(
    plan: BenchmarkPlan,
    model: str,
    questions: Sequence[Question],
    methods: Sequence[Method],
    *,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[Method, list[ScoredAnswer]]]:
    """Yield each method's answers by the model, all methods with engines of the same sizes.

    ``env`` are variables of the engines.
    """
    options = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "progress": False, "max_restarts": 0,
        "env": {"HF_HUB_OFFLINE": "1", **env},
    }  # fmt: skip
    sizes = CacheConfig(kv_cache_bytes="256MiB", host_bytes="2GiB", block_size=BLOCK_SIZE)
    run = QualityRun(model, questions, sizes, max_tokens=32, launch_options=options)

    def begin(method: Method) -> Callable[[int], object]:
        plan.report(f"{Path(model).name}: {method.name}, {len(questions)} questions")
        return lambda _: None

    return run.answers(methods, begin=begin)


def _details(by_method: dict[str, dict[str, QualitySummary]]) -> list[dict[str, object]]:
    return [summary.to_dict() for by_kind in by_method.values() for summary in by_kind.values()]
