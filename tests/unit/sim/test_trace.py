"""Traces in columns and in files: what is written is read, and every broken line is named."""

from __future__ import annotations

import gzip
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError, TraceError
from ragcache_core.sim.traces.trace import MAX_TOKENS, Trace, TracedRequest, read_trace, write_trace

LINE: dict[str, Any] = {
    "t": 12.5, "docs": ["d17", "d3"], "doc_tokens": [1904, 655], "question_tokens": 31, "output_tokens": 1
}  # fmt: skip
THREE = [
    TracedRequest(0.5, ("a", "b"), (10, 20), 3, 1),
    TracedRequest(0.5, (), (), 0, 7),
    TracedRequest(4.0, ("b", "c", "b"), (20, 30, 25), 5, 2),
]

documents = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.integers(1, MAX_TOKENS)), max_size=4)
request_parts = st.tuples(
    st.floats(0, 1e9), documents, st.integers(0, MAX_TOKENS), st.integers(1, MAX_TOKENS)
)  # fmt: skip


def as_requests(parts: list[tuple[float, list[tuple[str, int]], int, int]]) -> list[TracedRequest]:
    return [
        TracedRequest(t, tuple(d for d, _ in docs), tuple(n for _, n in docs), question, output)
        for t, docs, question, output in sorted(parts, key=lambda part: part[0])
    ]


def file_of(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def changed(**fields: object) -> str:
    return json.dumps({**LINE, **fields})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(request_parts, min_size=1, max_size=30), st.sampled_from(["trace.jsonl", "trace.jsonl.gz"]))
def test_what_is_written_is_read(tmp_path: Path, parts: list[Any], name: str) -> None:
    requests = as_requests(parts)
    trace = Trace.from_requests(requests)
    assert list(trace) == requests
    write_trace(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert again == trace
    assert list(again) == requests


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    path = file_of(tmp_path, json.dumps(LINE))
    trace = read_trace(path)
    assert list(trace) == [TracedRequest(12.5, ("d17", "d3"), (1904, 655), 31, 1)]
    write_trace(trace, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_text() == json.dumps(LINE) + "\n"


def test_other_fields_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = file_of(tmp_path, changed(user="x"), "", "  \r", changed(t=13))
    assert [request.arrival_s for request in read_trace(path)] == [12.5, 13.0]


def test_a_head_is_the_trace_of_the_first_requests() -> None:
    trace = Trace.from_requests(THREE)
    for count in range(5):
        assert trace.head(count) == Trace.from_requests(THREE[:count])


def test_a_rate_stretches_times_and_nothing_else() -> None:
    trace = Trace.from_requests(THREE)
    assert trace.requests_per_s == 0.75
    slower = trace.with_rate(0.25)
    assert slower.requests_per_s == 0.25
    assert slower.arrival_s.tolist() == [1.5, 1.5, 12.0]
    assert [r.doc_ids for r in slower] == [r.doc_ids for r in THREE]
    with pytest.raises(ConfigError, match="above 0"):
        trace.with_rate(0)
    with pytest.raises(ConfigError, match="at once"):
        Trace.from_requests([TracedRequest(0.0, (), (), 1, 1)]).with_rate(1.0)


def test_a_trace_survives_the_way_to_another_process() -> None:
    trace = Trace.from_requests(THREE)
    assert pickle.loads(pickle.dumps(trace)) == trace
    error = pickle.loads(pickle.dumps(TraceError("broken", Path("x"), 3)))
    assert (str(error), error.line) == ("x:3: broken", 3)


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "cut off": ('{"t": 1.0, "docs": ["d1"', "not JSON"),
    "no object": ("[1, 2]", "is not a request"),
    "not UTF-8": (b'{"t": 12.5, "docs": ["\xff"]}', "not UTF-8"),
    "deep": ("[" * 100_000, "not JSON"),
    "many digits": ('{"t": ' + "9" * 5_000 + "}", "not JSON"),
    "unsorted": (changed(t=3.0), "sorted"),
    "time before the beginning": (changed(t=-1.0), "0 or more"),
    "time is no number": (changed(t=math.nan), "'t' is NaN"),
    "lengths no list": (changed(doc_tokens=5), "must be a list"),
    "a document is a number": (changed(docs=["d1", 2]), "must be strings"),
    "a document without a name": (changed(docs=["d1", ""]), "not empty"),
    "fewer lengths": (changed(doc_tokens=[1]), "1 lengths for 2 documents"),
    "a negative length": (changed(doc_tokens=[1904, -655]), "'doc_tokens' holds -655"),
    "no length": (changed(doc_tokens=[1904, 0]), "'doc_tokens' holds 0"),
    "a length beyond all": (changed(doc_tokens=[1904, 2**31]), "from 1 to 2147483647"),
    "a negative question": (changed(question_tokens=-1), "'question_tokens' holds -1"),
    "no answer": (changed(output_tokens=0), "'output_tokens' holds 0"),
    "a conversation below 0": (changed(conversation=-1), "'conversation' is"),
    "a conversation that is no number": (changed(conversation="seven"), "'conversation' is"),
    "without a time": (json.dumps({name: value for name, value in LINE.items() if name != "t"}), "'t'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, what: str) -> None:
    broken, message = BROKEN[what]
    path = file_of(tmp_path, changed(), broken, changed())
    with pytest.raises(TraceError, match=f"^{path}:2: ") as refused:
        read_trace(path)
    assert message in str(refused.value)
    assert (refused.value.path, refused.value.line) == (path, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_line_cut_anywhere_is_named(tmp_path: Path, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 4))
    lines = [changed(t=float(i)) for i in range(5)]
    lines[number] = lines[number][: data.draw(st.integers(1, len(lines[number]) - 1))]
    with pytest.raises(TraceError) as refused:
        read_trace(file_of(tmp_path, *lines))
    assert refused.value.line == number + 1


@pytest.mark.parametrize("lines", [(), ("",), ("", "  ")])
def test_an_empty_file_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(TraceError, match="trace.jsonl: the trace is empty"):
        read_trace(file_of(tmp_path, *lines))


def cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress((changed() + "\n").encode() * 100)[:-20])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory.*ragcache trace make"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_text(changed()), "Not a gzipped file"),
        (cut_gzip, "ended before"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "trace.jsonl.gz"
    make(path)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_requests_that_cannot_be_are_named_by_number() -> None:
    with pytest.raises(ConfigError, match="request 1 of the trace: 'question_tokens' holds -2"):
        Trace.from_requests([THREE[0], TracedRequest(1.0, (), (), -2, 1)])
    with pytest.raises(ConfigError, match="request 1 of the trace: 't' is 0.5 after 4.0"):
        Trace.from_requests([THREE[2], THREE[0]])


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("before")

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(Trace.from_requests(THREE), path, progress=fail)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["no/folder/trace.jsonl", "."])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, target: str) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(Trace.from_requests(THREE), tmp_path / target)
    assert list(tmp_path.iterdir()) == []
