"""A server's log in a file, in a pipe, on a terminal and on this process's own streams."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragcache_core.client.launch import process
from ragcache_core.client.launch.process import ServerLog, ServerProcess, is_stream
from tests.support.waiting import until

SERVER = """
import sys
from pathlib import Path
from ragcache_core.client.launch import process

process.SERVER_MODULE = "this"  # prints a text of its own and ends
server = process.ServerProcess([], env={}, log_path=Path(sys.argv[1]))
server.wait()
assert "Beautiful is better" in server.log_text()
assert server.last_words().endswith(f"(log: {sys.argv[1]})")
server.stop()
print("done", flush=True)
"""


def run(log: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", SERVER, log], timeout=60, check=False, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("log", ["/dev/stdout", "/dev/stderr"])
def test_a_standard_stream_that_is_a_pipe_gets_the_log_and_the_last_words_are_known(log: str) -> None:
    done = run(log, capture_output=True)
    assert done.returncode == 0, done.stderr
    said = done.stderr if log == "/dev/stderr" else done.stdout
    assert b"Beautiful is better" in said
    assert done.stdout.endswith(b"done\n")


def test_a_file_that_is_standard_output_keeps_what_both_of_them_wrote(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        out.write(b"before\n")
        out.flush()
        assert run("/dev/stdout", stdout=out, stderr=subprocess.PIPE).returncode == 0
    text = (tmp_path / "out").read_text()
    assert text.startswith("before\nThe Zen of Python")
    assert text.endswith("done\n")


def test_a_terminal_gets_the_log() -> None:
    ours, terminal = pty.openpty()
    said = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                said.extend(data)
        except OSError:
            pass  # the terminal's other end was closed

    reader = threading.Thread(target=read)
    reader.start()
    done = run("/dev/stdout", stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    reader.join()
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert b"Beautiful is better" in said


def test_a_named_pipe_gets_the_log_and_survives_a_closed_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert is_stream(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = ServerLog(fifo)
    os.write(log.descriptor, b"first\n")
    assert until(lambda: log.text() == "first\n")
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    for _ in range(64):  # more than a pipe holds
        os.write(log.descriptor, b"x" * 4096)
    os.write(log.descriptor, b"ValueError: 1\n")
    log.hand_over()
    assert log.text(has_exited=True).endswith("ValueError: 1\n")
    assert len(log.text()) <= 1 << 18


def test_a_file_keeps_earlier_runs_and_reports_its_own_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    for number in range(2):
        log = ServerLog(path)
        os.write(log.descriptor, f"run {number}\n".encode())
        log.hand_over()
        assert log.text() == f"run {number}\n"
    assert path.read_text() == "run 0\nrun 1\n"
    assert not is_stream(path)


@pytest.mark.parametrize("name", ["APIServer", "EngineCore_DP0", "VllmWorker-0"])
def test_the_last_words_are_the_error_of_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(process, "SERVER_MODULE", "this")
    server = process.ServerProcess([], env={}, log_path=tmp_path / "log")
    server.wait()
    monkeypatch.setattr(
        server,
        "log_text",
        lambda: (
            f"({name} pid=7) ERROR 11-28 16:40:11 [worker.py:9] errors.ConfigError: prefix caching is off\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        ),
    )
    assert "prefix caching is off" in server.last_words()
    server.stop()


def test_a_log_that_cannot_be_written_is_refused_with_a_hint(tmp_path: Path) -> None:
    from ragcache_core.errors import EngineStartError

    with pytest.raises(EngineStartError, match="cannot write the server's log .*; set log_path"):
        ServerProcess([], env={}, log_path=tmp_path)


@pytest.mark.parametrize("to_file", [False, True])
def test_a_log_of_json_is_lines_of_json_and_its_text_is_known_as_it_was(tmp_path: Path, *, to_file: bool) -> None:
    program = SERVER.replace("log_path=Path(sys.argv[1])", "log_path=Path(sys.argv[1]), log_as_json=True")
    program = program.replace('print("done", flush=True)', "")
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", program, str(log) if to_file else "/dev/stdout"]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = (log.read_text() if to_file else done.stdout.decode()).splitlines()
    assert "Beautiful is better than ugly." in [json.loads(line)["message"] for line in lines]
