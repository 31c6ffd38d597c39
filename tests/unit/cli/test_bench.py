"""``ragcache bench``: its options, one clear error for each mistake, and what an interruption leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ragcache_core.bench.load import Load
from ragcache_core.cli import cli
from tests.support.scripted_server import ScriptedServer


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


def on(server: ScriptedServer, path: Path) -> list[str]:
    """Return the arguments of a small load on a server that runs."""
    amounts = ["--requests", "3", "--warm-up", "2", "--seeds", "2", "--rates", "50,100"]
    return ["--engine", server.url, "--scale", "0.125", *amounts, "--output", str(path)]


def test_a_server_that_runs_is_put_under_load(tmp_path: Path) -> None:
    with ScriptedServer(max_model_len=100_000) as server:
        done = bench(*on(server, tmp_path / "out.json"), "--html", str(tmp_path / "report.html"))
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    keys = [(run["seed"], run["rate"], len(run["ttft_s"])) for run in report["runs"]]
    assert keys == [(0, 0, 3), (0, 1, 3), (1, 0, 3), (1, 1, 3)]
    assert report["runs"][0]["cpu_s"] is None
    assert "At 50 requests/s" in done.stdout
    assert (tmp_path / "report.html").is_file()
    said = done.stderr.splitlines()
    assert any(line.startswith("ragcache: warning: 3 requests at each rate are few") for line in said)


def test_an_interruption_keeps_what_is_finished_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replay, num_replayed = tmp_path / "out.json", Load.replay, 0

    def interrupted(self: Load, *args: Any) -> Any:
        nonlocal num_replayed
        num_replayed += 1
        if num_replayed == 3:
            raise KeyboardInterrupt
        return replay(self, *args)

    with ScriptedServer(max_model_len=100_000) as server:
        monkeypatch.setattr(Load, "replay", interrupted)
        stopped = bench(*on(server, path))
        monkeypatch.setattr(Load, "replay", replay)
        kept = json.loads(path.read_text(encoding="utf-8"))["runs"]
        refused = bench(*on(server, path))
        resumed = bench(*on(server, path), "--resume")
    assert stopped.exit_code == 130
    assert "ragcache: 2 runs are finished: add --resume to continue" in stopped.stderr
    assert "ragcache: interrupted" in stopped.stderr
    assert [(run["seed"], run["rate"]) for run in kept] == [(0, 0), (0, 1)]
    assert refused.exit_code == 1
    assert "continue with --resume" in refused.stderr
    assert resumed.exit_code == 0, resumed.output
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert runs[:2] == kept
    assert [(run["seed"], run["rate"]) for run in runs[2:]] == [(1, 0), (1, 1)]
