"""Right answers and computed tokens over few and many documents, short and long ones (Cache-Craft §6, Figure 27)."""

from __future__ import annotations

import random
from itertools import islice

from examples.demo_model_training.recurring import NUM_DOCUMENTS, NUM_FACTS, continued, single_hop
from ragcache_core.bench.quality import FULL, PREFIX, Question, Summary, Way, chunk_ways, summarise
from ragcache_core.config import ChunkReuse
from tests.benchmarks.chunks.answers import ALPHA, THIRTY_PERCENT, WARM_UP, asked
from tests.benchmarks.report import Figure, Part, Plan

SETTINGS: dict[str, tuple[int, tuple[int, int]]] = {
    "3_documents": (3, NUM_FACTS),
    "5_documents": (NUM_DOCUMENTS, NUM_FACTS),
    "8_documents": (8, NUM_FACTS),
    "12_documents": (12, NUM_FACTS),
    "2_facts": (NUM_DOCUMENTS, (2, 2)),
    "5_facts": (NUM_DOCUMENTS, (5, 5)),
}
"""What figures are named by -> how many documents a question has, and how few and many facts an entry tells."""
NUM_QUESTIONS = 45
"""Of each kind and setting."""
SEED = 891_000
WAYS = (
    *chunk_ways("whole_chunks", [ALPHA]),
    Way("30 percent", ChunkReuse(selection="cache_craft", **THIRTY_PERCENT)),
    Way("30 percent, no focus", ChunkReuse(selection="cache_craft", focus=0, **THIRTY_PERCENT)),
)


def measure_context_size(plan: Plan) -> Part:
    """Answer questions of every setting, each about documents of its own, by one engine for each way."""
    num_questions = 4 if plan.is_quick else NUM_QUESTIONS
    by_setting = {name: _questions(num_questions, *setting) for name, setting in SETTINGS.items()}
    every = [question for questions in by_setting.values() for question in questions]
    found: dict[str, dict[str, dict[str, Summary]]] = {name: {} for name in SETTINGS}
    for way, answers in asked(plan, plan.model, every, [FULL, PREFIX, *WAYS]):
        for number, name in enumerate(SETTINGS):
            of_setting = answers[2 * num_questions * number :][: 2 * num_questions]
            found[name][way.name] = {summary.kind: summary for summary in summarise(way.name, of_setting)}
    figures = [_figure(name, way, by_way) for name, by_way in found.items() for way in WAYS]
    summaries = [
        {"setting": name, **summary.to_dict()}
        for name, by_way in found.items()
        for by_kind in by_way.values()
        for summary in by_kind.values()
    ]
    return Part(WARM_UP, tuple(figures), {"summaries": summaries})


def _questions(num_questions: int, num_documents: int, num_facts: tuple[int, int]) -> list[Question]:
    rng = random.Random(f"{SEED} {num_documents} {num_facts}")
    drawn = (kind(rng, num_documents, num_facts) for kind in (single_hop, continued))
    return [question for questions in drawn for question in islice(questions, num_questions)]


def _figure(name: str, way: Way, by_way: dict[str, dict[str, Summary]]) -> Figure:
    found, prefix, full = (by_way[each] for each in (way.name, PREFIX.name, FULL.name))
    num_tokens = full["all"].num_prompt_tokens / full["all"].num_questions
    note = f"computed {found['all'].computed_ratio(prefix['all']):.3f} of prefix caching; continued "
    note += f"{found['continued'].exact_match:.3f} of {full['continued'].exact_match:.3f}; ROUGE-L "
    note += f"{found['all'].rouge_l:.3f}; prompts of {num_tokens:.0f} tokens"
    key = f"em_{name}_{way.name.replace(',', '').replace(' ', '_')}"
    return Figure(key, round(found["all"].exact_match, 4), round(full["all"].exact_match, 4), note=note)
