"""Logs become traces: a vLLM server's requests, LangChain's runs, plain lines; what is broken is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import TraceError
from ragcache_core.sim.traces.log_formats import LogFormat
from ragcache_core.sim.traces.log_import import Assumptions, ImportedLog, import_log, read_lengths
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params

NOON = "2026-01-31T12:00:00+00:00"


def segment(doc_id: str, start: int, end: int) -> PromptSegment:
    return PromptSegment(SegmentKind.DOCUMENT, start, end, doc_id)


def params(*, prompt: int | None = 500, speculation: str | None = None) -> dict[str, object]:
    documents = [segment("faq", 20, 220), segment("law", 230, 470)]
    ids = None if prompt is None else list(range(prompt))
    return encode_kv_transfer_params(documents, ids, speculation=speculation)


def imported(
    folder: Path, *rows: object, assumed: Assumptions | None = None, log_format: LogFormat | None = None
) -> ImportedLog:
    path = folder / "log.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return import_log(path, assumed or Assumptions(), log_format)


VLLM_ROWS: dict[str, dict[str, Any]] = {
    "a body": {"time": 100.0, "kv_transfer_params": params()},
    "a request beside its response": {
        "timestamp": "1970-01-01T00:01:40Z",
        "request": {"model": "m", "messages": [], "kv_transfer_params": params(prompt=None)},
        "response": {"usage": {"prompt_tokens": 500, "completion_tokens": 9}},
    },
    "a body as text": {"ts": 100, "method": "POST", "body": json.dumps({"kv_transfer_params": params()})},
    "a prompt of token ids": {"ts": 100, "body": {"prompt": [1] * 500, "kv_transfer_params": params(prompt=None)}},
    "extra arguments": {"created": 100, "sampling_params": {"extra_args": {"kv_transfer_params": params()}}},
}


@pytest.mark.parametrize("what", VLLM_ROWS)
def test_a_servers_requests_are_found_wherever_their_bodies_are(tmp_path: Path, what: str) -> None:
    log = imported(tmp_path, VLLM_ROWS[what])
    assert log.log_format == "vllm"
    (request,) = log.trace
    assert request.doc_ids == ("faq", "law")
    assert request.doc_tokens == (210, 240)  # the separator between them is the first one's
    assert request.question_tokens == 30
    assert request.output_tokens == (9 if "response" in what else 1)


def test_a_prompt_of_unknown_length_has_a_question_of_the_length_assumed(tmp_path: Path) -> None:
    row = {"time": 0, "kv_transfer_params": params(prompt=None)}
    (request,) = imported(tmp_path, row, assumed=Assumptions(question_tokens=77)).trace
    assert (request.doc_tokens, request.question_tokens) == ((210, 240), 77)


def test_speculative_requests_are_passed_over_unless_asked_for(tmp_path: Path) -> None:
    rows = [{"time": 0, "kv_transfer_params": params(speculation="abc")}, {"time": 1, "kv_transfer_params": params()}]
    log = imported(tmp_path, *rows)
    assert (len(log.trace), log.num_speculative) == (1, 1)
    log = imported(tmp_path, *rows, assumed=Assumptions(counts_speculative=True))
    assert (len(log.trace), log.num_speculative) == (2, 0)


def test_other_lines_of_a_servers_log_are_passed_over(tmp_path: Path) -> None:
    rows = [{"path": "/health"}, {"time": 5, "kv_transfer_params": {}}, {"time": 6, "kv_transfer_params": params()}]
    log = imported(tmp_path, *rows)
    assert (len(log.trace), log.num_passed_over) == (1, 2)


def test_metadata_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    broken = params()
    broken["ragcache"]["documents"][1]["start"] = 100  # type: ignore[index]
    with pytest.raises(TraceError, match=r"log.jsonl:2: document 'law' spans tokens \[100, 470\)"):
        imported(tmp_path, {"time": 0, "kv_transfer_params": params()}, {"time": 1, "kv_transfer_params": broken})


def run(documents: list[object], **fields: object) -> dict[str, object]:
    return {"run_type": "retriever", "start_time": NOON, "outputs": {"documents": documents}, **fields}


def document(text: str, doc_id: str | None = None, **metadata: object) -> dict[str, object]:
    return {"id": doc_id, "page_content": text, "metadata": metadata, "type": "Document"}


@pytest.mark.parametrize(
    ("found", "doc_id"),
    [
        (document("x", "d1"), "d1"),
        (document("x", None, document_id=17), "17"),
        (document("x", None, source="a.md"), "a.md"),
        (document("x", None, source="a.md", page=3), "a.md#3"),
        (document("x", None, source="a.md", start_index=0), "a.md#0"),
        (document("x"), "text-2d711642b726b044"),
        ({"lc": 1, "type": "constructor", "id": ["langchain", "Document"], "kwargs": document("x", "d1")}, "d1"),
    ],
)
def test_a_langchain_document_is_known_by_the_best_it_has(
    tmp_path: Path, found: dict[str, object], doc_id: str
) -> None:  # fmt: skip
    log = imported(tmp_path, run([found]), assumed=Assumptions(mean_tokens=5))
    assert log.log_format == "langchain"
    assert [request.doc_ids for request in log.trace] == [(doc_id,)]


def test_retrievers_are_found_inside_other_runs(tmp_path: Path) -> None:
    inner = run([document("x", "d1", num_tokens=40)], start_time="2026-01-31T12:00:02.5Z")
    chain = {
        "run_type": "chain", "start_time": NOON, "outputs": {"output": "x"}, "completion_tokens": 12,
        "child_runs": [{"run_type": "chain", "child_runs": [inner]}, {"run_type": "llm", "outputs": {}}],
    }  # fmt: skip
    failed = {"run_type": "retriever", "start_time": NOON, "outputs": None, "error": "timed out"}
    log = imported(tmp_path, run([document("y", "d2", tokens=50)]), failed, chain)
    assert list(log.trace) == [
        TracedRequest(0.0, ("d2",), (50,), 32, 1),
        TracedRequest(2.5, ("d1",), (40,), 32, 12),
    ]
    assert log.num_passed_over == 1


def test_what_langchains_own_tracer_keeps_is_read(tmp_path: Path) -> None:
    langchain_core = pytest.importorskip("langchain_core")
    assert langchain_core
    from langchain_core.documents import Document
    from langchain_core.load import dumpd
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.tracers.base import BaseTracer

    class Shelf(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: object) -> list[Document]:
            return [Document("one", id="d1", metadata={"num_tokens": 3}), Document("two", metadata={"source": "b.md"})]

    class Keeper(BaseTracer):
        def _persist_run(self, run: Any) -> None:
            rows.append({**run.model_dump(mode="json", exclude={"outputs"}), "outputs": dumpd(run.outputs)})

    rows: list[dict[str, Any]] = []
    for question in ("who?", "where?"):
        Shelf().invoke(question, config={"callbacks": [Keeper()]})
    log = imported(tmp_path, *rows, assumed=Assumptions(mean_tokens=9))
    assert [(r.doc_ids, r.doc_tokens) for r in log.trace] == [(("d1", "b.md"), (3, 1))] * 2
    assert log.num_estimated == 2
    assert log.trace[1].arrival_s > log.trace[0].arrival_s == 0.0


def test_texts_say_how_long_documents_questions_and_answers_are(tmp_path: Path) -> None:
    documents = [{"id": "a", "text": "x" * 400}, {"id": "b", "tokens": 7, "text": "x" * 400}, {"id": "c"}]
    row = {"t": 1, "documents": documents, "question": "x" * 80, "answer": "x" * 40}
    log = imported(tmp_path, row, assumed=Assumptions(mean_tokens=5))
    assert list(log.trace) == [TracedRequest(0.0, ("a", "b", "c"), (100, 7, 5), 20, 10)]
    assert log.num_estimated == 1
    known = imported(tmp_path, row, assumed=Assumptions({"a": 90}, mean_tokens=5))
    assert list(known.trace) == [TracedRequest(0.0, ("a", "b", "c"), (90, 7, 5), 20, 10)]
    (request,) = imported(tmp_path, run([document("x" * 200, "d")], inputs={"query": "x" * 60})).trace
    assert (request.doc_tokens, request.question_tokens) == ((50,), 15)


def model(second: int, outputs: object, **fields: object) -> dict[str, object]:
    return {"run_type": "llm", "start_time": f"2026-01-31T12:00:{second:02}Z", "outputs": outputs, **fields}


def said(tokens: int | None, text: str = "") -> dict[str, object]:
    usage = {} if tokens is None else {"usage_metadata": {"output_tokens": tokens}}
    return {"generations": [[{"text": text, "message": {"kwargs": {"content": text, **usage}}}]]}


def test_the_answer_of_the_same_trace_is_joined(tmp_path: Path) -> None:
    flat = [
        run([document("x", "a", tokens=5)], trace_id="one", start_time="2026-01-31T12:00:01Z"),
        model(9, said(90), trace_id="one"),
        model(2, said(20), trace_id="one"),
        model(1, said(33), trace_id="other"),
        model(4, {"llm_output": {"token_usage": {"completion_tokens": 44}}}, trace_id="two"),
        run([document("x", "b", tokens=5)], trace_id="two", start_time="2026-01-31T12:00:03Z"),
    ]
    children = [run([document("x", "c", tokens=5)], start_time="2026-01-31T12:00:05Z"), model(6, said(None, "x" * 24))]
    tree = {"run_type": "chain", "start_time": NOON, "child_runs": [{"run_type": "chain", "child_runs": children}]}
    log = imported(tmp_path, *flat, tree)
    assert [(r.doc_ids, r.output_tokens) for r in log.trace] == [(("a",), 20), (("b",), 44), (("c",), 6)]
    assert log.num_passed_over == 0


def test_plain_lines_may_say_as_little_as_a_time_and_ids(tmp_path: Path) -> None:
    rows = [
        {"timestamp": NOON, "docs": ["a", 7]},
        {"t": 1769860801, "document_ids": ["b"], "doc_tokens": [60], "question_tokens": 4, "output_tokens": 5},
        {"time": "1769860802", "documents": [{"id": "a", "tokens": 30}, {"id": "c"}]},
    ]
    log = imported(tmp_path, *rows, assumed=Assumptions({"a": 11, "7": 12}, mean_tokens=99))
    assert log.log_format == "plain"
    assert list(log.trace) == [
        TracedRequest(0.0, ("a", "7"), (11, 12), 32, 1),
        TracedRequest(1.0, ("b",), (60,), 4, 5),
        TracedRequest(2.0, ("a", "c"), (30, 99), 32, 1),
    ]


@pytest.mark.parametrize("unit", [1, 1_000, 1_000_000, 1_000_000_000])
def test_times_in_any_unit_since_1970_are_seconds(tmp_path: Path, unit: int) -> None:
    rows = [{"t": 1_769_860_800 * unit, "docs": ["a"]}, {"t": 1_769_860_803 * unit, "docs": ["a"]}]
    log = imported(tmp_path, *rows, assumed=Assumptions(mean_tokens=1))
    assert log.trace.arrival_s.tolist() == [0.0, 3.0]


def test_requests_are_sorted_and_the_first_arrives_at_zero(tmp_path: Path) -> None:
    rows = [{"t": t, "docs": [str(t)]} for t in (9.5, 7.0, 8.25)]
    log = imported(tmp_path, *rows, assumed=Assumptions(mean_tokens=1))
    assert [(r.arrival_s, r.doc_ids) for r in log.trace] == [(0.0, ("7.0",)), (1.25, ("8.25",)), (2.5, ("9.5",))]


def test_a_packed_log_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"t": 1, "docs": ["a"]}\n'))
    assert len(import_log(path, Assumptions(mean_tokens=3)).trace) == 1


def test_an_unknown_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"log.jsonl:1: the length of document 'a' is unknown.*--lengths.*--mean-to"):
        imported(tmp_path, {"t": 1, "docs": ["a"]})


def broken_rows() -> Iterator[tuple[object, LogFormat, str]]:
    yield '{"t": 1, "docs"', "plain", "not JSON"
    yield "[]", "plain", "is no object"
    yield {"docs": ["a"]}, "plain", "no time"
    yield {"t": "noon", "docs": ["a"]}, "plain", "the time is 'noon'"
    yield {"t": [1], "docs": ["a"]}, "plain", "the time is"
    yield {"t": 1, "docs": "a"}, "plain", "must be a list"
    yield {"t": 1, "docs": [1.5]}, "plain", "the id of a document is 1.5"
    yield {"t": 1, "docs": [""]}, "plain", "the id of a document is ''"
    yield {"t": 1, "docs": ["a"], "doc_tokens": [1, 2]}, "plain", "one for each document"
    yield {"t": 1, "docs": ["a"], "doc_tokens": [-4]}, "plain", "'doc_tokens' holds -4"
    yield {"t": 1, "docs": ["a"], "question_tokens": -2}, "plain", "'question_tokens' is -2"
    yield {"t": 1, "docs": ["a"], "query_tokens": 2.5}, "plain", "'query_tokens' is 2.5"
    yield {"t": 1, "docs": ["a"], "output_tokens": -1}, "plain", "'output_tokens' is -1"
    yield {"t": 1, "docs": ["a"], "output_tokens": "7"}, "plain", "'output_tokens' is '7'"
    yield run([document("x", "a")], output_tokens=True), "langchain", "'output_tokens' is True"
    yield {"ts": 1, "kv_transfer_params": params(), "usage": {"completion_tokens": -9}}, "vllm", "is -9"
    yield run([document("x", "a")]) | {"outputs": {"documents": 3}}, "langchain", "must be a list"
    yield run(["x"]), "langchain", "must be an object"
    yield run([{"metadata": {}}]), "langchain", "neither an id nor text"
    yield {"time": 1, "kv_transfer_params": {"ragcache": {"version": 9}}}, "vllm", "version 9"
    yield {"kv_transfer_params": params()}, "vllm", "no time"


@pytest.mark.parametrize(("row", "log_format", "message"), list(broken_rows()))
def test_a_broken_line_is_named(tmp_path: Path, row: object, log_format: LogFormat, message: str) -> None:
    with pytest.raises(TraceError, match=r"log.jsonl:2: ") as refused:
        imported(tmp_path, "", row, assumed=Assumptions(mean_tokens=1), log_format=log_format)
    assert message in str(refused.value)


def test_a_log_without_retrievals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no line of the log.*2 about something else"):
        imported(tmp_path, {"a": 1}, {"b": 2})
    with pytest.raises(TraceError, match="cannot be read .No such file"):
        import_log(tmp_path / "none", Assumptions())


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text('{"d17": 1904}')
    assert read_lengths(path) == {"d17": 1904}
    for text, message in (("[]", "are a list"), ('{"d": 0}', "length of 'd' is 0"), ("{", "cannot be read")):
        path.write_text(text)
        with pytest.raises(TraceError, match=message):
            read_lengths(path)
