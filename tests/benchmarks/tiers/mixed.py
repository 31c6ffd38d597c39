"""Exactness of what applications do: searches, rerankers, agents, conversations; documents go and change meanwhile.

Sessions of LangChain and LlamaIndex are asked of an engine with all tiers: documents are known, candidates prefilled,
histories kept, answers begun ahead. Every prompt of theirs is then asked of plain vLLM, which is sent the messages
alone and caches nothing. What each search found is searched for once more without the engine.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import openai

from examples._shared import demo_documents, demo_questions
from ragcache_core import Document, DocumentStore
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_integrations.langchain import format_documents, prompt_from_layout
from tests.benchmarks.engines import BLOCK_SIZE, block_bytes, launch
from tests.benchmarks.report import Figure, Part, Plan
from tests.benchmarks.tiers.applications import (
    MAX_TOKENS,
    Application,
    Asked,
    LangChainApplication,
    LlamaIndexApplication,
    Session,
)

_IN_FLIGHT = 6
_TURNS = 4
_FORGET_EVERY, _REPLACE_EVERY = 20, 12
_GPU_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 90, 60, 300
_KINDS = ("person", "city", "company", "country")


def sessions_of(num_requests: int, seed: int) -> list[Session]:
    """Return sessions of ``num_requests`` requests or a few more, of all kinds alike, about few documents and many."""
    rng = random.Random(seed)
    asked = [question["question"] for kind in ("single", "two-hop", "yes-no") for question in demo_questions(kind)]
    popular = rng.sample(asked, 25)

    def questions(number: int) -> tuple[str, ...]:
        return tuple(rng.choice(popular) if rng.random() < 0.7 else rng.choice(asked) for _ in range(number))

    sessions: list[Session] = []
    while sum(session.num_requests for session in sessions) < num_requests:
        for framework, kind in product(("langchain", "llamaindex"), ("search", "reranked", "agent", "conversation")):
            turns = rng.randint(2, _TURNS) if kind == "conversation" else 1
            is_filtered = kind in ("search", "reranked") and rng.random() < 0.5
            kinds = tuple(rng.sample(_KINDS, 2)) if is_filtered else ()
            k = rng.choice((1, 2, 3)) if kind == "search" else 2
            sessions.append(Session(framework, kind, questions(turns), k, kinds))
    return sessions


def measure_mixed(plan: Plan) -> Part:
    """Answer every session with all tiers, ask plain vLLM the same, and compare the answers token by token."""
    return asyncio.run(_measure(plan))


async def _measure(plan: Plan) -> Part:
    sessions = sessions_of(plan.sized(500, 24), plan.seed)
    size = block_bytes(plan.model)
    settings: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        with DocumentStore.create(Path(folder) / "store") as store:
            documents = [_with_kind(document) for document in demo_documents()]
            store.add(documents)
            plan.report("mixed: all tiers")
            cache = CacheConfig(
                kv_cache_bytes=_GPU_BLOCKS * size,
                block_size=BLOCK_SIZE,
                host_bytes=_HOST_BLOCKS * size,
                disk_bytes=_DISK_BLOCKS * size,
                directory=Path(folder) / "kv",
            )
            with launch(plan.model, cache, **settings) as engine:
                engine.bind_prompt(prompt_from_layout(), format_documents)
                store.bind(engine, warm=True)
                changes = _Changes(engine, store, documents, plan.seed, counts)
                applications: dict[str, Application] = {
                    "langchain": LangChainApplication(engine, store, changes.searched, counts),
                    "llamaindex": LlamaIndexApplication(engine, store, changes.searched, counts),
                }

                async def answer(session: Session) -> list[Asked]:
                    asked = await applications[session.framework].answer(session)
                    await changes.make()
                    return asked

                asked = [one for of_session in await _all(sessions, answer) for one in of_session]
                counts["speculations"] = engine.stats().num_speculative_requests
        plan.report("mixed: plain vLLM")
        kv_bytes = 400 * size
        with launch(plan.model, None, kv_cache_memory_bytes=kv_bytes, enable_prefix_caching=False, **settings) as plain:
            expected = await _all(asked, _plainly(plain))
    return _part(asked, expected, counts)


def _part(asked: Sequence[Asked], expected: Sequence[list[str]], counts: Counter[str]) -> Part:
    differing = [
        {"framework": a.session.framework, "kind": a.session.kind, "answer": a.tokens, "expected": b}
        for a, b in zip(asked, expected, strict=True)
        if a.tokens != b
    ]
    of_llamaindex = sum(one.session.framework == "llamaindex" for one in asked)
    in_flight = f"{_IN_FLIGHT} in flight, float32, greedy, {MAX_TOKENS} tokens; {of_llamaindex} of LlamaIndex"
    figures = (
        Figure("mixed_requests", len(asked), note=in_flight),
        Figure("mixed_mismatches", len(differing), 0, note="answers that differ from plain vLLM's in any token"),
        Figure("mixed_search_mismatches", counts["other_documents"], 0, note=f"of {counts['searches']} searches"),
        *(Figure(f"mixed_{name}_hits", counts[f"{name}_hits"], note="requests of which it served a part") for name in
          ("gpu", "host", "disk")),
        Figure("mixed_named", counts["named"], note="requests whose documents the engine knew"),
        Figure("mixed_forgotten_blocks", counts["forgotten_blocks"], note=f"in {counts['forgets']} calls meanwhile"),
        Figure("mixed_replaced", counts["replaced"], note="documents that were changed meanwhile"),
        Figure("mixed_speculations", counts["speculations"]),
    )  # fmt: skip
    return Part("none: the first request counts", figures, {"counts": dict(counts), "differing": differing[:20]})


@dataclass
class _Changes:
    """Changes documents, and forgets some, after every so many sessions."""

    engine: Engine
    store: DocumentStore
    documents: Sequence[Document]
    seed: int
    counts: Counter[str]

    def __post_init__(self) -> None:
        self._rng, self._num_done, self._version = random.Random(self.seed), 0, 0

    async def make(self) -> None:
        """Note that a session is over."""
        self._num_done += 1
        number = self._num_done
        if number % _FORGET_EVERY == 0:
            some = self._rng.sample(self.documents, len(self.documents) // 4)
            receipt = await self.engine.aforget([document.doc_id for document in some])
            self.counts["forgets"] += 1
            self.counts["forgotten_blocks"] += sum(receipt.num_blocks.values())
        if number % _REPLACE_EVERY == 0:
            document = self._rng.choice(self.documents)
            changed = replace(document, text=f"{document.text.rstrip()} This entry was revised {number} times.\n")
            self._version += 1
            await asyncio.to_thread(self.store.replace, changed)
            self._version += 1
            self.counts["replaced"] += 1

    async def searched(self, search: Callable[[Engine | None], Awaitable[list[str]]]) -> list[str]:
        """Search with the engine, and without, where no document changed meanwhile, and compare what was found."""
        began_at = self._version
        found = await search(self.engine)
        again = await search(None)
        if began_at == self._version and began_at % 2 == 0:
            self.counts["searches"] += 1
            self.counts["other_documents"] += found != again
        return found


async def _all(given: Sequence[Any], answer: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def one(each: Any) -> Any:
        async with room:
            return await answer(each)

    return list(await asyncio.gather(*map(one, given)))


def _plainly(engine: Engine) -> Callable[[Asked], Awaitable[list[str]]]:
    client = openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key)

    async def ask(asked: Asked) -> list[str]:
        messages: Any = asked.messages
        more: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
        answer = await client.chat.completions.create(
            model=engine.model, messages=messages, temperature=0, max_tokens=MAX_TOKENS, logprobs=True, **more
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        return [token.token for token in logprobs.content or ()]

    return ask


def _with_kind(document: Document) -> Document:
    said = re.search(r" is an? (\w+)\.", document.text)
    return replace(document, metadata={"kind": said.group(1) if said else "other"})
