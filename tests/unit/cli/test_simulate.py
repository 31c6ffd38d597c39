"""``ragcache simulate``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

SUMMARY_KEYS = {
    *("document_hit_rate", "token_hit_rate", "hits_by_tier", "mean_ttft_s", "p50_ttft_s", "p99_ttft_s"),
    *("throughput_rps", "reordered_share", "max_overtaken", "swapped_out_tokens", "loaded_tokens"),
    *("p50_decision_s", "p99_decision_s"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(make_trace(replace(WORKLOADS["mmlu"], mean_tokens=600.0, most_tokens=1_500), 200, seed=3), path)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def test_a_run_is_shown_as_a_table_and_written_as_json(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(trace, "--policy", "pgdsf", "--host-tokens", "131072", "--output", out)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["options"]["policy"] == "pgdsf"
    assert data["options"]["host_tokens"] == 131_072
    assert set(data["summary"]) >= SUMMARY_KEYS
    assert "requests" not in data
    assert result.stdout.startswith("requests   200, ")
    assert f"mean {data['summary']['mean_ttft_s']:.3f} s" in result.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_reused_documents_are_counted_and_shown(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(trace, "--chunk-reuse", "0.3", "--chunk-share", "0.25", "--host-tokens", "200000", "--output", out)
    assert result.exit_code == 0, result.output
    summary = json.loads(out.read_text())["summary"]
    counts = [summary[name] for name in ("chunk_reused_tokens", "chunk_recomputed_tokens")]
    assert min(counts) > 0
    assert "{:,} tokens reused, {:,} of theirs recomputed; 0.25 of host and disk".format(*counts) in result.stdout
    assert "chunks" not in run(trace).stdout


def test_a_fleet_is_shown_replica_by_replica_and_as_a_whole(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(trace, "--replicas", "3", "--routing", "round-robin", "--output", out)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert sum(one["num_requests"] for one in data["replicas"]) == data["summary"]["num_requests"] == 200
    assert data["options"]["routing"] == "round-robin"
    lines = result.stdout.splitlines()
    assert (
        f"3, routing round-robin; the busiest computes {data['summary']['busiest_over_mean']:.2f} of the mean"
        in lines[2]
    )
    head = next(i for i, line in enumerate(lines) if line.startswith("replica  "))
    assert [line.split()[:2] for line in lines[head + 1 :]] == [
        [str(i), str(one["num_requests"])] for i, one in enumerate(data["replicas"])
    ]
    assert "replicas" not in json.loads(run(trace, "--json").stdout)


def test_an_interrupted_run_leaves_one_line_and_its_status(tmp_path: Path) -> None:
    path, out = tmp_path / "long.jsonl", tmp_path / "out.json"
    one = TracedRequest(0.0, ("a", "b"), (10, 10), 1, 1)
    write_trace(Trace.from_requests([one] * 2_000), path)
    command = [sys.executable, "-c", _INTERRUPTED, "simulate", str(path), "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 130
    assert done.stderr.strip() == "ragcache: interrupted"
    assert done.stdout == ""
    assert not out.exists()


_INTERRUPTED = f"""
import os
import ragcache_core.sim.simulator as simulator
from ragcache_core.cli import main
simulate = simulator.simulate
def interrupted(trace, options, *, progress, keeps_requests):
    def told(num_requests):
        os.kill(os.getpid(), {signal.SIGINT:d})
    return simulate(trace, options, progress=told, keeps_requests=keeps_requests)
simulator.simulate = interrupted
main()
"""
