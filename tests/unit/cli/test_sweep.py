"""``ragcache simulate sweep``: a table, a file, a plot; what is finished is kept; what cannot work is said at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli.commands.sweep import sweep
from ragcache_core.sim.sweep import FinishedRun, Journal
from ragcache_core.sim.traces.trace import write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

pytestmark = pytest.mark.slow

SMALL = ("--policies", "lru,pgdsf", "--host-tokens", "0,20000", "--gpu-tokens", "20000", "--jobs", "2")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    write_trace(make_trace(replace(WORKLOADS["nq-small"], most_tokens=4_000), 200, seed=1), path)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(sweep, [str(argument) for argument in arguments])


def journal_of(output: Path) -> Journal:
    return Journal(output.with_name(output.name + ".runs.jsonl"))


def test_a_sweep_prints_a_row_and_writes_an_entry_for_every_run(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "sweep.json"
    done = run(trace, *SMALL, "--output", output)
    assert done.exit_code == 0, done.output
    head, *rows = done.stdout.splitlines()
    assert head.split()[:2] == ["policy", "host"]
    assert [row.split()[:2] for row in rows] == [["lru", "0"], ["lru", "20,000"], ["pgdsf", "0"], ["pgdsf", "20,000"]]
    runs = json.loads(output.read_text())["runs"]
    assert [(r["options"]["policy"], r["options"]["host_tokens"]) for r in runs] == [
        ("lru", 0), ("lru", 20_000), ("pgdsf", 0), ("pgdsf", 20_000),
    ]  # fmt: skip
    assert all(r["summary"]["mean_ttft_s"] > 0 and r["trace"] == str(trace) for r in runs)
    assert not journal_of(output).path.exists()


def test_fleets_are_an_axis_of_a_sweep(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "fleet.svg"
    fleets = ("--replicas", "1,2", "--routing", "round-robin,joint")
    done = run(trace, "--policies", "lru", "--host-tokens", "20000", *fleets, "--plot", plot)
    assert done.exit_code == 0, done.output
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["policy", "routing", "replicas"]
    assert head.split()[-1] == "busiest"
    runs = [row.split()[1:3] for row in rows]
    assert runs == [["round-robin", "1"], ["joint", "1"], ["round-robin", "2"], ["joint", "2"]]
    assert "replicas" in plot.read_text()
    refused = run(trace, "--replicas", "0")
    assert refused.exit_code == 1
    assert "replicas is 0" in refused.stderr


def test_resume_runs_what_is_missing_and_nothing_else(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(trace, *SMALL, "--output", output)
    report = json.loads(output.read_text())
    marked = {**report["runs"][0], "summary": {**report["runs"][0]["summary"], "mean_ttft_s": 99.0}}
    journal_of(output).append(FinishedRun.from_dict(marked))
    output.write_text(json.dumps({**report, "runs": report["runs"][1:2]}))
    done = run(trace, *SMALL, "--output", output, "--resume")
    assert done.exit_code == 0, done.output
    assert "2 of 4 runs are finished already" in done.stderr
    again = json.loads(output.read_text())["runs"]
    assert again[0]["summary"]["mean_ttft_s"] == 99.0
    assert [r["key"] for r in again] == [r["key"] for r in report["runs"]]


def test_a_sweep_does_not_overwrite_what_an_interrupted_one_finished(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(trace, *SMALL, "--output", output)
    journal = journal_of(output)
    journal.append(FinishedRun.from_dict(json.loads(output.read_text())["runs"][0]))
    done = run(trace, *SMALL, "--output", output)
    assert done.exit_code == 1
    assert "1 finished runs of an interrupted sweep: add --resume" in done.stderr
    assert len(journal.read()) == 1


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_a_plot_is_written_as_its_name_says(trace: Path, tmp_path: Path, kind: str) -> None:
    plot = tmp_path / f"plot.{kind}"
    assert run(trace, *SMALL, "--plot", plot).exit_code == 0
    content = plot.read_bytes()
    if kind == "svg":
        ElementTree.fromstring(content)
        assert "small.jsonl (200 requests). Cost model a10g-mistral-7b; GPU 20,000 tokens, no disk" in content.decode()
    else:  # the table and the options as well
        rows = re.findall(r"<tr><td class=text>(lru|pgdsf)</td><td class=text>([\d,]+)</td>", content.decode())
        assert rows == [("lru", "0"), ("lru", "20,000"), ("pgdsf", "0"), ("pgdsf", "20,000")]
        assert "<td class=text>host tokens</td><td class=text>0, 20,000</td>" in content.decode()
    text = content.decode()
    assert all(word in text for word in ("Mean time to first token", "Hit rate", "host memory, tokens", "lru", "pgdsf"))
    assert text.startswith("<?xml" if kind == "svg" else "<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_an_interrupted_sweep_reports_how_to_go_on_and_does(tmp_path: Path, trace: Path) -> None:
    long, output = tmp_path / "long.jsonl", tmp_path / "sweep.json"
    write_trace(make_trace(WORKLOADS["mmlu"], 2_500, seed=1), long)
    small = ("--policies", "lru", "--host-tokens", "65536", "--jobs", "2")
    arguments: list[str | Path] = [trace, long, *small, "--output", output]
    code = "from ragcache_core.cli.commands.sweep import sweep\nif __name__ == '__main__': sweep()"
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while not journal_of(output).read():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # a poll: another process or thread makes it true
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "1 of 2 runs are finished: add --resume to go on" in errors
    assert "Traceback" not in errors
    done = run(*arguments, "--resume")
    assert done.exit_code == 0, done.output
    assert "1 of 2 runs are finished already" in done.stderr
    assert len(json.loads(output.read_text())["runs"]) == 2
