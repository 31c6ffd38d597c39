"""What an agent gains whose retriever tool is known: the wait after a tool call, and what a second run finds cached.

The baseline is the same agent with the same tool on the same engine, whose client knows neither tokens nor documents.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool

from ragcache_core import PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, RAGCacheRetriever
from tests.benchmarks.engines import BLOCK_SIZE, block_bytes, launch
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms
from tests.benchmarks.searches import DocumentTexts, DrawnSearch

K = 4
SEARCH_S = 0.3
_WORDS = 290
_GPU_BLOCKS = 2048
_FEW_GPU_BLOCKS, _FEW_HOST_BLOCKS, _FEW_DOCUMENTS = 128, 256, 6
_TOOLS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@dataclass(frozen=True, slots=True)
class Step:
    """The answer after a tool call: seconds from the call to its first token, and prompt tokens from the cache."""

    wait_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


def measure_agents(plan: Plan) -> Part:
    """Ask each question twice, on three sides in turn; then all of them twice where memory is short."""
    lines = (plan.corpus.parent / "demo_corpus_questions.jsonl").read_text("utf-8").splitlines()
    asked = [q["question"] for q in map(json.loads, lines) if q["kind"] == "single"]
    *asked, first = asked[: plan.sized(40, 4)]
    texts = DocumentTexts(plan.corpus, _WORDS)
    plan.report("agents: starting the engine")
    with ExitStack() as stack:
        engine = stack.enter_context(_launch(plan, _GPU_BLOCKS, host_bytes=0))
        sides = _sides(engine, stack, DrawnSearch(texts, 1_000_000, SEARCH_S))
        asyncio.run(_run(sides["ours"], first))  # learns how the tool shows documents; the server is asked once
        steps: dict[str, list[list[Step]]] = {name: [] for name in sides}
        for i, question in enumerate(asked):
            plan.report(f"agents: question {i + 1} of {len(asked)}")
            name = [*sides][i % 3]
            steps[name].append([asyncio.run(_run(sides[name], question)) for _ in range(2)])
    figures = [_figure(f"agent_wait_ratio{suffix}", steps, i) for i, suffix in enumerate(("", "_again"))]
    shares = {}
    for name in ("without", "ours"):
        with ExitStack() as stack:
            plan.report(f"agents: starting an engine with little memory, {name}")
            size = _FEW_HOST_BLOCKS * block_bytes(plan.model)
            engine = stack.enter_context(_launch(plan, _FEW_GPU_BLOCKS, host_bytes=size))
            agent = _sides(engine, stack, DrawnSearch(texts, _FEW_DOCUMENTS, 0.0))[name]
            told = [asyncio.run(_run(agent, question)) for _ in range(2) for question in asked]
            shares[name] = sum(s.num_cached_tokens for s in told) / sum(s.num_prompt_tokens for s in told)
    note = f"of prompt tokens of answers, two rounds over {len(asked)} questions about {_FEW_DOCUMENTS} documents"
    figures.append(Figure("agent_cached_share", round(shares["ours"], 4), round(shares["without"], 4), note=note))
    return Part(
        "1 question", tuple(figures), {"steps": {k: [[vars_of(s) for s in r] for r in v] for k, v in steps.items()}}
    )


def _figure(key: str, steps: dict[str, list[list[Step]]], run: int) -> Figure:
    waits = {name: [each[run].wait_s for each in runs] for name, runs in steps.items()}
    cached = {name: median(each[run].num_cached_tokens for each in runs) for name, runs in steps.items()}
    ratio = median(waits["without"]) / median(waits["ours"])
    rest = ", ".join(
        f"{name} {1000 * median(times):.0f} ms, {cached[name]:.0f} tokens cached" for name, times in waits.items()
    )
    return Figure(key, round(ratio, 3), 1.0, *percentiles_ms(waits["ours"]), f"median from call to first token: {rest}")


def _launch(plan: Plan, num_blocks: int, *, host_bytes: int) -> Engine:
    cache = CacheConfig(
        kv_cache_bytes=num_blocks * block_bytes(plan.model), block_size=BLOCK_SIZE, host_bytes=host_bytes
    )
    return launch(plan.model, cache, max_num_batched_tokens=512, **_TOOLS)


def _sides(engine: Engine, stack: ExitStack, source: DrawnSearch) -> dict[str, Any]:
    """Return the agent as it is, one that prefills nothing, and one whose client knows no documents."""
    blind = stack.enter_context(Engine.connect(engine.base_url, api_key=engine.api_key, tokenizer=False))

    def agent(asked: Engine, **settings: Any) -> Any:
        retriever = RAGCacheRetriever(store=source, k=K, **settings)
        tool = create_retriever_tool(retriever, "search", "Search the documents.")
        llm = ChatRAGCache(engine=asked, temperature=0, max_tokens=32)
        return create_agent(llm, [tool], system_prompt=PromptLayout().static_prefix)

    return {
        "without": agent(blind),
        "named": agent(engine, engine=engine, speculate=False),
        "ours": agent(engine, engine=engine),
    }


async def _run(agent: Any, question: str) -> Step:
    """Have an agent answer one question."""
    told = CacheStatsCallbackHandler()
    called_s = first_s = 0.0
    has_result = False
    async for chunk, _ in agent.astream(
        {"messages": [HumanMessage(question)]}, {"callbacks": [told], "recursion_limit": 4}, stream_mode="messages"
    ):
        if isinstance(chunk, ToolMessage):
            has_result = True
        elif isinstance(chunk, AIMessageChunk) and not has_result:
            called_s = time.perf_counter()
        elif isinstance(chunk, AIMessageChunk) and chunk.content and not first_s:
            first_s = time.perf_counter()
    assert first_s, f"no answer to {question!r}: the model called no tool"
    _, stats = told.runs[-1]
    return Step(first_s - called_s, stats.num_prompt_tokens, stats.num_cached_tokens)


def vars_of(step: Step) -> dict[str, float]:
    """Return a step as plain JSON data."""
    return {"wait_ms": round(1000 * step.wait_s, 2), "prompt": step.num_prompt_tokens, "cached": step.num_cached_tokens}
