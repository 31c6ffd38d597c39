"""Right answers and computed tokens of the 12-layer demo model without parts of Cache-Craft, and with others."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chunks.answers import WARM_UP, asked
from benchmarks.chunks.rules import RULES, environment
from benchmarks.report import BenchmarkPlan, Figure, Part
from ragcache_core.config import ChunkReuse
from ragcache_core.quality import FULL, PREFIX, Method, QualitySummary, read_questions, summarise
from ragcache_core.quality.summary import overall

MODEL = "examples/deep_demo_model"
QUESTIONS = Path("build/deep-questions.jsonl")
"""Written by ``make bench-chunks`` first: the questions of docs/evaluate/chunk-reuse.md, "Four layers and twelve"."""
_DEPENDENT = ("continued", "continued two-hop")
_CACHE_CRAFT = ChunkReuse(selection="cache_craft", alpha=1.0)
_METHODS = (
    Method("as stored", _CACHE_CRAFT.model_copy(update={"alpha": 0.0})),
    Method("cache_craft", _CACHE_CRAFT),
    Method("without focus", _CACHE_CRAFT.model_copy(update={"focus": 0})),
    *(Method(rule, _CACHE_CRAFT) for rule in RULES),
)


def measure_ablations(plan: BenchmarkPlan) -> Part:
    """Answer with alpha 1 as Cache-Craft §6 does: all of it, without a part, and with Algorithm 1's own focus."""
    questions = read_questions(QUESTIONS, limit=20 if plan.is_quick else None)
    found: dict[str, list[QualitySummary]] = {}
    with TemporaryDirectory(prefix="ragcache-rules-") as folder:
        for method in (FULL, PREFIX, *_METHODS):
            env = environment(method.name, Path(folder)) if method.name in RULES else {}
            for _, answers in asked(plan, MODEL, questions, [method], env=env):
                found[method.name] = summarise(method.name, answers)
    prefix = overall(found[PREFIX.name])
    figures = []
    for method in _METHODS:
        every = overall(found[method.name])
        hard = [summary for summary in found[method.name] if summary.kind in _DEPENDENT]
        num_hard = sum(summary.num_questions for summary in hard)
        right = sum(summary.exact_match * summary.num_questions for summary in hard) / max(num_hard, 1)
        figures.append(
            Figure(
                f"em_ablation_{method.name.replace(' ', '_')}",
                round(every.exact_match, 4),
                round(overall(found[FULL.name]).exact_match, 4),
                note=f"computed {every.computed_ratio(prefix):.3f} of prefix caching, {every.recomputed:.3f} of reused "
                f"documents; dependent questions {right:.3f}; ROUGE-L {every.rouge_l:.3f}",
            )
        )
    details = {"model": MODEL, "summaries": [each.to_dict() for summaries in found.values() for each in summaries]}
    return Part(WARM_UP, tuple(figures), details)
