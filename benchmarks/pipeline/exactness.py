"""Whether answers are the same with speculation, token for token, and whether anything is left behind.

The baseline is plain vLLM without any cache, asked in the same way for the same documents in the same order; prompts
and answers are compared by their token ids. Questions come eight at a time, some searches settle early and others never
do, every fifth reader goes away (cancelled during the search, or after the first piece of a stream), and at last the
engine is killed while it answers ahead of three searches.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.engines import kill_engine_core, launch
from benchmarks.pipeline.answer_tap import AnswerTap, HandedOver
from benchmarks.pipeline.entry_points import BLOCKING, WAYS, Over
from benchmarks.pipeline.overlap import launch_engine
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.searches import DocumentTexts, DrawnSearch, SlowedSearch, UnsettledSearch, Vectors, make_store
from ragcache_core.client import Engine
from ragcache_core.ordering import DocumentOrder
from ragcache_core.retrieval.sources import StageSource
from ragcache_core.types import RetrievalUpdate

_WORDS = 150
_NUM_DOCUMENTS, _NUM_SHARED = 300, 8
_AT_ONCE = 8
_SEARCH_S = 0.1
_TIMEOUT_S = 5.0
_CLOSING_S = 1.0
"""How long LangChain may take to close the generators of an ordinary chain that was left, which it does in tasks."""
_LONG = 200
"""Tokens of an answer that is still under way when the engine is killed."""
_ORDERED = ("chain, astream", "fused, ainvoke", "aquery")
_RECORD = re.compile(r"Record (\d+)\. ")


@dataclass(frozen=True, slots=True)
class ExactnessCase:
    """Questions that are asked in one way over one search."""

    way: str
    source: StageSource
    questions: tuple[str, ...]
    k: int = 2
    order: DocumentOrder = "retrieval"
    num_tokens: int = 8

    def leaves(self, i: int) -> bool:
        """Return whether the reader of question ``i`` goes away in the middle."""
        return i % 5 == 4 and self.way not in BLOCKING

    def awaited(self) -> list[str]:
        """Return the questions whose answers are read to the end."""
        return [question for i, question in enumerate(self.questions) if not self.leaves(i)]


@dataclass(frozen=True, slots=True)
class Reordered:
    """A search that finds at once what ``source`` finds in the end, in the order that another prompt has shown."""

    source: StageSource
    shown: Mapping[str, Sequence[str]]

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the only stage; documents that the other prompt did not show stand at its end."""
        final = [update async for update in self.source.stages(query, k)][-1]
        order = list(self.shown.get(query, ()))
        documents = sorted(final.documents, key=lambda d: order.index(d.doc_id) if d.doc_id in order else len(order))
        yield replace(final, documents=tuple(documents), stage=0)


class Death:
    """Kills the engine's core, once, when it answers ahead of ``num_awaited`` searches."""

    def __init__(self, engine: Engine, num_awaited: int) -> None:
        self._engine, self._num_awaited = engine, num_awaited
        self._num_before = engine.stats().num_speculative_requests
        self._lock = asyncio.Lock()
        self._is_over = False

    async def come(self) -> None:
        """Wait until it has come."""
        async with self._lock:
            if self._is_over:
                return
            ends_s = time.monotonic() + _TIMEOUT_S
            while not await self._is_due() and time.monotonic() < ends_s:  # noqa: ASYNC110  (the engine makes it due)
                await asyncio.sleep(0.02)  # nothing tells of it: it is asked
            kill_engine_core(self._engine)
            self._is_over = True

    async def _is_due(self) -> bool:
        return (await self._engine.astats()).num_speculative_requests - self._num_before >= self._num_awaited


@dataclass(frozen=True, slots=True)
class DeadlySearch:
    """A search that settles at once, and ends when the engine that answers ahead of it has been killed."""

    source: StageSource
    death: Death

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the final documents twice; the engine dies in between."""
        final = [update async for update in self.source.stages(query, k)][-1]
        yield replace(final, stage=0, is_final=False)
        await self.death.come()
        yield replace(final, stage=1)


def measure_pipeline_exactness(plan: BenchmarkPlan) -> Part:
    """Compare every answer with plain vLLM's, and look what is left when all have ended."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
        texts = DocumentTexts(plan.corpus, _WORDS)
        cases = _cases(plan, texts, folder, stack)
        last = [
            ExactnessCase(
                way, DrawnSearch(texts, _NUM_DOCUMENTS, _SEARCH_S), (f"Who is the last, {way}?",), num_tokens=_LONG
            )
            for way in _ORDERED
        ]
        with launch_engine(plan) as engine:
            tap = AnswerTap(engine)
            plan.report("exactness: with speculation")
            tasks_left = asyncio.run(_ask_all(engine, cases, speculate=True))
            requests_left = asyncio.run(_requests_left(engine))
            stats = engine.stats()
            plan.report("exactness: killing the engine while it answers ahead")
            death = Death(engine, num_awaited=len(last))
            deadly = [replace(case, source=DeadlySearch(case.source, death)) for case in last]
            tasks_left += asyncio.run(_ask_all(engine, deadly, speculate=True))
            requests_left += asyncio.run(_requests_left(engine))
            num_restarts = engine.num_restarts()
            ours = tap.answers
        plan.report("exactness: starting plain vLLM without a cache")
        with launch(plan.model, None, no_enable_prefix_caching=True) as plain:
            tap = AnswerTap(plain)
            asyncio.run(_ask_all(plain, [_as_shown(case, ours) for case in (*cases, *last)], speculate=False))
            theirs = tap.answers
    compared = [question for case in (*cases, *last) for question in case.awaited()]
    unlike = [question for question in compared if not _are_equal(ours.get(question), theirs.get(question))]
    speculated = (
        f"{stats.num_speculative_requests} speculations, {stats.num_confirmed_speculations} confirmed, "
        f"{stats.num_reordered_prompts} prompts reordered"
    )
    figures = (
        Figure("pipeline_requests", len(compared), note=f"{speculated}; {num_restarts} restart in the middle"),
        Figure("pipeline_mismatches", len(unlike), 0.0, note="prompts or answers unlike plain vLLM's, by token ids"),
        Figure("requests_left", requests_left, note="in the engine, after all had ended or gone away"),
        Figure("tasks_left", tasks_left, note=f"in the event loop that asked, {_CLOSING_S:g} s after the last answer"),
    )
    return Part("none", figures, {"unlike": unlike, "num_restarts": num_restarts})


def _cases(plan: BenchmarkPlan, texts: DocumentTexts, folder: Path, stack: ExitStack) -> list[ExactnessCase]:
    """Return every way over two searches, then every order over documents that many questions share."""
    count, num_ordered = plan.sized(10, 5), plan.sized(16, 5)
    vectors = Vectors.draw(_NUM_DOCUMENTS, len(WAYS) * count, plan.seed)
    numbers = iter(range(10**6))

    def some(count: int) -> tuple[str, ...]:
        return tuple(f"Number {next(numbers)}: who keeps it?" for _ in range(count))

    settled = [some(count) for _ in WAYS]
    asked = [question for questions in settled for question in questions]
    store = stack.enter_context(make_store(folder / "store", texts, vectors, 0.5))
    slowed = SlowedSearch(store, dict(zip(asked, vectors.queries, strict=True)), _SEARCH_S)
    unsettled = UnsettledSearch(texts, _NUM_DOCUMENTS, _SEARCH_S)
    shared = DrawnSearch(texts, _NUM_SHARED, _SEARCH_S)
    orders: tuple[DocumentOrder, ...] = ("canonical", "cache_aware")
    return [
        *(ExactnessCase(way, slowed, questions) for way, questions in zip(WAYS, settled, strict=True)),
        *(ExactnessCase(way, unsettled, some(count)) for way in WAYS),
        *(ExactnessCase(way, shared, some(num_ordered), k=3, order=order) for order in orders for way in _ORDERED),
    ]


def _as_shown(case: ExactnessCase, ours: Mapping[str, HandedOver]) -> ExactnessCase:
    """Return a case for plain vLLM, which cannot choose an order by its cache: it gets the one that was chosen."""
    questions = tuple(case.awaited())
    if case.order != "cache_aware":
        return replace(case, questions=questions)
    shown = {question: _shown(ours[question]) for question in questions if question in ours}
    return replace(case, questions=questions, order="retrieval", source=Reordered(case.source, shown))


def _are_equal(ours: HandedOver | None, theirs: HandedOver | None) -> bool:
    return ours is not None and ours == theirs and bool(ours.prompt_token_ids and ours.token_ids)


def _shown(answer: HandedOver) -> list[str]:
    return [f"document-{number}" for number in _RECORD.findall(answer.prompt)]


async def _ask_all(engine: Engine, cases: Sequence[ExactnessCase], *, speculate: bool) -> int:
    """Ask everything, a few questions at once; return the tasks that are left in the loop then."""
    before = asyncio.all_tasks()
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(asking: Awaitable[None], leaves_after_s: float | None) -> None:
        async with turn:
            task = asyncio.ensure_future(asking)
            if leaves_after_s is not None:
                await asyncio.sleep(leaves_after_s)  # how far it gets before its client goes away is what varies
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async with asyncio.TaskGroup() as group:
        for case in cases:
            ask = WAYS[case.way](Over(engine, case.source, case.k, case.order, speculate, case.num_tokens))
            for i, question in enumerate(case.questions):
                leaves = speculate and case.leaves(i)
                is_cancelled = leaves and (i % 2 == 0 or "stream" not in case.way)
                group.create_task(one(ask(question, leaves), _SEARCH_S * (i % 7) / 5 if is_cancelled else None))
    ends_s = time.monotonic() + _CLOSING_S
    while (left := len(asyncio.all_tasks() - before)) and time.monotonic() < ends_s:  # noqa: ASYNC110  (LangChain's)
        await asyncio.sleep(0.02)  # nothing tells when they end
    return left


async def _requests_left(engine: Engine) -> int:
    """Return how many requests are in the engine once it has had time to hear of those that went away."""
    ends_s = time.monotonic() + _TIMEOUT_S
    while True:
        stats = await engine.astats()
        if not (num := stats.num_running + stats.num_waiting) or time.monotonic() > ends_s:
            return num
        await asyncio.sleep(0.2)  # nothing tells when the engine has heard of them
