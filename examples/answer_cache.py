"""A semantic cache of answers: what was asked before, in nearly the same words, asks no engine.

Each question is asked, then once more of the engine, which has its documents cached, then in small letters of the cache
of answers. A document that the engine forgets takes its answers with it. Run it with
``python -m examples.answer_cache``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import RequestStats
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    SemanticAnswerCache,
    format_documents,
    prompt_from_layout,
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows, took_ms = [], defaultdict(list)
    with open_engine(options) as engine, open_demo_store() as store, SemanticAnswerCache() as answers:
        search = RAGCacheRetriever(store=store, engine=engine, k=2) | format_documents
        asking = {"context": search, "question": RunnablePassthrough()} | prompt_from_layout()
        plain = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        cached = ChatRAGCache(engine=engine, temperature=0, max_tokens=32, cache=answers)
        for question in [q["question"] for q in demo_questions("single")[:6]]:
            near = question.lower().rstrip("?")
            for note, asked, llm in (("asked", question, cached), ("again", question, plain), ("near", near, cached)):
                stats = CacheStatsCallbackHandler()
                began_s = time.perf_counter()
                answer = (asking | llm).invoke(asked, {"callbacks": [stats]})
                took_ms[note].append(1000 * (time.perf_counter() - began_s))
                note = "kept" if stats.summary().num_cached_answers else note
                request = stats.runs[0][1] if stats.runs else RequestStats(0, 0, 0, None, 0.0)
                rows.append(Row.of(asked, note, answer.text, request))
        num_answers = len(answers)
        engine.forget(["nalna.md"])
        if not options.as_json:
            print(", ".join(f"{note}: {median(ms):.0f} ms" for note, ms in took_ms.items()))
            print(f"answers that stood on nalna.md: {num_answers - len(answers)}; {len(answers)} are left\n")
    show(rows, options)


if __name__ == "__main__":
    main()
