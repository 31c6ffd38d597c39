"""``ragcache serve`` as its own process: started, asked, ended; nothing of it is left."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.retrieval import DocumentStore
from ragcache_core.sim.traces.trace import read_trace
from ragcache_core.types import Document

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
STARTUP_S = 240.0


@contextmanager
def serving(log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``ragcache serve`` over the demo model; kill it if the test did not end it."""
    model = str(ROOT / "examples" / "demo_model")
    arguments = ["serve", model, "--port", "0", "--log", str(log), "--json", "--kv-cache-bytes", "64MiB", *options]
    vllm_args = ["--", "--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
    with subprocess.Popen(
        [sys.executable, "-m", "ragcache_core", *arguments, *vllm_args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        umask=0,  # what it writes is its owner's alone all the same
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_is_started_asked_and_ended_by_ctrl_c_without_a_trace(tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path / "notes.store", index="flat") as store:
        store.add([Document("zor.md", "the house of zor is near the river.")])
    recorded = tmp_path / "requests.jsonl"
    disk = ["--disk-bytes", "16MiB", "--cache-dir", str(tmp_path / "var" / "cache")]
    with serving(tmp_path / "logs" / "server.log", "--record-trace", str(recorded), *disk) as process:
        announced = json.loads(first_line(process))
        assert announced["pid"] == process.pid
        assert Path(announced["log"]).read_text()
        tree = psutil.Process(process.pid).children(recursive=True)
        assert tree
        question = ["ask", "where is the house of zor", "--store", str(tmp_path / "notes.store"), "--k", "1"]
        result = CliRunner().invoke(
            cli, [*question, "--url", announced["url"], "--api-key", announced["api_key"], "--max-tokens", "4"]
        )
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()
        in_memory = list(Path("/dev/shm").glob(f"*ragcache-*-{process.pid}-*"))
        assert len(in_memory) >= 2  # a folder for sockets, a link to host memory
        assert open_to_others(in_memory) == []

        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), err
        assert err.splitlines()[-1] == "ragcache: stopping"
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", urlsplit(announced["url"]).port))
    (request,) = read_trace(recorded)
    assert request.doc_ids == ("zor.md",)
    assert 0 < request.arrival_s < STARTUP_S
    assert request.doc_tokens[0] > 5
    assert request.question_tokens > 5
    assert 0 < request.output_tokens <= 4
    written = list(tmp_path.rglob("*"))
    assert {"server.log", "chunks.data", "index.sqlite", "requests.jsonl"} <= {path.name for path in written}
    assert open_to_others(written) == []
    assert "river" not in recorded.read_text()
    assert CliRunner().invoke(cli, ["simulate", str(recorded)]).exit_code == 0


def test_sigterm_while_the_model_is_loading_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving(log) as process:
        tree = wait_for_children(process)
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive


def open_to_others(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.stat().st_mode & 0o077]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], STARTUP_S)
    if not ready:
        pytest.fail("the server announced nothing")
    return process.stdout.readline()


def wait_for_children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    while not (children := parent.children(recursive=True)):
        assert process.poll() is None
        time.sleep(0.05)
    return children
