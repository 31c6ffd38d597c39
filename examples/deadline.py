"""A deadline for the first token: the prompt as it is, or its documents in the order that is cached the furthest.

A question is asked over four documents, which are cached in the order of the search then. Asked again with them in
other orders, the client's plan shows each prompt as it is where that is predicted to be in time, and in the cached
order where it is not. Predictions need measured prefill times: ``ragcache profile examples/demo_model``, once.

``--plan`` asks no engine: it plans questions whose documents come back in changing company, five of 512 tokens each,
with the times of a 7B model on one GPU and everything kept that was computed, and prints how many are in time.

Examples:
  python -m examples.deadline
  python -m examples.deadline --json
  python -m examples.deadline --plan
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

from langchain_core.messages import BaseMessage

from examples._shared import demo_questions, open_demo_store, open_engine, option_parser, options_of
from examples.demo_model_training.recurring import recurring_questions
from ragcache_core import Document, PromptSegment, RequestStats, SegmentKind
from ragcache_core.chunk import AlphaPoint, chunk_spans
from ragcache_core.deadline import MeasuredReuse, PromptOptions, choose
from ragcache_core.deadline import options_of as ways_of
from ragcache_core.ordering import CachedPaths, PathChange, chunk_change, static_prefix_digest
from ragcache_core.policy import PrefillCostModel
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    format_documents,
    prompt_from_layout,
)

NUM_DOCUMENTS = 4
LONG_S, SHORT_S = 10.0, 1e-4
NUM_STATIC, NUM_TOKENS = 32, 512
ALL_WAYS = ("document_order", "chunk_reuse")
MEASURED = AlphaPoint(1.7, 1.0, 0.074, 120)
"""``ragcache calibrate`` of the demo model on such questions, 40 of each kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one deadline; times in milliseconds."""

    ttft_slo_ms: float
    choice: str
    is_in_time: bool | None
    exact_ms: float | None
    predicted_ms: float | None
    measured_ms: float | None
    answer: str
    why: str


def ask(llm: ChatRAGCache, question: str, documents: Sequence[Document], ttft_slo_s: float) -> tuple[str, RequestStats]:
    """Return the answer and its statistics."""
    stats = CacheStatsCallbackHandler()
    prompt: list[BaseMessage] = prompt_from_layout().format_messages(
        context=format_documents(documents), question=question
    )
    asked = llm.bind(ttft_slo=ttft_slo_s, documents=list(documents))
    answer = "".join(str(chunk.content) for chunk in asked.stream(prompt, {"callbacks": [stats]}))
    ((_, request),) = stats.runs
    return answer.strip(), request


def row_of(answer: str, stats: RequestStats) -> Row:
    report = stats.deadline
    assert report is not None
    chosen = [option.ttft_s for option in report.options if option.name == report.choice]
    exact_ms, predicted_ms, measured_ms = (
        None if t is None else round(1000 * t, 1)
        for t in (report.exact_ttft_s, min(chosen, default=None), stats.ttft_s)
    )
    said = report.choice, report.is_in_time
    return Row(1000 * report.ttft_slo_s, *said, exact_ms, predicted_ms, measured_ms, answer, report.why)


@dataclass(frozen=True, slots=True)
class Planned:
    """Of the requests with one deadline the shares that are in time, by what may be chosen from."""

    ttft_slo_ms: float
    exact: float
    document_order: float
    chunk_reuse: float


def share_in_time(ttft_slo_s: float, questions: Sequence[Sequence[str]], ways: set[str]) -> float:
    """Return which share of questions about these documents is in time, one by one, with ``ways`` to choose from."""
    cached, cost, num_in_time = CachedPaths(), PrefillCostModel.default(), 0
    for doc_ids in questions:
        token_ids, segments = [0] * NUM_STATIC, [PromptSegment(SegmentKind.PREFIX, 0, NUM_STATIC)]
        for doc_id in doc_ids:
            start = len(token_ids)
            token_ids += random.Random(doc_id).choices(range(1 << 15), k=NUM_TOKENS)
            segments.append(PromptSegment(SegmentKind.DOCUMENT, start, len(token_ids), doc_id))
        segments.append(PromptSegment(SegmentKind.QUESTION, len(token_ids), len(token_ids) + NUM_STATIC))
        token_ids += [1] * NUM_STATIC
        found = ways_of(token_ids, segments, cached, MeasuredReuse(MEASURED.alpha, (MEASURED,)))
        may = tuple(option for option in found.options if option.name == "exact" or option.name in ways)
        option, report = choose(ttft_slo_s, PromptOptions(may, found.left_out), cost, 0.0)
        num_in_time += report.is_in_time is True
        shown = [doc_ids[i] for i in option.order or range(len(doc_ids))]
        prefix = static_prefix_digest(token_ids, segments) or b""
        if option.alpha is None:  # no other request hits approximate KV
            for end in range(len(shown) + 1):
                cached.set(PathChange(prefix, tuple(shown[:end]), NUM_STATIC + end * NUM_TOKENS))
        places = [(s.start, s.end) for s in segments if s.kind is SegmentKind.DOCUMENT]
        for span in chunk_spans(token_ids, places):
            cached.set(chunk_change(span.key, span.num_tokens))
    return num_in_time / len(questions)


def plan(as_json: bool) -> None:
    """Print the shares for a few deadlines."""
    questions = [[document.doc_id for document in question.documents] for question in recurring_questions(150)]
    rows = [
        Planned(
            1000 * slo_s,
            *(share_in_time(slo_s, questions, ways) for ways in (set(), {"document_order"}, set(ALL_WAYS))),
        )
        for slo_s in (0.6, 0.5, 0.4, 0.3, 0.2)
    ]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    line = "{:>11}  {:>8}  {:>16}  {:>13}"
    print(line.format("ttft_slo ms", "exact", "+ document_order", "+ chunk_reuse"))
    for row in rows:
        print(line.format(f"{row.ttft_slo_ms:g}", *(f"{x:.1%}" for x in astuple(row)[1:])))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--plan", action="store_true", help="plan questions without an engine, and count")
    given = parser.parse_args(arguments)
    options = options_of(given)
    if given.plan:
        plan(options.as_json)
        return
    question = demo_questions("single")[0]["question"]
    with open_engine(options) as engine, open_demo_store() as store:
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=24)
        found = store.search(question, NUM_DOCUMENTS).documents
        orders = [[found[first], *(d for d in found if d is not found[first])] for first in range(1, NUM_DOCUMENTS)]
        ask(llm, question, found, LONG_S)
        engine.integration.ordering.refresh()  # else what is cached is asked once a second
        rows = [row_of(*(first := ask(llm, question, orders[0], LONG_S)))]
        assert first[1].deadline is not None
        predicted_s = [option.ttft_s for option in first[1].deadline.options]
        between_s = (max(predicted_s) + min(predicted_s)) / 2 if predicted_s else LONG_S
        rows += [row_of(*ask(llm, question, orders[1], between_s)), row_of(*ask(llm, question, orders[2], SHORT_S))]
    if options.as_json:
        print(json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=2))
        return
    line = "{:>11}  {:<14}  {:>8}  {:>9}  {:>8}  {:<16.16}  {}"
    print(line.format("ttft_slo ms", "choice", "exact ms", "chosen ms", "measured", "answer", "why"))
    for row in rows:
        times = ("-" if ms is None else f"{ms:.1f}" for ms in (row.exact_ms, row.predicted_ms, row.measured_ms))
        print(line.format(f"{row.ttft_slo_ms:g}", row.choice, *times, row.answer, row.why))


if __name__ == "__main__":
    main()
