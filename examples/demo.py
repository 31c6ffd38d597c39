"""The demo: questions about generated documents, answered by a real vLLM through LangChain and through LlamaIndex.

``make demo`` runs it. Every question is asked twice: the first time its documents have to be read (cold), the second
time their KV is in the cache (warm). The results are printed and written to ``build/demo.json``::

    {"questions": 40, "correct": 39, "model": ..., "results": [
        {"framework": "langchain", "question": ..., "expected": ..., "answer": ..., "correct": true,
         "ttft_s": 0.021, "prompt_tokens": 154, "cached_tokens": 0,
         "warm_ttft_s": 0.012, "warm_cached_tokens": 128, "warm_is_same": true}, ...]}

``ttft_s`` and ``cached_tokens`` are those of the first time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from tqdm import tqdm

from examples._shared import Options, demo_questions, open_demo_store, open_engine, read_options
from ragcache_core import RequestStats
from ragcache_core.client import Engine
from ragcache_core.retrieval import DocumentStore
from ragcache_core.stats import request_stats_from_dict
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


def run(options: Options) -> list[Result]:
    """Return the results of the demo's single-hop questions, part by part."""
    make = {"langchain": langchain_chain, "llamaindex": llamaindex_query_engine}
    questions = iter(demo_questions("single"))
    results: list[Result] = []
    with open_engine(options) as engine, open_demo_store() as store:
        engine.generate("Hello", max_tokens=2)  # the server's first request pays for its own warm-up
        for framework, num_documents, num_questions in PARTS:
            ask = make[framework](engine, store, num_documents)
            label = f"{framework}, {num_documents} documents"
            asked = tqdm(islice(questions, num_questions), label, num_questions, unit="question", disable=None)
            results += [ask_twice(framework, num_documents, ask, q["question"], q["answer"]) for q in asked]
    return results


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


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    results = run(options)
    report = {
        "questions": len(results),
        "correct": sum(r.correct for r in results),
        "model": options.model if options.url is None else options.url,
        "results": [asdict(r) for r in results],
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print_results(results)
    print(f"\n{report['correct']} of {report['questions']} right; written to build/demo.json")


if __name__ == "__main__":
    main()
