"""``ragcache bench paper``: what it prints and writes, one clear error for each mistake, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.bench.paper.runs import MISTRAL, Case, PaperRuns, default, ragcache, workload
from ragcache_core.cli import cli
from ragcache_core.cli.subcommands.paper import paper
from ragcache_core.sim.sweep import Journal

pytestmark = pytest.mark.slow


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["bench", "paper", *map(str, arguments)])


def test_a_table_is_printed_with_the_papers_numbers_written_and_drawn(tmp_path: Path) -> None:
    output, plot = tmp_path / "out" / "paper.json", tmp_path / "paper.html"
    done = run("--figure", "19", "--table", "3", "--quick", "--jobs", "1", "--output", output, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert "Table 3: vector search that is not hidden" in done.stdout
    assert "mmlu, 12.5% searched, DSP " in done.stdout
    assert "52.10 ms" in done.stdout
    assert "reproduction: agrees in" in done.stdout
    assert 'on an engine: make bench-pipeline ONLY="overlap"' in done.stdout
    report = json.loads(output.read_text())
    assert [exhibit["name"] for exhibit in report["exhibits"]] == ["Figure 19", "Table 3"]
    assert (report["seeds"], report["requests"]) == ([101, 101], 120)
    assert plot.read_text().count("<svg") == 2
    assert done.stderr.splitlines() == [
        "ragcache: warning: 120 requests each instead of an hour of them, which the figures' texts name: whether a row "
        "agrees means nothing",
        f"ragcache: written to {output}",
        f"ragcache: written to {plot}",
    ]


def test_a_table_can_be_printed_as_a_section_of_a_page() -> None:
    done = run("--table", "4", "--quick", "--jobs", "1", "--markdown")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("#### Table 4: scheduling time")
    assert "| 0.5 requests/s, median | 0.88 ms | Table 4 | " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "--figure N, --table N, or --all"),
        (["--figure", "12"], 2, "'12' is not one of"),
        (["--cache-craft", "20"], 2, "'20' is not one of"),
        (["--table", "1"], 2, "'1' is not one of"),
        (["--table", "3", "--seeds", "0"], 2, "--seeds"),
        (["--table", "3", "--jobs", "0"], 2, "--jobs"),
        (["--table", "3", "--resume"], 2, "--output OUT"),
        (["--table", "3", "--plot", "out.pdf"], 2, "the name must end in .png, .svg, .html"),
        (["--figure", "17", "--requests", "2", "--seeds", "1"], 1, "ragcache: error: 2 requests are too few"),
    ],
)
def test_a_mistake_is_one_clear_error(arguments: list[str], status: int, message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == status, done.output
    assert message in done.stderr


def test_the_help_shows_examples_and_every_figure() -> None:
    done = CliRunner().invoke(paper, ["--help"])
    assert "Examples:" in done.stdout
    assert "13|14|15|16|17|18|19" in done.stdout
    assert "2|3|4" in done.stdout


def test_ctrl_c_ends_with_130_leaves_no_process_and_what_is_finished_need_not_be_done_again(tmp_path: Path) -> None:
    output = tmp_path / "paper.json"
    arguments = ["bench", "paper", "--figure", "19", "--table", "4", "--requests", "60", "--seeds", "1", "--jobs", "1"]
    code = "from ragcache_core.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--output", str(output)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not output.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # a poll: another process or thread makes it true
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors.splitlines() == [
        "ragcache: 1 of 2 figures are finished: add --resume to go on", "ragcache: interrupted",
    ]  # fmt: skip
    assert printed.startswith("Figure 19: ")
    assert len(json.loads(output.read_text())["exhibits"]) == 1
    journal = tmp_path / "paper.json.runs.jsonl"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["paper.json", journal.name]
    kept = journal.read_text()
    refused = run(*arguments[2:], "--output", output)
    assert (refused.exit_code, journal.read_text()) == (1, kept)
    assert "add --resume to go on" in refused.stderr
    done = run(*arguments[2:], "--output", output, "--resume")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(printed[: printed.index("\n\n")]), "the same figure from the runs that were kept"
    assert [exhibit["name"] for exhibit in json.loads(output.read_text())["exhibits"]] == ["Figure 19", "Table 4"]
    assert [path.name for path in tmp_path.iterdir()] == ["paper.json"]


def test_going_on_with_one_figure_keeps_the_runs_of_the_others(tmp_path: Path) -> None:
    output = tmp_path / "paper.json"
    journal = Journal(tmp_path / "paper.json.runs.jsonl")
    PaperRuns(num_seeds=1, journal=journal).summaries([Case(workload("nq", 3.0), ragcache(MISTRAL), 60)])
    others = journal.read().keys()
    done = run("--table", "3", "--requests", "60", "--seeds", "1", "--jobs", "1", "--output", output, "--resume")
    assert done.exit_code == 0, done.output
    assert f"{journal.path} keeps 1 finished runs that were not asked for" in done.stderr
    assert others <= journal.read().keys()


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, option: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run("--table", "3", option, blocked / "out.svg")
    assert done.exit_code == 1
    assert f"ragcache: error: {option} {blocked / 'out.svg'} cannot be written" in done.stderr


def test_runs_that_were_kept_are_not_done_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.jsonl")
    case = Case(workload("mmlu", 1.0), default(ragcache(MISTRAL)), 60)
    first = PaperRuns(num_seeds=1, journal=journal).summaries([case])[case]
    planned: list[int] = []
    again = PaperRuns(num_seeds=2, finished=journal.read(), journal=journal, on_plan=planned.append)
    both = again.summaries([case])[case]
    assert planned == [60], "that of the second seed"
    assert both[0] == first[0]
    assert len(journal.read()) == 2
