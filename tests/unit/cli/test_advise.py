"""``ragcache advise``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.sim.traces.trace import write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    write_trace(make_trace(WORKLOADS["mmlu"], 60, seed=3), path)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["advise", *map(str, arguments)])


def test_changes_are_shown_best_first_with_their_price_and_the_expensive_documents(log: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "advice.svg"
    result = run("--log", log, "--price", "2", "--output", out, "--plot", picture, "--gpu-tokens", "20000")
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["now"]["options"]["gpu_tokens"] == 20_000
    assert data["now"]["options"]["warm_up"] == 12
    lines = result.stdout.splitlines()
    assert [lines[0].split()[0], lines[1].split()[0]] == ["mean", "now"]
    best = min(data["changes"], key=lambda change: change["mean_ttft_s"])
    assert lines[2].startswith(best["name"])
    assert f"{best['saved']:,.2f}" in lines[2]
    assert data["documents"][0]["doc_id"] in result.stdout.split("most expensive documents")[1].splitlines()[1]
    assert "Mean time to first token" in picture.read_text()


def test_json_is_the_same_as_what_is_written(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("--log", log, "--json", "--output", out)
    assert json.loads(result.stdout) == json.loads(out.read_text())
