"""Each benchmark that needs no engine runs in small, and ``predict`` reads the results in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.compare.__main__ import main as compare
from benchmarks.fleet.__main__ import main as fleet
from benchmarks.papers.__main__ import main as papers
from benchmarks.retrieval.__main__ import main as retrieval
from benchmarks.simulation.__main__ import main as simulation
from benchmarks.tiers.__main__ import main as tiers

pytestmark = pytest.mark.benchmark

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (retrieval, ["--vectors", "1000", "--dimension", "8", "--pairs", "5"]),
        (tiers, ["--quick", "--only", "share-by-groups"]),
        (fleet, ["--quick", "--only", "mmlu_8"]),
        (simulation, ["--quick", "--only", "load"]),
        (papers, ["--quick", "table 4", "cache-craft 24"]),
    ],
    ids=["retrieval", "tiers", "fleet", "simulation", "papers"],
)
def test_a_benchmark_runs_in_small_and_writes_its_figures(
    command: click.Command, arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    done = CliRunner().invoke(command, [*arguments, "--output", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text(encoding="utf-8"))
    assert not list(tmp_path.glob("*.runs.jsonl")), "all runs are finished"


def test_cached_shares_of_measured_runs_are_predicted() -> None:
    arguments = ["predict", str(RESULTS / "bench-compare.json"), str(RESULTS / "bench-compare-cost.json")]
    done = CliRunner().invoke(compare, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    title, _, *rows = done.output.splitlines()
    assert title.startswith("Simulated: mean TTFT within 15% in ")
    cached = [[float(cell.rstrip("%")) for cell in row.split() if cell.endswith("%")] for row in rows]
    assert len(cached) == 28
    assert all(abs(measured - predicted) < 5 for measured, predicted in cached)
