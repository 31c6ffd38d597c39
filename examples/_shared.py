"""What the examples share: the demo documents, a search that takes its time, an engine, and a table.

Every example runs without arguments on the demo model, and takes ``--model`` for another one, ``--url`` for an engine
that runs already (its key in ``RAGCACHE_API_KEY``), and ``--json`` for its results as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcache_core import (
    CacheConfig,
    Document,
    DocumentStore,
    Engine,
    RequestStats,
    RetrievalUpdate,
    StoreNotFoundError,
)

EXAMPLES = Path(__file__).resolve().parent
DEMO_MODEL = EXAMPLES / "demo_model"
DEMO_CORPUS = EXAMPLES / "demo_corpus"
DEMO_QUESTIONS = EXAMPLES / "demo_corpus_questions.jsonl"
DEMO_STORE = EXAMPLES.parent / "build" / "demo_store"
STAGES = (0.05, 0.15, 0.4, 1.0)
"""Shares of a search after which its stages end."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: str
    url: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an example's table: a question, asked ``note`` ("cold", "again", "round 2").

    ``hidden_ms`` is how long the engine worked on the answer while its documents were still searched; ``None`` where
    nothing was searched.
    """

    question: str
    note: str
    answer: str
    ttft_ms: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_gpu_tokens: int | None
    num_host_tokens: int | None
    num_disk_tokens: int | None
    hidden_ms: float | None = None

    @classmethod
    def of(cls, question: str, note: str, answer: str, stats: RequestStats, hidden_s: float | None = None) -> Row:
        ttft_ms, hidden_ms = (None if t is None else round(t * 1000, 1) for t in (stats.ttft_s, hidden_s))
        tokens = (stats.num_prompt_tokens, stats.num_cached_tokens)
        return cls(question, note, answer.strip(), ttft_ms, *tokens, *tokens_by_tier(stats), hidden_ms)


def read_options(description: str | None, arguments: Sequence[str] | None = None) -> Options:
    """Return the options of an example; ``description`` is its docstring."""
    return options_of(option_parser(description).parse_args(arguments))


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of every example's options, for an example that has more."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder or name of a model (the demo model)")
    parser.add_argument("--url", help="an engine that runs already, instead of launching one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def options_of(given: argparse.Namespace) -> Options:
    """Return what every example's options say."""
    return Options(given.model, given.url, given.json)


def demo_documents() -> list[Document]:
    """Return the demo corpus: short encyclopedia entries about things that do not exist."""
    return [Document(path.name, path.read_text("utf-8")) for path in sorted(DEMO_CORPUS.glob("*.md"))]


def demo_questions(kind: str) -> list[dict[str, str]]:
    """Return questions with their answers: of ``kind`` "single", "two-hop", "yes-no", ..."""
    questions = [json.loads(line) for line in DEMO_QUESTIONS.read_text("utf-8").splitlines()]
    return [q for q in questions if q["kind"] == kind]


def open_demo_store(folder: Path = DEMO_STORE) -> DocumentStore:
    """Return the store of the demo corpus, read-only; the first call builds it."""
    try:
        return DocumentStore.open(folder, read_only=True)
    except StoreNotFoundError:
        with DocumentStore.create(folder) as store:
            store.add(demo_documents())
        return DocumentStore.open(folder, read_only=True)


@dataclass(frozen=True, slots=True)
class SlowSearch:
    """The demo store, searched as slowly as a large one: its own stages, the last one after ``search_s`` seconds.

    The demo corpus is searched in a millisecond, and there would be nothing to hide.
    """

    store: DocumentStore
    search_s: float = 0.25

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the documents known after each stage; see :class:`~ragcache_core.retrieval.StageSource`."""
        began_s = time.perf_counter()
        ends = iter(STAGES)
        async with aclosing(self.store.search_staged(query, k, stages=STAGES)) as updates:
            async for update in updates:
                share = 1.0 if update.is_final else next(ends)
                await asyncio.sleep(max(0.0, began_s + share * self.search_s - time.perf_counter()))
                yield update


def tokens_by_tier(stats: RequestStats) -> tuple[int | None, int | None, int | None]:
    """Return how many cached tokens came from GPU, host and disk; ``None`` where the engine does not say."""
    return stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens


def open_engine(options: Options, cache: CacheConfig | None = None, *, env: Mapping[str, str] | None = None) -> Engine:
    """Launch an engine for the model with ``cache``, or one that fits it, or join the one at ``--url``."""
    if options.url is not None:
        return Engine.connect(options.url, api_key=os.environ.get("RAGCACHE_API_KEY"))
    if options.model != str(DEMO_MODEL):
        return Engine.launch(options.model, cache=cache or CacheConfig(), env=env)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo model needs no network
    return Engine.launch(
        options.model,
        cache=cache or CacheConfig(kv_cache_bytes="1GiB", block_size=32),
        env=env,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )


def show(rows: Sequence[Row], options: Options) -> None:
    """Print the rows as a table, or as JSON."""
    if options.as_json:
        print(json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=2))
        return
    line = "{:<40.40}  {:<8}  {:<24.24}  {:>7}  {:>6}  {:>6}  {:>5}  {:>5}  {:>5}"
    heads = ["question", "", "answer", "ttft ms", "prompt", "cached", "gpu", "host", "disk"]
    shows_hidden = any(row.hidden_ms is not None for row in rows)
    if shows_hidden:
        line, heads = f"{line}  {{:>9}}", [*heads, "hidden ms"]
    print(line.format(*heads))
    for row in rows:
        ttft, hidden = ("-" if ms is None else f"{ms:.1f}" for ms in (row.ttft_ms, row.hidden_ms))
        tokens = (row.num_prompt_tokens, row.num_cached_tokens)
        by_tier = ("-" if n is None else n for n in (row.num_gpu_tokens, row.num_host_tokens, row.num_disk_tokens))
        print(line.format(row.question, row.note, row.answer, ttft, *tokens, *by_tier, hidden))
