"""The simulator predicts the cached shares of measured runs, whose results are in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.compare.__main__ import main as compare

pytestmark = pytest.mark.benchmark

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def test_cached_shares_of_measured_runs_are_predicted() -> None:
    arguments = ["predict", str(RESULTS / "bench-compare.json"), str(RESULTS / "bench-compare-cost.json")]
    done = CliRunner().invoke(compare, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    title, _, *rows = done.output.splitlines()
    assert title.startswith("Simulated: mean TTFT within 15% in ")
    cached = [[float(cell.rstrip("%")) for cell in row.split() if cell.endswith("%")] for row in rows]
    assert len(cached) == 28
    assert all(abs(measured - predicted) < 5 for measured, predicted in cached)
