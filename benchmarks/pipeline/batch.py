"""An offline batch in its own order, in bounded changes of it, and in the order of common prefixes.

All orders answer the same questions over the same retrieved documents on an engine whose cache was emptied before. The
documents are pages of several entries, so that a page is longer than a block and questions about it differ.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.engines import BLOCK_SIZE, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part
from examples.demo_model_training.recurring import single_hop, two_hop
from ragcache_core import Document
from ragcache_core.batch_order import arrange_documents, order_requests
from ragcache_core.client import Engine, Generation
from ragcache_core.client.batch import prefix_key, run_in_order
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import PromptLayout
from ragcache_core.quality import Question
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import DocId

_T = TypeVar("_T")
_ENTRIES_OF_A_PAGE = 5
NUM_SHOWN = 4
"""Pages that are retrieved for a question."""
_WINDOW = 32
_MAX_SEQS = 8
_IN_FLIGHT = 16
_MAX_TOKENS = 16
_CACHE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Questions, and the pages that are retrieved for each."""

    questions: Sequence[Question]
    retrieved: Sequence[Sequence[DocId]]
    pages: Mapping[DocId, Document]

    def prompts(self, shown: Sequence[Sequence[DocId]]) -> list[list[Mapping[str, object]]]:
        """Return the messages of each question with the pages ``shown`` to it."""
        layout = PromptLayout()
        pairs = zip(self.questions, shown, strict=True)
        return [layout.messages([self.pages[i] for i in ids], question.text) for question, ids in pairs]


@dataclass(frozen=True, slots=True)
class _OrderRun:
    """One order's answers, in the order of the questions, and the time that all of them took."""

    answers: Sequence[Generation]
    duration_s: float

    @property
    def num_computed(self) -> int:
        return sum(a.stats.num_prompt_tokens - a.stats.num_cached_tokens for a in self.answers)

    def num_equal(self, other: _OrderRun) -> int:
        """Return how many answers are those of another run, word for word."""
        return sum(a.text == b.text for a, b in zip(self.answers, other.answers, strict=True))

    def num_right(self, questions: Sequence[Question]) -> int:
        return sum(a.text.strip().rstrip(".") in q.answers for a, q in zip(self.answers, questions, strict=True))


def measure_batch(plan: BenchmarkPlan) -> Part:
    """Answer one batch in several orders, each from an empty cache; the median of rounds that alternate them."""
    batch = make_page_batch(plan.sized(160, 12), plan.seed)
    num_tokens = {doc_id: len(page.text) for doc_id, page in batch.pages.items()}
    own = batch.prompts(batch.retrieved)
    moved = batch.prompts(arrange_documents(batch.retrieved, num_tokens))
    by_id = batch.prompts([sorted(ids) for ids in batch.retrieved])
    identity = list(range(len(own)))
    arms = {
        "own": (own, identity),
        "window": (own, [i for part in _parts(identity, _WINDOW) for i in _sorted(own, part)]),
        "batch": (own, _sorted(own, identity)),
        "canonical": (by_id, _sorted(by_id, identity)),
        "documents": (moved, _sorted(moved, identity)),
    }
    runs: dict[str, list[_OrderRun]] = {name: [] for name in arms}
    with _launch(plan) as engine:
        engine.remember_documents(batch.pages.values())
        for round_ in range(plan.sized(2, 1)):
            for name in reversed(arms) if round_ % 2 else arms:
                plan.report(f"batch: {name}, round {round_}")
                engine.cache.purge()
                runs[name].append(_answer(engine, *arms[name]))
    baseline = runs["own"]
    figures = []
    for name, found in runs.items():
        computed = median(run.num_computed / base.num_computed for run, base in zip(found, baseline, strict=True))
        seconds = median(run.duration_s / base.duration_s for run, base in zip(found, baseline, strict=True))
        equal = found[0].num_equal(baseline[0])
        note = f"{equal} of {len(own)} answers equal, {found[0].num_right(batch.questions)} right"
        figures += [
            Figure(f"batch_computed_{name}", round(computed, 4), 1.0, note=note),
            Figure(f"batch_seconds_{name}", round(seconds, 4), 1.0, note=f"median of {len(found)} rounds"),
        ]
    details = {
        name: [{"computed": run.num_computed, "seconds": run.duration_s} for run in found]
        for name, found in runs.items()
    }
    num_prompt = sum(a.stats.num_prompt_tokens for a in baseline[0].answers)
    return Part(
        "none: each run begins with an empty cache", tuple(figures), {"num_prompt_tokens": num_prompt, "runs": details}
    )


def _sorted(prompts: Sequence[Sequence[Mapping[str, object]]], places: Sequence[int]) -> list[int]:
    return [places[i] for i in order_requests([prefix_key(prompts[place]) for place in places])]


def _parts(values: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def make_page_batch(count: int, seed: int) -> PageBatch:
    """Return questions about popular entries, and what a store of pages finds for them."""
    rng = random.Random(seed)
    questions = [next(source) for source in (single_hop(rng), two_hop(rng)) for _ in range(count // 2)]
    rng.shuffle(questions)
    entries = sorted({document.text for question in questions for document in question.documents})
    rng.shuffle(entries)
    texts = ["\n".join(part) for part in _parts(entries, _ENTRIES_OF_A_PAGE)]
    pages = {f"page-{number:03}": Document(f"page-{number:03}", text) for number, text in enumerate(texts)}
    with tempfile.TemporaryDirectory() as folder, DocumentStore.create(Path(folder) / "store", index="flat") as store:
        store.add(pages.values())
        found = [[d.doc_id for d in store.search(question.text, NUM_SHOWN).documents] for question in questions]
    return PageBatch(questions, found, pages)


def _answer(engine: Engine, prompts: Sequence[Sequence[Mapping[str, object]]], order: Sequence[int]) -> _OrderRun:
    answers: dict[int, Generation] = {}

    async def answer(index: int) -> None:
        answers[index] = await engine.agenerate(prompts[index], max_tokens=_MAX_TOKENS)

    began_s = time.perf_counter()
    asyncio.run(run_in_order(order, answer, _IN_FLIGHT))
    return _OrderRun([answers[i] for i in range(len(prompts))], time.perf_counter() - began_s)


def _launch(plan: BenchmarkPlan) -> Engine:
    cache = CacheConfig(
        kv_cache_bytes=_CACHE_TOKENS // BLOCK_SIZE * block_bytes(plan.model), block_size=BLOCK_SIZE, host_bytes=0
    )
    return launch(plan.model, cache, max_num_seqs=_MAX_SEQS, max_num_batched_tokens=1024)
