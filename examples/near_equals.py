"""Nearly equal passages: those that are cached are shown in place of others, for a bounded loss of score.

Questions about a few entries of the demo corpus more often than about others are asked through a chain whose retriever
may exchange a document for one whose score is at most 2 % lower, and each swap is printed. ``--out`` writes questions
with their candidates and scores, for ``ragcache quality`` to audit what that costs in answers.

Examples:
  python -m examples.near_equals
  python -m examples.near_equals --questions 300 --out build/scored.jsonl
  ragcache quality examples/demo_model --questions build/scored.jsonl --documents 4 --max-score-loss 0.02
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import open_demo_store, open_engine, option_parser, options_of
from examples.document_order import popular_questions
from ragcache_core import DocumentStore
from ragcache_core.client.pipeline.result import similarities
from ragcache_core.quality.questions import Question, to_line
from ragcache_core.swaps import CANDIDATES_PER_DOCUMENT
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)

NUM_DOCUMENTS, MAX_SCORE_LOSS = 4, 0.02


class Swaps(BaseCallbackHandler):
    """Takes note of what the retriever exchanges."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == "ragcache.candidates" and data["is_final"]:
            self.seen += data["swaps"]


def scored_lines(store: DocumentStore, num_questions: int) -> list[str]:
    """Return lines for ``ragcache quality``: each question with twice the documents that are shown, and scores."""
    lines = []
    for asked in popular_questions(num_questions):
        found = store.search(asked.question, NUM_DOCUMENTS * CANDIDATES_PER_DOCUMENT)
        scores = similarities([float(score) for score in found.scores], store.metric)
        lines.append(to_line(Question(asked.question, (asked.answer,), found.documents, "single", tuple(scores))))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--questions", type=int, default=24, metavar="N", help="how many to ask or to write (24)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the questions here, and ask nothing")
    given = parser.parse_args(arguments)
    options = options_of(given)
    with open_demo_store() as store:
        if given.out is not None:
            given.out.write_text("\n".join(scored_lines(store, given.questions)) + "\n", encoding="utf-8")
            return
        rows = []
        with open_engine(options) as engine:
            retriever = RAGCacheRetriever(
                store=store,
                engine=engine,
                k=NUM_DOCUMENTS,
                max_score_loss=MAX_SCORE_LOSS,
                document_order="cache_aware",
            )
            engine.bind_prompt(prompt := prompt_from_layout(), format_documents)
            chain = (
                {"context": retriever | format_documents, "question": RunnablePassthrough()}
                | prompt
                | ChatRAGCache(engine=engine, temperature=0, max_tokens=24)
                | StrOutputParser()
            )
            for asked in popular_questions(given.questions):
                engine.integration.ordering.refresh()  # else what is cached is asked once a second
                swaps, stats = Swaps(), CacheStatsCallbackHandler()
                answer = chain.invoke(asked.question, {"callbacks": [swaps, stats]})
                cached = stats.summary()
                rows.append(
                    {
                        "question": asked.question,
                        "is_right": answer.strip() == asked.answer,
                        "num_prompt_tokens": cached.num_prompt_tokens,
                        "num_cached_tokens": cached.num_cached_tokens,
                        "swaps": swaps.seen,
                    }
                )
    if options.as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    print("{:<44}  {:>5}  {:>6}  {:>6}  {}".format("question", "right", "prompt", "cached", "shown instead"))
    for row in rows:
        told = ", ".join(f"{s['doc_in']} for {s['doc_out']} ({-s['score_loss']:.1%})" for s in row["swaps"])
        right, figures = "yes" if row["is_right"] else "no", (row["num_prompt_tokens"], row["num_cached_tokens"])
        print("{:<44.44}  {:>5}  {:>6}  {:>6}  {}".format(row["question"], right, *figures, told))


if __name__ == "__main__":
    main()
