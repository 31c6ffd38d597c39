"""The demo: questions about generated documents, answered by a real vLLM through LangChain and through LlamaIndex.

``make demo`` runs it. Every question is asked twice in a row: the first time its documents have to be read (cold), the
second time their KV is in the cache (warm). Then all of them are asked once more, when the KV of most has left the GPU
for host memory and disk, and twice by an engine that was restarted on the same disk. The results are printed and
written to ``build/demo.json``::

    {"questions": 40, "correct": 39, "model": ..., "results": [
        {"framework": "langchain", "question": ..., "expected": ..., "answer": ..., "correct": true,
         "ttft_s": 0.021, "prompt_tokens": 154, "cached_tokens": 0,
         "warm_ttft_s": 0.012, "warm_cached_tokens": 128, "warm_is_same": true}, ...],
     "rounds": [
        {"round": "later", "questions": 40, "prompt_tokens": 15210, "gpu_tokens": ..., "host_tokens": ...,
         "disk_tokens": ..., "ttft_s": 0.015, "same_answers": 40}, ...]}

``ttft_s`` and ``cached_tokens`` of a result are those of the first time, ``ttft_s`` of a round is its median.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from tqdm import tqdm

from examples._shared import (
    DEMO_MODEL,
    Options,
    demo_questions,
    open_demo_store,
    open_engine,
    read_options,
    tokens_by_tier,
)
from ragcache_core import CacheConfig, DocumentStore, Engine, RequestStats, request_stats_from_dict
from ragcache_integrations import langchain, llamaindex

RESULTS = Path(__file__).resolve().parent.parent / "build" / "demo.json"
PARTS = (("langchain", 2, 16), ("llamaindex", 2, 16), ("langchain", 20, 4), ("llamaindex", 20, 4))
"""Framework, documents in a prompt, and number of questions. No question is asked twice over: the first documents of a
prompt would be in the cache already."""
MAX_TOKENS = 24

Ask = Callable[[str], tuple[str, RequestStats]]


@dataclass(frozen=True, slots=True)
class Result:
    """A question, asked twice through one framework."""

    framework: str
    documents: int
    question: str
    expected: str
    answer: str
    correct: bool
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    warm_ttft_s: float | None
    warm_cached_tokens: int
    warm_is_same: bool


@dataclass(frozen=True, slots=True)
class Round:
    """All questions, asked once: where their prompts' tokens came from. ``ttft_s`` is the median.

    The tiers are ``None`` where the engine does not say: plain vLLM.
    """

    round: str
    questions: int
    prompt_tokens: int
    gpu_tokens: int | None
    host_tokens: int | None
    disk_tokens: int | None
    ttft_s: float
    same_answers: int

    @classmethod
    def of(cls, name: str, asked: Sequence[RequestStats], num_same: int) -> Round:
        """Return the sums over a round's requests."""
        gpu, host, disk = zip(*map(tokens_by_tier, asked), strict=True)
        return cls(
            round=name,
            questions=len(asked),
            prompt_tokens=sum(stats.num_prompt_tokens for stats in asked),
            gpu_tokens=_sum(gpu),
            host_tokens=_sum(host),
            disk_tokens=_sum(disk),
            ttft_s=statistics.median(stats.ttft_s for stats in asked if stats.ttft_s is not None),
            same_answers=num_same,
        )


def langchain_chain(engine: Engine, store: DocumentStore, num_documents: int) -> Ask:
    """Return a question's way through an LCEL chain."""
    chain = (
        {
            "context": langchain.RAGCacheRetriever(store=store, engine=engine, k=num_documents)
            | langchain.format_documents,
            "question": RunnablePassthrough(),
        }
        | langchain.prompt_from_layout()
        | langchain.ChatRAGCache(engine=engine, temperature=0, max_tokens=MAX_TOKENS)
        | StrOutputParser()
    )

    def ask(question: str) -> tuple[str, RequestStats]:
        handler = langchain.CacheStatsCallbackHandler()
        answer = "".join(chain.stream(question, {"callbacks": [handler]}))
        ((_, stats),) = handler.runs
        return answer, stats

    return ask


def llamaindex_query_engine(engine: Engine, store: DocumentStore, num_documents: int) -> Ask:
    """Return a question's way through a LlamaIndex query engine."""
    query_engine = llamaindex.RAGCacheQueryEngine(
        llamaindex.RAGCacheRetriever(store, engine, similarity_top_k=num_documents),
        llamaindex.RAGCacheLLM(engine, temperature=0, max_tokens=MAX_TOKENS),
        streaming=True,
    )

    def ask(question: str) -> tuple[str, RequestStats]:
        response = query_engine.query(question)
        answer = "".join(response.response_gen)
        return answer, request_stats_from_dict(response.metadata["ragcache"])

    return ask


MAKE = {"langchain": langchain_chain, "llamaindex": llamaindex_query_engine}


def ask_twice(framework: str, num_documents: int, ask: Ask, question: str, expected: str) -> Result:
    """Return what became of a question, cold and warm."""
    answer, cold = ask(question)
    again, warm = ask(question)
    return Result(
        framework=framework,
        documents=num_documents,
        question=question,
        expected=expected,
        answer=answer.strip(),
        correct=answer.strip() == expected,
        ttft_s=cold.ttft_s,
        prompt_tokens=cold.num_prompt_tokens,
        cached_tokens=cold.num_cached_tokens,
        warm_ttft_s=warm.ttft_s,
        warm_cached_tokens=warm.num_cached_tokens,
        warm_is_same=again == answer,
    )


def run(options: Options) -> tuple[list[Result], list[Round]]:
    """Return the results of the demo's single-hop questions, part by part, and what later rounds of them found.

    A round begins with what was asked last: in the same order again and again, everything would leave memory just
    before it is wanted, and come from disk.
    """
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix="demo_kv-") as folder, open_demo_store() as store:
        cache = three_tiers(options, Path(folder))
        with open_engine(options, cache) as engine:
            engine.generate("Hello", max_tokens=2)  # the server's first request pays for its own warm-up
            results += ask_cold_and_warm(engine, store)
            rounds.append(ask_round("later", engine, store, results[::-1]))
        if options.url is None:
            with open_engine(options, cache) as engine:
                engine.generate("Hello", max_tokens=2)
                rounds.append(ask_round("after a restart", engine, store, results))
                rounds.append(ask_round("once more", engine, store, results[::-1]))
    return results, rounds


def three_tiers(options: Options, folder: Path) -> CacheConfig:
    """Return tiers that all have something to do: for the demo model as small as the demo, else as large as it goes."""
    if options.model == str(DEMO_MODEL):
        sizes = {"kv_cache_bytes": "12MiB", "host_bytes": "24MiB", "disk_bytes": "256MiB"}
        return CacheConfig(block_size=32, directory=folder, **sizes)
    return CacheConfig(disk_bytes=min(8 << 30, shutil.disk_usage(folder).free // 2), directory=folder)


def ask_cold_and_warm(engine: Engine, store: DocumentStore) -> list[Result]:
    """Return what became of the questions, each asked twice in a row."""
    questions = iter(demo_questions("single"))
    results: list[Result] = []
    for framework, num_documents, num_questions in PARTS:
        ask = MAKE[framework](engine, store, num_documents)
        label = f"{framework}, {num_documents} documents"
        asked = tqdm(islice(questions, num_questions), label, num_questions, unit="question", disable=None)
        results += [ask_twice(framework, num_documents, ask, q["question"], q["answer"]) for q in asked]
    return results


def ask_round(name: str, engine: Engine, store: DocumentStore, results: Sequence[Result]) -> Round:
    """Return where the tokens came from when every question was asked again."""
    asks = {(framework, n): MAKE[framework](engine, store, n) for framework, n, _ in PARTS}
    asked, num_same = [], 0
    for r in tqdm(results, name, unit="question", disable=None):
        answer, stats = asks[r.framework, r.documents](r.question)
        asked.append(stats)
        num_same += answer.strip() == r.answer
    return Round.of(name, asked, num_same)


def print_results(results: Sequence[Result]) -> None:
    """Print the answers, and the median times of each framework."""
    line = "{:<10}  {:>4}  {:<40.40}  {:<20.20}  {:<3}  {:>7}  {:>7}  {:>11}"
    print(line.format("framework", "docs", "question", "answer", "", "cold ms", "warm ms", "warm cached"))
    for r in results:
        right = "yes" if r.correct else "NO"
        cached = f"{r.warm_cached_tokens}/{r.prompt_tokens}"
        cold, warm = (_milliseconds(t) for t in (r.ttft_s, r.warm_ttft_s))
        print(line.format(r.framework, r.documents, r.question, r.answer, right, cold, warm, cached))
    print()
    line = "{:<10}  {:>4}  {:>13}  {:>9}  {:>7}  {:>18}  {:>18}  {:>13}"
    heads = ("prompt tokens", "questions", "correct", "cold TTFT, median", "warm TTFT, median", "cached (warm)")
    print(line.format("framework", "docs", *heads))
    for framework, num_documents, _ in PARTS:
        mine = [r for r in results if (r.framework, r.documents) == (framework, num_documents)]
        cold = statistics.median(r.ttft_s for r in mine if r.ttft_s is not None)
        warm = statistics.median(r.warm_ttft_s for r in mine if r.warm_ttft_s is not None)
        tokens = sum(r.prompt_tokens for r in mine)
        share = sum(r.warm_cached_tokens for r in mine) / tokens
        figures = (tokens // len(mine), len(mine), sum(r.correct for r in mine))
        times = (f"{_milliseconds(cold)} ms", f"{_milliseconds(warm)} ms")
        print(line.format(framework, num_documents, *figures, *times, f"{share:.0%}"))


def print_rounds(rounds: Sequence[Round]) -> None:
    """Print from which tier each round's tokens came."""
    line = "{:<18}  {:>9}  {:>13}  {:>8}  {:>8}  {:>8}  {:>8}  {:>12}  {:>12}"
    heads = ("questions", "prompt tokens", "from gpu", "host", "disk", "computed", "TTFT, median", "same answers")
    print(line.format("asked again", *heads))
    for r in rounds:
        tiers = (r.gpu_tokens, r.host_tokens, r.disk_tokens)
        cached = _sum(tiers)
        computed = "-" if cached is None else r.prompt_tokens - cached
        shown = ("-" if n is None else n for n in tiers)
        times = (f"{_milliseconds(r.ttft_s)} ms", f"{r.same_answers} of {r.questions}")
        print(line.format(r.round, r.questions, r.prompt_tokens, *shown, computed, *times))


def _sum(tokens: Sequence[int | None]) -> int | None:
    known = [n for n in tokens if n is not None]
    return sum(known) if len(known) == len(tokens) else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    results, rounds = run(options)
    report = {
        "questions": len(results),
        "correct": sum(r.correct for r in results),
        "model": options.model if options.url is None else options.url,
        "results": [asdict(r) for r in results],
        "rounds": [asdict(r) for r in rounds],
    }
    RESULTS.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print_results(results)
    print()
    print_rounds(rounds)
    print(f"\n{report['correct']} of {report['questions']} right; written to build/demo.json")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(130)
