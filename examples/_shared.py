"""What the examples share: the demo documents, an engine, and a table.

Every example runs without arguments on the demo model, and takes ``--model`` for another one, ``--url`` for an engine
that runs already (its key in ``RAGCACHE_API_KEY``), and ``--json`` for its results as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcache_core import CacheConfig, Document, RequestStats
from ragcache_core.client import Engine
from ragcache_core.errors import StoreNotFoundError
from ragcache_core.retrieval import DocumentStore

EXAMPLES = Path(__file__).resolve().parent
DEMO_MODEL = EXAMPLES / "demo_model"
DEMO_CORPUS = EXAMPLES / "demo_corpus"
DEMO_QUESTIONS = EXAMPLES / "demo_corpus_questions.jsonl"
DEMO_STORE = EXAMPLES.parent / "build" / "demo_store"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: str
    url: str | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an example's table: a question, asked ``note`` ("cold", "again", "round 2")."""

    question: str
    note: str
    answer: str
    ttft_ms: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_gpu_tokens: int | None
    num_host_tokens: int | None
    num_disk_tokens: int | None

    @classmethod
    def of(cls, question: str, note: str, answer: str, stats: RequestStats) -> Row:
        ttft_ms = None if stats.ttft_s is None else round(stats.ttft_s * 1000, 1)
        tokens = (stats.num_prompt_tokens, stats.num_cached_tokens)
        return cls(question, note, answer.strip(), ttft_ms, *tokens, *tokens_by_tier(stats))


def read_options(description: str | None, arguments: Sequence[str] | None = None) -> Options:
    """Return the options of an example; ``description`` is its docstring."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder or name of a model (the demo model)")
    parser.add_argument("--url", help="an engine that runs already, instead of launching one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
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


def tokens_by_tier(stats: RequestStats) -> tuple[int | None, int | None, int | None]:
    """Return how many cached tokens came from GPU, host and disk; ``None`` where the engine does not say."""
    return stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens


def open_engine(options: Options, cache: CacheConfig | None = None) -> Engine:
    """Launch an engine for the model with ``cache``, or one that fits it, or join the one at ``--url``."""
    if options.url is not None:
        return Engine.connect(options.url, api_key=os.environ.get("RAGCACHE_API_KEY"))
    if options.model != str(DEMO_MODEL):
        return Engine.launch(options.model, cache=cache or CacheConfig())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo model needs no network
    return Engine.launch(
        options.model,
        cache=cache or CacheConfig(kv_cache_bytes="1GiB", block_size=32),
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
    print(line.format("question", "", "answer", "ttft ms", "prompt", "cached", "gpu", "host", "disk"))
    for row in rows:
        ttft = "-" if row.ttft_ms is None else f"{row.ttft_ms:.1f}"
        tokens = (row.num_prompt_tokens, row.num_cached_tokens)
        by_tier = ("-" if n is None else n for n in (row.num_gpu_tokens, row.num_host_tokens, row.num_disk_tokens))
        print(line.format(row.question, row.note, row.answer, ttft, *tokens, *by_tier))
