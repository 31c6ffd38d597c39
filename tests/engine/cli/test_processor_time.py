"""Small runs of ``benchmarks.server_cost`` and of parts of ``make gpu-check``: what must hold at any speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.device.__main__ import main as gpu_check
from benchmarks.server_cost.__main__ import main as server_cost

pytestmark = pytest.mark.benchmark


def test_each_scene_is_what_it_says_and_costs_both_processes_time(tmp_path: Path) -> None:
    output = tmp_path / "server-cost.json"
    engines = ("--engine", "vllm", "--engine", "ragcache-host")
    done = CliRunner().invoke(server_cost, ["--requests", "2", *engines, "--output", str(output)])
    assert done.exit_code == 0, done.output
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["cached_tokens"] == (0 if row["scene"] == "new" else 3840)
        assert all(row[process]["time_ms"] > 0.5 for process in ("api_server", "engine_core"))
    assert [row["api_server"]["ratio"] for row in rows if row["engine"] == "vllm"] == [1.0] * 3


def test_the_first_parts_of_gpu_check_run_on_a_cpu(tmp_path: Path) -> None:
    parts = ("steps", "host-hits")
    only = [word for part in parts for word in ("--only", part)]
    arguments = ["--cpu", "--quick", "--minutes", "60", "--output", str(tmp_path / "check.json"), *only]
    done = CliRunner().invoke(gpu_check, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert [*report["parts"]] == [*parts]
    assert report["step_throughput_ratio_256"] > 0
    hits = [figure for figure in report["parts"]["host-hits"]["figures"] if figure["key"].startswith("ragcache")]
    assert len(hits) == 5
    assert not [figure["note"] for figure in hits if "NOT A HOST HIT" in figure["note"]]
