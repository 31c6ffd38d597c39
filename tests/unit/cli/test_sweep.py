"""``ragcache simulate sweep``: a table, a file, a plot; what is finished is kept; what cannot work is said at once."""

from __future__ import annotations

import errno
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

from ragcache_core.cli.subcommands.sweep import sweep
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


def test_resume_does_not_write_over_runs_that_it_could_not_read(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "sweep.json"
    run(trace, *SMALL, "--output", output)
    whole, real = output.read_bytes(), Path.read_bytes

    def fail(path: Path) -> bytes:
        if path == output:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        done = run(trace, *SMALL, "--output", output, "--resume")
    assert done.exit_code != 0
    assert "cannot be read (Input/output error): see to that, or name another file with --output" in done.stderr
    assert output.read_bytes() == whole


def test_resume_keeps_finished_runs_that_were_not_asked_for(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(trace, *SMALL, "--output", output)
    journal = journal_of(output)
    for data in json.loads(output.read_text())["runs"]:
        journal.append(FinishedRun.from_dict(data))
    output.unlink()
    narrower = run(trace, *SMALL, "--policies", "lru", "--output", output, "--resume")
    assert narrower.exit_code == 0, narrower.output
    assert f"{journal.path} keeps 2 finished runs that were not asked for" in narrower.stderr
    again = run(trace, *SMALL, "--output", output, "--resume")
    assert "4 of 4 runs are finished already" in again.stderr
    assert not journal.path.exists()


def test_what_a_reader_should_know_of_the_runs_is_said_once(trace: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    seconds = [[0.03, 0.1], [0.04, 0.12]]
    times = {"format": 1, "cached_tokens": [0, 512], "new_tokens": [32, 512], "seconds": seconds}
    profile.write_text(json.dumps(times))
    done = run(trace, *SMALL, "--cost-model", profile)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("512 cached and 512 new tokens") == 1
    assert "512 cached" not in done.stdout


def test_why_belady_is_no_bound_stands_in_the_file_and_in_every_picture(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, output = "lru came out better than belady", tmp_path / "sweep.json"
    monkeypatch.setattr("ragcache_core.sim.belady.above_belady", lambda runs: [said] * len(runs[:1]))
    for kind in ("svg", "html"):
        plot = tmp_path / f"plot.{kind}"
        done = run(trace, "--policies", "lru", "--host-tokens", "0", "--output", output, "--plot", plot)
        assert done.exit_code == 0, done.output
        assert said in done.stderr
        assert said in " ".join(re.sub(r"<[^>]*>", " ", plot.read_text()).split())
    assert json.loads(output.read_text())["notes"] == [said]


def test_a_bound_that_is_left_out_is_named(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    done = run(trace, *SMALL, "--policies", "belady", "--orders", "retrieval,cache_aware", "--output", output)
    assert done.exit_code == 0, done.output
    assert "ragcache: there is no belady with order cache_aware" in done.stderr
    whole = json.loads(output.read_text())
    assert len(whole["runs"]) == 2
    assert any("no belady with order cache_aware" in note for note in whole["notes"])


def test_one_file_for_numbers_and_picture_is_refused(trace: Path, tmp_path: Path) -> None:
    done = run(trace, *SMALL, "--output", tmp_path / "one.html", "--plot", tmp_path / "one.html")
    assert done.exit_code == 1
    assert f"--output and --plot are both {tmp_path / 'one.html'}" in done.stderr
    assert not (tmp_path / "one.html").exists()


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    trace: Path, tmp_path: Path, option: str
) -> None:
    blocked = trace / "new" / "out.svg"
    kept = tmp_path / "kept.json"
    done = run(trace, *SMALL, "--output", kept, option, blocked)
    assert done.exit_code == 1
    assert f"{option} {blocked} cannot be written, {trace} is no directory" in done.stderr
    assert not list(tmp_path.glob("kept.json*"))


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


def test_traces_are_drawn_apart_and_json_is_everything_on_standard_output(trace: Path, tmp_path: Path) -> None:
    other, plot = tmp_path / "other.jsonl", tmp_path / "plot.html"
    other.write_bytes(trace.read_bytes())
    done = run(trace, other, *SMALL, "--plot", plot, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["runs"]) == 8
    titles = re.findall(r">((?:Mean time|Hit rate)[^<]*)<", plot.read_text())
    assert titles == [f"{what}, {name}.jsonl" for name in ("small", "other")
                      for what in ("Mean time to first token", "Hit rate")]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--policies", "lru,best"), 2, "'best'"),
        (("--host-tokens", "1,-5"), 2, "'-5'"),
        (("--gpu-tokens", "0"), 1, "--gpu-tokens"),
        (("--cost-model", "a100"), 1, "a100"),
        (("--resume",), 2, "--output OUT"),
    ],
)
def test_what_cannot_work_is_one_clear_error(trace: Path, arguments: tuple[str, ...], status: int, said: str) -> None:
    done = run(trace, *arguments)
    assert done.exit_code == status, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_a_broken_trace_is_named_with_its_line_before_anything_runs(trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace.read_text() + "{}\n")
    output = tmp_path / "sweep.json"
    done = run(trace, broken, *SMALL, "--output", output)
    assert done.exit_code == 1
    assert "broken.jsonl:201" in done.stderr
    assert not list(tmp_path.glob("sweep.json*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--warm-up", "150"), "short.jsonl: --warm-up is 150, the trace has 100 requests: lower --warm-up"),
        (("--host-tokens", "0,65536", "--disk-tokens", "9"), "--disk-tokens is 9"),
    ],
)
def test_what_fails_for_one_run_of_many_is_refused_before_the_first(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    short = tmp_path / "short.jsonl"
    write_trace(make_trace(WORKLOADS["nq-small"], 100, seed=1), short)
    monkeypatch.setattr("ragcache_core.sim.sweep.run_all", lambda *_, **__: pytest.fail("it ran"))
    done = run(trace, short, *SMALL, *arguments)
    assert done.exit_code == 1
    assert said in done.stderr


def test_an_interrupted_sweep_says_how_to_go_on_and_does(tmp_path: Path, trace: Path) -> None:
    long, output = tmp_path / "long.jsonl", tmp_path / "sweep.json"
    write_trace(make_trace(WORKLOADS["mmlu"], 2_500, seed=1), long)
    small = ("--policies", "lru", "--host-tokens", "65536", "--jobs", "2")
    arguments: list[str | Path] = [trace, long, *small, "--output", output]
    code = "from ragcache_core.cli.subcommands.sweep import sweep\nif __name__ == '__main__': sweep()"
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
