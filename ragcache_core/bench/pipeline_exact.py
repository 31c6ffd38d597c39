"""Whether answers are the same with speculation, whether anything is left behind, and how long an order takes.

The baseline is plain vLLM without any cache. Questions come eight at a time, some searches settle early and others
never do, and every fifth reader goes away in the middle.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np

from ragcache_core.bench.engines import launch
from ragcache_core.bench.pipeline_overlap import ask, chain, launch_engine
from ragcache_core.bench.report import Figure, Part, Plan, percentiles_ms
from ragcache_core.bench.searches import DocumentTexts, SlowedSearch, UnsettledSearch, Vectors, make_store
from ragcache_core.client import Engine
from ragcache_core.retrieval.sources import StageSource

_WORDS = 150
_AT_ONCE = 8
_SEARCH_S = 0.1
_PATIENCE_S = 5.0


def measure_pipeline_exactness(plan: Plan) -> Part:
    """Compare every answer with plain vLLM's, and look what is left when all have ended."""
    num_questions = plan.sized(60, 6)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
        texts = DocumentTexts(plan.corpus, _WORDS)
        vectors = Vectors.draw(300, num_questions, plan.seed)
        store = stack.enter_context(make_store(folder / "store", texts, vectors, 0.5))
        questions = [f"Number {i}: who keeps it?" for i in range(num_questions)]
        sources: list[StageSource] = [
            SlowedSearch(store, dict(zip(questions, vectors.queries, strict=True)), _SEARCH_S),
            UnsettledSearch(texts, 300, _SEARCH_S),
        ]
        with launch_engine(plan) as engine:
            plan.report("exactness: with speculation")
            outcomes = [asyncio.run(_answers(engine, source, questions, speculate=True)) for source in sources]
            ours, tasks_left = [answers for answers, _ in outcomes], sum(left for _, left in outcomes)
            requests_left = asyncio.run(_requests_left(engine))
            stats = engine.stats()
        plan.report("exactness: starting plain vLLM without a cache")
        with launch(plan.model, None, no_enable_prefix_caching=True) as plain:
            theirs = [asyncio.run(_answers(plain, source, questions, speculate=False))[0] for source in sources]
    mismatches = sum(
        a[question] != b[question] for a, b in zip(ours, theirs, strict=True) for question in a.keys() & b.keys()
    )
    compared = sum(len(a.keys() & b.keys()) for a, b in zip(ours, theirs, strict=True))
    speculated = f"{stats.num_speculative_requests} speculations, {stats.num_confirmed_speculations} confirmed"
    figures = (
        Figure("pipeline_requests", compared, note=speculated),
        Figure("pipeline_mismatches", mismatches, 0.0, note="answers unlike plain vLLM's"),
        Figure("requests_left", requests_left, note="in the engine, after all had ended or gone away"),
        Figure("tasks_left", tasks_left, note="in the event loop that asked, as the last answer was there"),
    )
    return Part("none", figures)


async def _answers(
    engine: Engine, source: StageSource, questions: list[str], *, speculate: bool
) -> tuple[dict[str, str], int]:
    """Return the answers by question, and the tasks that are left then.

    Where we speculate, some readers leave early and have no answer.
    """
    before = asyncio.all_tasks()
    answering = chain(engine, source, speculate=speculate)
    turn = asyncio.Semaphore(_AT_ONCE)
    answers: dict[str, str] = {}

    async def one(i: int, question: str) -> None:
        async with turn:
            if speculate and i % 5 == 4:
                leaving = asyncio.create_task(ask(answering, question))
                await asyncio.sleep(_SEARCH_S * (i % 7) / 5)
                leaving.cancel()
                await asyncio.wait([leaving])
                return
            answers[question] = (await ask(answering, question)).text

    async with asyncio.TaskGroup() as group:
        for i, question in enumerate(questions):
            group.create_task(one(i, question))
    return answers, len(asyncio.all_tasks() - before)


async def _requests_left(engine: Engine) -> int:
    """Return how many requests are in the engine once it has had time to hear of those that went away."""
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        stats = await engine.astats()
        if not (num := stats.num_running + stats.num_waiting) or time.monotonic() > ends_s:
            return num
        await asyncio.sleep(0.2)


def measure_arranging(plan: Plan) -> Part:
    """Time the order of five documents while steps of the engine run one after the other."""
    texts = DocumentTexts(plan.corpus, _WORDS)
    rng = np.random.default_rng(plan.seed)
    with launch_engine(plan) as engine:
        answering = chain(engine, UnsettledSearch(texts, 400, 0.0), speculate=False)
        stop = threading.Event()

        def keep_busy(first: int) -> None:
            for i in count(first, 2):
                if stop.is_set():
                    return
                asyncio.run(ask(answering, f"Number {i}: who keeps it?"))

        busy = [threading.Thread(target=keep_busy, args=(i,), name=f"bench-busy-{i}") for i in range(2)]
        plan.report("order: filling the engine")
        for thread in busy:
            thread.start()
        try:
            time.sleep(plan.sized(10, 3))
            times, num_reordered = [], 0
            for _ in range(plan.sized(2_000, 100)):
                documents = [texts.document(int(n)) for n in rng.integers(400, size=5)]
                began_s = time.perf_counter()
                arrangement = engine.arrange_documents(documents, "cache_aware")
                times.append(time.perf_counter() - began_s)
                num_reordered += arrangement.is_reordered
                time.sleep(0.002)
        finally:
            stop.set()
            for thread in busy:
                thread.join()
    p50, p99 = percentiles_ms(times)
    note = f"{num_reordered} of {len(times)} reordered"
    return Part("none", (Figure("arrange_p99_ms", p99, p50_ms=p50, p99_ms=p99, note=note),))
