"""What the engine's door costs, and what its cache brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httpx

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from tests.benchmarks.pairs import Comparison, compare

_LAYOUT = PromptLayout()
_MAX_TOKENS = 4


def _documents(mark: int, num_sentences: int) -> Sequence[Document]:
    return [
        Document(
            f"{name}-{mark}", f"{name} {mark} is a company. " + f"{name} makes clocks number {mark}. " * num_sentences
        )
        for name in ("Zorval", "Tenrik")
    ]


def compare_door(engine: Engine, *, pairs: int, report: Callable[[str], None]) -> list[Comparison]:
    """Return the time of whole answers through ``engine.generate`` against a bare HTTP client, all of it cached."""
    report("measuring the door")
    messages = _LAYOUT.messages(_documents(0, 20), "What does Zorval make?")
    body = {"model": engine.model, "messages": messages, "max_tokens": _MAX_TOKENS, "temperature": 0}
    with httpx.Client(headers={"Authorization": f"Bearer {engine.api_key}"}, timeout=60) as client:

        def bare(_: int) -> None:
            with client.stream("POST", f"{engine.base_url}/chat/completions", json={**body, "stream": True}) as answer:
                for _line in answer.iter_lines():
                    pass

        def ours(_: int) -> None:
            engine.generate(messages, max_tokens=_MAX_TOKENS)

        return [compare("answer, all cached: HTTP client | door", bare, ours, pairs=pairs)]


def compare_cache(engine: Engine, *, pairs: int, report: Callable[[str], None]) -> list[Comparison]:
    """Return the TTFT of a prompt whose documents are cached against the first time they are read."""
    report("measuring the cache")
    mark = 1  # the engine is new: no prompt of this run has been seen before
    rows = []
    for num_sentences in (10, 25, 50):
        cold_s: list[float] = []
        warm_s: list[float] = []
        num_tokens = 0
        for i in range(pairs + 1):
            documents = _documents(mark + i, num_sentences)
            for times, question in ((cold_s, "What does Zorval make?"), (warm_s, "What does Tenrik make?")):
                prompt = _LAYOUT.render(engine.tokenizer, documents, question)
                stats = engine.generate(prompt, max_tokens=_MAX_TOKENS).stats
                num_tokens = stats.num_prompt_tokens
                if i > 0 and stats.ttft_s is not None:  # the first pair warms the engine up
                    times.append(stats.ttft_s)
        mark += pairs + 1
        rows.append(Comparison(f"TTFT of {num_tokens} tokens: cold | documents cached", tuple(cold_s), tuple(warm_s)))
    return rows
