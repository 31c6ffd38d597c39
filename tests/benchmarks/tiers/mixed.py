"""Exactness of what applications do: agents, filtered searches and conversations, with documents forgotten meanwhile.

The same sessions are asked of plain vLLM, which is sent the messages alone and caches nothing, and of an engine with
all tiers, through ``ChatRAGCache`` and ``RAGCacheRetriever``: documents are known, candidates prefilled, histories
kept.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.utils import convert_to_openai_messages

from examples._shared import demo_documents, demo_questions
from ragcache_core import Document, DocumentStore, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)
from tests.benchmarks.engines import BLOCK_SIZE, block_bytes, launch
from tests.benchmarks.report import Figure, Part, Plan

_IN_FLIGHT = 6
_MAX_TOKENS = 16
_TURNS = 4
_FORGET_EVERY = 20
_GPU_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 90, 60, 300
_KINDS = ("person", "city", "company", "country")
_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
_Ask = Callable[[Sequence[AnyMessage], list[dict[str, Any]]], Awaitable[tuple[str, list[str]]]]
"""Answers a chat with tools: the text, and its tokens."""


@dataclass(frozen=True, slots=True)
class Session:
    """What one user does: ``questions`` of a ``conversation``, or one to an ``agent`` or over a ``filtered`` search."""

    kind: str
    questions: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """How many answers it takes: an agent's first is before its tool's result, its second after."""
        return 2 if self.kind == "agent" else len(self.questions)


def sessions_of(num_requests: int, seed: int) -> list[Session]:
    """Return sessions of ``num_requests`` requests or a few more, of all kinds alike, about few documents and many."""
    rng = random.Random(seed)
    asked = [question["question"] for kind in ("single", "two-hop", "yes-no") for question in demo_questions(kind)]
    popular = rng.sample(asked, 25)

    def question() -> str:
        return rng.choice(popular) if rng.random() < 0.7 else rng.choice(asked)

    sessions: list[Session] = []
    while sum(session.num_requests for session in sessions) < num_requests:
        wanted: dict[str, Any] = {"k": rng.choice((1, 2, 3))}
        if rng.random() < 0.5:
            wanted["filter"] = {"kind": {"$in": rng.sample(_KINDS, 2)}}
        sessions += [
            Session("filtered", (question(),), wanted),
            Session("agent", (question(),), {"k": 2}),
            Session("conversation", tuple(question() for _ in range(rng.randint(2, _TURNS))), {"k": 2}),
        ]
    return sessions


async def answers_of(
    session: Session,
    ask: _Ask,
    search: Callable[[str, dict[str, Any]], Awaitable[list[LangChainDocument]]],
) -> list[list[str]]:
    """Return the tokens of every answer of a session."""
    layout, tokens = PromptLayout(), []
    if session.kind == "agent":
        (question,) = session.questions
        messages: list[AnyMessage] = [SystemMessage(layout.static_prefix), HumanMessage(question)]
        tokens.append((await ask(messages, [_TOOL]))[1])
        call = {"name": "search", "args": {"query": question}, "id": "call-1"}
        found = await search(question, session.settings)
        result = "\n\n".join(document.page_content for document in found)
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(result, tool_call_id="call-1", name="search")]
        tokens.append((await ask(messages, [_TOOL]))[1])
        return tokens
    told: list[AnyMessage] = []
    for question in session.questions:
        found = await search(question, session.settings)
        documents = [Document(document.id or "", document.page_content) for document in found]
        shown = layout.messages(documents, question)
        system, user = SystemMessage(shown[0]["content"]), HumanMessage(shown[-1]["content"])
        told += [user] if told else [system, user]
        text, said = await ask(told, [])
        tokens.append(said)
        told.append(AIMessage(text))
    return tokens


def measure_mixed(plan: Plan) -> Part:
    """Ask every session of plain vLLM and of all tiers, and compare the answers token by token."""
    return asyncio.run(_measure(plan))


async def _measure(plan: Plan) -> Part:
    sessions = sessions_of(plan.sized(500, 24), plan.seed)
    size = block_bytes(plan.model)
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        with DocumentStore.create(Path(folder) / "store") as store:
            store.add([_with_kind(document) for document in demo_documents()])
            plan.report("mixed: plain vLLM")
            settings: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
            kv_bytes = 400 * size
            with launch(
                plan.model, None, kv_cache_memory_bytes=kv_bytes, enable_prefix_caching=False, **settings
            ) as plain:
                expected = await _all(sessions, _plainly(plain), _searching(store, None))
            plan.report("mixed: all tiers")
            cache = CacheConfig(
                kv_cache_bytes=_GPU_BLOCKS * size,
                block_size=BLOCK_SIZE,
                host_bytes=_HOST_BLOCKS * size,
                disk_bytes=_DISK_BLOCKS * size,
                directory=Path(folder) / "kv",
            )
            counts: Counter[str] = Counter()
            with launch(plan.model, cache, **settings) as engine:
                engine.bind_prompt(prompt_from_layout(), format_documents)
                forgetting = _Forgetting(engine, [document.doc_id for document in demo_documents()], plan.seed, counts)
                answers = await _all(sessions, _ours(engine, counts), _searching(store, engine), forgetting)
                counts["speculations"] = engine.stats().num_speculative_requests
    differing = [
        {"session": number, "kind": session.kind, "answer": a, "expected": b}
        for number, session in enumerate(sessions)
        for a, b in zip(answers[number], expected[number], strict=True)
        if a != b
    ]
    num_requests = sum(session.num_requests for session in sessions)
    figures = (
        Figure("mixed_requests", num_requests, note=f"{_IN_FLIGHT} in flight, float32, greedy, {_MAX_TOKENS} tokens"),
        Figure("mixed_mismatches", len(differing), 0, note="answers that differ from plain vLLM's in any token"),
        *(Figure(f"mixed_{name}_hits", counts[f"{name}_hits"], note="requests of which it served a part") for name in
          ("gpu", "host", "disk")),
        Figure("mixed_named", counts["named"], note="requests whose documents the engine knew"),
        Figure("mixed_forgotten_blocks", counts["forgotten_blocks"], note=f"in {counts['forgets']} calls meanwhile"),
        Figure("mixed_speculations", counts["speculations"]),
    )  # fmt: skip
    return Part("none: the first request counts", figures, {"counts": dict(counts), "differing": differing[:20]})


class _Forgetting:
    """Forgets some documents after every so many sessions."""

    def __init__(self, engine: Engine, doc_ids: Sequence[str], seed: int, counts: Counter[str]) -> None:
        self._engine, self._doc_ids, self._counts = engine, doc_ids, counts
        self._rng, self._num_done = random.Random(seed), 0

    async def __call__(self) -> None:
        self._num_done += 1
        if self._num_done % _FORGET_EVERY == 0:
            receipt = await self._engine.aforget(self._rng.sample(self._doc_ids, len(self._doc_ids) // 4))
            self._counts["forgets"] += 1
            self._counts["forgotten_blocks"] += sum(receipt.num_blocks.values())


async def _nothing() -> None:
    pass


async def _all(
    sessions: Sequence[Session], ask: _Ask, search: Any, after_each: Callable[[], Awaitable[None]] = _nothing
) -> list[list[list[str]]]:
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def one(session: Session) -> list[list[str]]:
        async with room:
            answers = await answers_of(session, ask, search)
            await after_each()
            return answers

    return list(await asyncio.gather(*map(one, sessions)))


def _plainly(engine: Engine) -> _Ask:
    client = openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key)

    async def ask(messages: Sequence[AnyMessage], tools: list[dict[str, Any]]) -> tuple[str, list[str]]:
        sent: Any = convert_to_openai_messages(list(messages))
        more: dict[str, Any] = {"tools": tools} if tools else {}
        answer = await client.chat.completions.create(
            model=engine.model, messages=sent, temperature=0, max_tokens=_MAX_TOKENS, logprobs=True, **more
        )
        choice = answer.choices[0]
        assert choice.logprobs is not None
        return choice.message.content or "", [token.token for token in choice.logprobs.content or ()]

    return ask


def _ours(engine: Engine, counts: Counter[str]) -> _Ask:
    llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=_MAX_TOKENS, logprobs=True)

    async def ask(messages: Sequence[AnyMessage], tools: list[dict[str, Any]]) -> tuple[str, list[str]]:
        stats = CacheStatsCallbackHandler()
        asked = llm.bind_tools(tools) if tools else llm
        answer = await asked.ainvoke(list(messages), {"callbacks": [stats]})
        ((_, request),) = stats.runs
        counts["named"] += bool(request.documents)
        for tier in ("gpu", "host", "disk"):
            counts[f"{tier}_hits"] += bool(getattr(request, f"num_{tier}_tokens"))
        return answer.text, [token["token"] for token in answer.response_metadata["logprobs"]["content"]]

    return ask


def _searching(store: DocumentStore, engine: Engine | None) -> Any:
    async def search(question: str, settings: dict[str, Any]) -> list[LangChainDocument]:
        return await RAGCacheRetriever(store=store, engine=engine, **settings).ainvoke(question)

    return search


def _with_kind(document: Document) -> Document:
    said = re.search(r" is an? (\w+)\.", document.text)
    return replace(document, metadata={"kind": said.group(1) if said else "other"})
