"""``ragcache trace``: traces made, imported and looked at from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.cli.commands.trace import LOG_FORMATS
from ragcache_core.sim.traces.log_formats import PUBLISHED_READERS, READERS
from ragcache_core.sim.traces.trace import read_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace


def trace(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)])


def make_one(folder: Path, *options: str) -> Result:
    return trace("make", "--workload", "mmlu", "--requests", "200", *options, "--output", folder / "made.jsonl")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_can_be_made(tmp_path: Path, workload: str) -> None:
    path = tmp_path / "made.jsonl.gz"
    result = trace("make", "--workload", workload, "--requests", "50", "--seed", "7", "--output", path)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert read_trace(path) == make_trace(WORKLOADS[workload], 50, 7)


def test_a_trace_goes_to_standard_output_if_no_file_is_named(tmp_path: Path) -> None:
    assert make_one(tmp_path).exit_code == 0
    result = trace("make", "--workload", "mmlu", "--requests", "200")
    assert result.stdout == (tmp_path / "made.jsonl").read_text()
    assert "give --output FILE" in trace("make", "--workload", "mmlu", "--requests", "2", "--json").stderr


def test_show_reports_what_a_trace_is_like(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"t": 1, "docs": ["a", "b"], "doc_tokens": [10, 30], "question_tokens": 5, "output_tokens": 1}\n'
        '{"t": 2, "docs": ["a", "c"], "doc_tokens": [10, 50], "question_tokens": 7, "output_tokens": 3}\n'
        '{"t": 4, "docs": ["c"], "doc_tokens": [50], "question_tokens": 9, "output_tokens": 2}\n'
    )
    said = json.loads(trace("show", path, "--json").stdout)
    reuse = said.pop("reuse")
    assert [one["anywhere"] for one in reuse["positions"]] == [pytest.approx(2 / 3), 0.0]
    assert said == {
        "trace": str(path), "num_requests": 3, "duration_s": 4.0, "requests_per_s": 0.75, "num_documents": 3,
        "num_retrievals": 5, "documents_per_request": 5 / 3, "mean_document_tokens": 30.0,
        "median_prompt_tokens": 59.0, "mean_prompt_tokens": 57.0, "max_prompt_tokens": 67,
        "mean_question_tokens": 7.0, "mean_output_tokens": 2.0, "top_share": 0.4,
        "repeated_retrievals": pytest.approx(0.4), "repeated_prefix": pytest.approx(0.2),
        "num_conversations": 0, "turns_per_conversation": 0.0, "median_think_s": 0.0, "history_share": 0.0,
    }  # fmt: skip
    lines = trace("show", path).stdout.splitlines()
    assert lines[0].split() == ["requests", "3"]
    assert lines[2].split(maxsplit=1) == ["documents", "3, retrieved 5 times"]
    assert any("40.0% of retrievals" in line for line in lines)
    assert ["all,", "by", "tokens", "40.0%", "6.7%"] in [line.split() for line in lines]


def test_every_format_that_can_be_read_can_be_named() -> None:
    assert set(LOG_FORMATS) == {"auto", *READERS, *PUBLISHED_READERS}


def test_a_broken_trace_is_one_error_with_its_line(tmp_path: Path) -> None:
    assert make_one(tmp_path).exit_code == 0
    path = tmp_path / "made.jsonl"
    lines = path.read_text().splitlines()
    lines[99] = lines[99].replace('"docs"', '"dogs"')
    path.write_text("\n".join(lines))
    result = trace("show", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ragcache: error: {path}:100: 'docs' is missing")
    assert result.stderr.count("\n") == 1
    assert json.loads(trace("show", path, "--json").stdout)["error"]["type"] == "TraceError"


def test_a_log_is_imported(tmp_path: Path) -> None:
    log, lengths, output = tmp_path / "log.jsonl", tmp_path / "lengths.json", tmp_path / "trace.jsonl"
    log.write_text('{"timestamp": 8, "docs": ["a", "b"]}\n{"event": "started"}\n{"timestamp": 7.5, "docs": ["b"]}\n')
    lengths.write_text('{"a": 70}')
    result = trace(
        "import", log, "--lengths", lengths, "--mean-tokens", "9", "--output-tokens", "4", "--output", output
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{output}: 2 requests for 2 documents\n"
    assert "passed over: lines about something else 1, speculative requests 0\n" in result.stderr
    imported = read_trace(output)
    assert imported.arrival_s.tolist() == [0.0, 0.5]
    assert imported[1].doc_tokens == (70, 9)
    assert imported.output_tokens.tolist() == [4, 4]
