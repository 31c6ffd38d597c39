"""How much of a search is hidden, what that does to the time to the first token, and what it costs when it is wrong.

The ordinary case is the same chain without speculation: both see the same kind of questions in the same run, each about
documents that no cache holds, so that a prefill is a whole prefill.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.engines import BLOCK_SIZE, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.searches import DocumentTexts, SlowedSearch, UnsettledSearch, Vectors, make_store
from ragcache_core.client import Engine
from ragcache_core.client.pipeline.histories import HISTORIES
from ragcache_core.config import CacheConfig
from ragcache_core.retrieval import DocumentStore, StageSource
from ragcache_core.stats import EngineStats
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout

SHARES = (0.125, 0.25, 0.5, 1.0)
FULL_SEARCH_S = 0.4
"""A search of all vectors, as in Table 3 of the paper (0.42 s); a share of them takes that share of the time."""
K = 2
_WORDS = 330
_WORDS_LOADED = 500
_UNSETTLED_SEARCH_S = 0.2
_GPU_BLOCKS = 2048
_MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OverlapAnswer:
    """One question: seconds from asking to the first token, of its search, and of the search that was not hidden.

    What is hidden is told by the pipeline; the time to the first token is measured at the reader.
    """

    ttft_s: float
    search_s: float
    unhidden_s: float
    text: str


def measure_overlap(plan: BenchmarkPlan) -> Part:
    """Ask at a low rate, with searches of several lengths, and with one as long as a prefill."""
    num_queries = plan.sized(24, 3)
    num_documents = plan.sized(2_000, 300)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
        texts = DocumentTexts(plan.corpus, _WORDS)
        vectors = Vectors.draw(num_documents, 2 * (num_queries + 2) * (len(SHARES) + 1), plan.seed)
        plan.report("overlap: making stores")
        stores = {s: stack.enter_context(make_store(folder / f"{s}", texts, vectors, s)) for s in SHARES}
        engine = stack.enter_context(launch_engine(plan))
        questions = iter(range(len(vectors.queries)))
        figures: list[Figure] = []
        details: dict[str, Any] = {}
        prefills: list[float] = []
        for share in (*SHARES, None):
            search_s = share * FULL_SEARCH_S if share is not None else fmean(prefills)
            name = f"{100 * share:g} %" if share is not None else "as long as a prefill"
            plan.report(f"overlap: search {name}")
            taken = [next(questions) for _ in range(2 * num_queries + 4)]
            queries = {f"Number {i}: who keeps it?": vectors.queries[i] for i in taken}
            source = SlowedSearch(stores[share or 1.0], queries, search_s)
            chains = (chain(engine, source, speculate=False), chain(engine, source, speculate=True))
            plain, ours = asyncio.run(ask_in_turn(chains, list(queries)))
            prefills += [a.ttft_s - a.search_s for a in plain]
            figures += _overlap_figures(share, plain, ours)
            details[name] = {
                "search_s": search_s,
                "plain": [asdict(a) for a in plain],
                "ours": [asdict(a) for a in ours],
            }
    lowest = min(f.value for f in figures if f.key.startswith("unhidden_search_ratio_"))
    figures.insert(0, Figure("unhidden_search_ratio", lowest, 1.0, note="the lowest of the four"))
    return Part("2 questions on each side", tuple(figures), details)


def _overlap_figures(
    share: float | None, plain: Sequence[OverlapAnswer], ours: Sequence[OverlapAnswer]
) -> list[Figure]:
    ttft = fmean(a.ttft_s for a in plain) / fmean(a.ttft_s for a in ours)
    p50, p99 = percentiles_ms([a.ttft_s for a in ours])
    base50, _ = percentiles_ms([a.ttft_s for a in plain])
    if share is None:
        note = f"search of {1000 * fmean(a.search_s for a in plain):.0f} ms; TTFT p50 without {base50:.0f} ms"
        return [Figure("ttft_ratio_balanced", round(ttft, 3), 1.0, p50, p99, note)]
    unhidden_s, search_s = fmean(a.unhidden_s for a in ours), fmean(a.unhidden_s for a in plain)
    name = f"{100 * share:g}".replace(".5", "")
    note = f"{1000 * search_s:.1f} ms not hidden without, {1000 * unhidden_s:.1f} ms with; p50, p99 of TTFT"
    known_s = fmean(a.ttft_s - a.search_s for a in plain)  # the request is sent when the search has ended
    price_s = fmean(a.ttft_s for a in ours) - known_s
    price_note = f"ms, as a reader waits longer than the {1000 * known_s:.1f} ms of a request whose documents are known"
    return [
        Figure(f"unhidden_search_ratio_{name}", round(search_s / unhidden_s, 3), 1.0, p50, p99, note),
        Figure(f"ttft_ratio_{name}", round(ttft, 3), 1.0, p50, p99, f"TTFT p50 without {base50:.0f} ms"),
        Figure(f"ttft_over_known_{name}", round(1000 * price_s, 1), round(1000 * search_s, 1), note=price_note),
    ]


async def ask_in_turn(
    chains: tuple[SpeculativeRAG, SpeculativeRAG], questions: Sequence[str]
) -> tuple[list[OverlapAnswer], list[OverlapAnswer]]:
    """Ask one question of one chain and the next of the other; the first four warm up."""
    answers: tuple[list[OverlapAnswer], list[OverlapAnswer]] = ([], [])
    for i, question in enumerate(questions):
        side = (i + i // 2) % 2  # who goes first alternates
        asked = await ask(chains[side], question)
        if i >= 4:
            answers[side].append(asked)
        await asyncio.sleep(0.05)  # the engine comes to rest: no question waits for what the last one left
    return answers


def measure_never_settles(plan: BenchmarkPlan) -> Part:
    """Load the engine to 95 % of what it can serve, with searches whose candidates are wrong until the end.

    Every run has new retrievers: of a source that was searched before, as after a restart, and of a ``new`` one.
    """
    count, runs, num_warm_up = plan.sized(120, 8), plan.sized(5, 1), plan.sized(60, 8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
        stack.callback(setattr, HISTORIES, "folder", HISTORIES.folder)
        HISTORIES.folder = folder
        engine = stack.enter_context(launch_engine(plan))
        new = UnsettledSearch(DocumentTexts(plan.corpus, _WORDS_LOADED), 1_000_000, _UNSETTLED_SEARCH_S)
        known = replace(new, identity="never settles")
        plan.report("never settles: what can be served")
        capacity = _capacity(chain(engine, new, speculate=False), num_warm_up)
        rng = np.random.default_rng(plan.seed)
        gaps_s = rng.exponential(1 / (0.95 * capacity), num_warm_up).tolist()
        asyncio.run(_open_loop(chain(engine, known, speculate=True), "w", gaps_s))
        ratios: dict[str, list[float]] = {"known": [], "new": []}
        waste: dict[str, list[float]] = {"known": [], "new": []}
        times: list[float] = []
        for run in range(runs):
            gaps_s = rng.exponential(1 / (0.95 * capacity), count).tolist()
            HISTORIES.forget()
            sides = {
                "without": chain(engine, new, speculate=False),
                "known": chain(engine, known, speculate=True),
                "new": chain(engine, new, speculate=True),
            }
            means = {}
            for name, answering in sorted(sides.items(), reverse=run % 2 == 1):
                plan.report(f"never settles: run {run + 1} of {runs}, {name}")
                before = engine.stats()
                asked = asyncio.run(_open_loop(answering, f"{run}{name}", gaps_s))
                means[name] = fmean(a.ttft_s - a.search_s for a in asked)
                if name in waste:
                    times += [a.ttft_s for a in asked]
                    waste[name].append(_wasted_share(before, engine.stats()))
            for name, values in ratios.items():
                values.append(means[name] / means["without"])
    p50, p99 = percentiles_ms(times)
    notes = {name: f"runs {', '.join(f'{r:.2f}' for r in values)}" for name, values in ratios.items()}
    note = f"new retrievers of a known source; median of {notes['known']}; {0.95 * capacity:.1f} requests/s"
    figures = (
        Figure("ttft_ratio_never_settles", round(median(ratios["known"]), 4), 1.0, p50, p99, note),
        Figure("ttft_ratio_never_settles_new", round(median(ratios["new"]), 4), 1.0, note=f"median of {notes['new']}"),
        Figure("wasted_tokens_share", round(fmean(waste["known"]), 4), 0.0, note="of all prompt tokens"),
        Figure("wasted_tokens_share_new", round(fmean(waste["new"]), 4), 0.0, note="of new retrievers of new sources"),
    )
    return Part(f"{num_warm_up} questions on each side", figures, {"ratios": ratios, "capacity": capacity})


def _wasted_share(before: EngineStats, after: EngineStats) -> float:
    """Return the share of prompt tokens computed between two readings for wrong speculations."""
    num_wasted = after.num_wasted_tokens - before.num_wasted_tokens
    return num_wasted / (after.num_prompt_tokens - before.num_prompt_tokens)


def _capacity(answering: SpeculativeRAG, count: int) -> float:
    """Return the requests per second that come out when more go in than that."""
    began_s = time.perf_counter()
    asyncio.run(_open_loop(answering, "capacity", [0.0] * count))
    return count / (time.perf_counter() - began_s - _UNSETTLED_SEARCH_S)


async def _open_loop(answering: SpeculativeRAG, name: str, gaps_s: Sequence[float]) -> list[OverlapAnswer]:
    """Ask each question when its time has come, whatever became of those before."""
    tasks = []
    async with asyncio.TaskGroup() as group:
        for i, gap_s in enumerate(gaps_s):
            await asyncio.sleep(gap_s)  # arrivals of an open loop
            tasks.append(group.create_task(ask(answering, f"Number {name}-{i}: who keeps it?")))
    return [task.result() for task in tasks]


def launch_engine(plan: BenchmarkPlan) -> Engine:
    """Return an engine whose prefills are as short as steps of 512 tokens."""
    cache = CacheConfig(kv_cache_bytes=_GPU_BLOCKS * block_bytes(plan.model), block_size=BLOCK_SIZE, host_bytes=0)
    plan.report("starting the engine")
    return launch(plan.model, cache, max_num_batched_tokens=512)


def chain(
    engine: Engine, source: DocumentStore | StageSource, *, speculate: bool, k: int = K, **settings: Any
) -> SpeculativeRAG:
    """Return the fused pair over ``source``, or the same without speculation; ``settings`` are the retriever's."""
    return SpeculativeRAG(
        retriever=RAGCacheRetriever(store=source, engine=engine, k=k, speculate=speculate, **settings),
        prompt=prompt_from_layout(),
        llm=ChatRAGCache(engine=engine, max_tokens=_MAX_TOKENS, temperature=0),
    )


async def ask(answering: SpeculativeRAG, question: str) -> OverlapAnswer:
    """Stream one answer, and return its times."""
    began_s = time.perf_counter()
    first_s: float | None = None
    text = ""
    report: Mapping[str, Any] = {}
    async for chunk in answering.astream(question):
        if chunk.content and first_s is None:
            first_s = time.perf_counter() - began_s
        text += str(chunk.content)
        report = (chunk.response_metadata.get("ragcache") or {}).get("pipeline") or report
    assert first_s is not None, f"no token came for {question!r}"
    return OverlapAnswer(first_s, float(report["search_s"]), float(report["non_overlapped_search_s"]), text)
