"""Recorded requests are a trace: in the order of arrival, private, whole whenever the process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import TraceError
from ragcache_core.runtime.trace_recorder import TraceRecorder, recording_in_server
from ragcache_core.sim.traces.trace import TracedRequest, read_trace
from tests.support.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.jsonl"


def test_what_is_recorded_is_read_as_a_trace_in_the_order_of_arrival(path: Path) -> None:
    recorder = TraceRecorder(path, since_s=1000.0)
    for key, arrived_s in (("a", 1001.0), ("b", 1001.5), ("gone", 1001.7), ("c", 1002.0)):
        recorder.begin(key, arrived_s)
    recorder.end("c", [], 3, 0)
    recorder.end("b", [("d1", 40), ("d2", 0)], 5, 7)
    recorder.end("unknown", [("d9", 9)], 5, 7)
    recorder.drop("gone")
    recorder.drop("b")
    recorder.end("a", [("d\u00e9", 30)], 4, 6)
    recorder.close()
    recorder.close()
    assert list(read_trace(path)) == [
        TracedRequest(1.0, ("d\u00e9",), (30,), 4, 6),
        TracedRequest(1.5, ("d1", "d2"), (40, 1), 5, 7),
        TracedRequest(2.0, (), (), 3, 1),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


@given(orders=st.permutations(range(12)))
def test_a_line_is_there_once_all_that_came_before_have_ended(
    tmp_path_factory: pytest.TempPathFactory, orders: list[int]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    with TraceRecorder(path, since_s=0.0) as recorder:
        for number in range(12):
            recorder.begin(number, float(number))
        for number in orders[:-1]:
            recorder.end(number, [(str(number), 1)], 1, 1)
        assert until(lambda: path.read_bytes().count(b"\n") == orders[-1])
        assert path.read_bytes().count(b"\n") == orders[-1], "and no other"
    assert [request.doc_ids for request in read_trace(path)] == [(str(n),) for n in range(12) if n != orders[-1]]


def test_a_recording_is_continued_by_an_engine_that_is_started_again(path: Path) -> None:
    for number in (1, 2):
        with TraceRecorder(path, since_s=100.0) as recorder:
            recorder.begin("a", 100.0 + number)
            recorder.end("a", [("d", number)], 1, 1)
    assert [(r.arrival_s, r.doc_tokens) for r in read_trace(path)] == [(1.0, (1,)), (2.0, (2,))]


def test_a_file_that_may_not_be_taken_is_refused_with_a_hint(path: Path, tmp_path: Path) -> None:
    path.write_text("precious\n")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("mine.jsonl", "link", "pipe", "no/folder"):
        for record in (TraceRecorder, recording_in_server):
            with pytest.raises(TraceError, match="name a"):
                record(tmp_path / name)
    assert path.read_text() == "precious\n"
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_an_engine_records_into_is_not_taken_by_another(path: Path) -> None:
    recording_in_server(path)
    recorder = TraceRecorder(path, since_s=0.0)
    with pytest.raises(TraceError, match="another process records into this file: choose another"):
        recording_in_server(path)
    recorder.close()
    recording_in_server(path)


def test_a_hanging_disk_delays_no_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, is_requested, goes_on = TraceRecorder(path), threading.Event(), threading.Event()

    class Stuck:
        def write(self, line: bytes) -> None:
            is_requested.set()
            goes_on.wait(60.0)
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(recorder, "_file", Stuck())
    with ThreadPoolExecutor(4) as threads:
        for key in range(1000):
            threads.submit(recorder.begin, key)
            threads.submit(recorder.end, key, [("d", 1)], 1, 1)
    assert is_requested.wait(60.0), "all have ended, and the disk has not answered"
    assert not goes_on.is_set()
    assert recorder._thread.is_alive(), "it is only the thread that waits"
    goes_on.set()
    recorder.close()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_has_ended_outlives_a_process_that_is_killed(path: Path, end: signal.Signals) -> None:
    program = (
        "import sys, time; from ragcache_core.runtime.trace_recorder import TraceRecorder\n"
        "r = TraceRecorder(sys.argv[1])\n"
        "for i in range(100): r.begin(i); r.end(i, [('d', 5)], 1, 1)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)])
    try:
        assert until(lambda: path.exists() and path.read_bytes().count(b"\n") == 100, 30.0)
    finally:
        process.send_signal(end)
        process.wait(30.0)
    assert len(read_trace(path)) == 100
