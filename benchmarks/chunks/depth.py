"""Selections, alphas and orders on a shallow and a deep model, chosen on some questions and reported on others.

``build/bench-depth.json``. The questions recur as those of ``bench-chunks`` do, with three hops and continued bridges
besides, over documents of two seeds that nobody trained on: what keeps the answers of all kinds by both models and
computes least is chosen over the first seed's, all figures are over the second's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.chunks.answers import asked
from benchmarks.command import benchmark
from benchmarks.report import Figure, Part, Plan
from examples.demo_model_training.recurring import DEEP_KINDS, recurring_questions
from ragcache_core.quality import FULL, NAIVE, PREFIX, Summary, Way, chunk_ways, order_ways, summarise
from ragcache_core.quality.summary import ALL_KINDS
from ragcache_core.types import DEFAULT_ALPHA, SelectionName

DEEP_MODEL = Path("examples/deep_demo_model")
CHOICE_SEED, REPORT_SEED = 889_000, 890_000
NUM_QUESTIONS = 16
"""Of each kind and seed."""
MOST_LOST = 1 / NUM_QUESTIONS
"""Of the answers of a kind: one."""
CANDIDATES: dict[SelectionName, tuple[float, ...]] = {
    "whole_chunks": (1.2, 1.4, 1.7, 2.0),
    "cache_craft": (0.3, 1.0),
}

ByWay = Mapping[str, Mapping[str, Summary]]
"""Way -> kind of question -> what it came to."""


def measure_depth(plan: Plan) -> Part:
    """Answer by both models with every selection, alpha and order."""
    num_questions = 4 if plan.is_quick else NUM_QUESTIONS
    choice, report = (recurring_questions(num_questions, seed, DEEP_KINDS) for seed in (CHOICE_SEED, REPORT_SEED))
    candidates = [way for selection, alphas in CANDIDATES.items() for way in chunk_ways(selection, alphas)]
    orders = [PREFIX, *order_ways(("cache_aware", "canonical"), None)]
    ways = [FULL, NAIVE, *orders, *candidates]
    chosen_on: dict[str, ByWay] = {}
    reported: dict[str, ByWay] = {}
    for model in (plan.model, str(DEEP_MODEL)):
        halves: tuple[dict[str, dict[str, Summary]], dict[str, dict[str, Summary]]] = ({}, {})
        for way, answers in asked(plan, model, [*choice, *report], ways):
            for half, part in zip(halves, (answers[: len(choice)], answers[len(choice) :]), strict=True):
                half[way.name] = {summary.kind: summary for summary in summarise(way.name, part)}
        chosen_on[_label(model)], reported[_label(model)] = halves
    names = {
        "default": f"whole_chunks {DEFAULT_ALPHA['whole_chunks']:g}",
        "chosen": chosen(chosen_on.values(), candidates),
        "order": chosen(chosen_on.values(), orders),
        **{label: chosen([by_way], candidates) for label, by_way in chosen_on.items()},
    }
    figures = [
        figure for label, by_way in reported.items() for way in ways for figure in _figures(label, way.name, by_way)
    ]
    summaries = [
        {"model": label, **summary.to_dict()}
        for label, by_way in reported.items()
        for by_kind in by_way.values()
        for summary in by_kind.values()
    ]
    warm_up = "none: every engine starts empty; the questions that a choice is made on are asked first"
    return Part(warm_up, tuple(figures), {"chosen": names, "summaries": summaries})


def chosen(by_model: Collection[ByWay], candidates: Sequence[Way]) -> str | None:
    """Return the candidate that computes least of those that lose at most ``MOST_LOST`` of any kind by any model.

    What it computes is the mean of the models' shares of what prefix caching does; ``None`` if all lose more.
    """
    keeping = [way.name for way in candidates if max(_most_lost(by_way, way.name) for by_way in by_model) <= MOST_LOST]
    return min(keeping, key=lambda name: sum(_computed(by_way, name) for by_way in by_model), default=None)


def _most_lost(by_way: ByWay, name: str) -> float:
    full = by_way[FULL.name]
    return round(max(full[kind].exact_match - summary.exact_match for kind, summary in by_way[name].items()), 9)


def _computed(by_way: ByWay, name: str) -> float:
    return by_way[name][ALL_KINDS].computed_ratio(by_way[PREFIX.name][ALL_KINDS])


def _figures(label: str, name: str, by_way: ByWay) -> list[Figure]:
    full, of_way = by_way[FULL.name], by_way[name]
    by_kind = ", ".join(f"{kind} {summary.exact_match:.3f}" for kind, summary in of_way.items() if kind != ALL_KINDS)
    key = f"{label}_{name.replace(' ', '_')}"
    exact = round(of_way[ALL_KINDS].exact_match, 4)
    return [
        Figure(f"em_{key}", exact, round(full[ALL_KINDS].exact_match, 4), note=by_kind),
        Figure(f"computed_{key}", round(_computed(by_way, name), 4), 1.0, note="share of prefix caching's tokens"),
    ]


def _label(model: str) -> str:
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return f"{config['num_hidden_layers']}_layers"


main = benchmark(
    "bench-depth",
    "Compare selections, alphas and orders of documents on a shallow and a deep model.",
    {"depth": measure_depth},
    {},
    """  python -m benchmarks.chunks.depth
  python -m benchmarks.chunks.depth --quick --output build/smoke.json""",
)

if __name__ == "__main__":
    main()
