"""The benchmark measures what it says: pairs in turn, ratios pair by pair, a report that can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.benchmarks.__main__ import main
from tests.benchmarks.pairs import Comparison, compare


def test_both_sides_run_with_the_same_inputs_and_take_turns_to_begin() -> None:
    calls: list[tuple[str, int]] = []
    compare("x", lambda i: calls.append(("a", i)), lambda i: calls.append(("b", i)), pairs=2, warm_up=0)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_the_ratio_is_the_median_over_pairs() -> None:
    assert Comparison("x", (1.0, 2.0, 4.0), (2.0, 2.0, 40.0)).ratio == 2.0


@pytest.mark.slow
def test_a_small_benchmark_writes_a_row_for_every_index(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = ["--vectors", "1000", "--dimension", "8", "--pairs", "5", "--output", str(path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(path.read_text())["staged search"]
    assert [row["name"].split(", 1,000")[0] for row in rows] == [
        *("IVF, flat, 4 stages", "IVF, SQ8, 4 stages", "IVF, PQ, 4 stages", "HNSW, 2 stages", "HNSW, 4 stages"),
        *("HNSW, efSearch 1024, 2 stages", "HNSW, efSearch 1024, 4 stages", "Flat, 4 stages"),
    ]
    assert all(row["baseline_p50_ms"] > 0 and row["rival_p50_ms"] > 0 for row in rows)
