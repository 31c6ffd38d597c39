"""Small runs of ``benchmarks.server_cost`` and of parts of ``make gpu-check``: what must hold at any speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.device.__main__ import main as gpu_check

pytestmark = pytest.mark.benchmark


def test_the_first_parts_of_gpu_check_run_on_a_cpu(tmp_path: Path) -> None:
    parts = ("steps", "host-hits")
    only = [word for part in parts for word in ("--only", part)]
    arguments = ["--cpu", "--quick", "--minutes", "60", "--output", str(tmp_path / "check.json"), *only]
    done = CliRunner().invoke(gpu_check, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert [*report["parts"]] == [*parts]
    assert report["step_throughput_ratio_256"] > 0
    of_ours = ("layerwise", "asynchronous")
    hits = [figure for figure in report["parts"]["host-hits"]["figures"] if figure["key"].startswith(of_ours)]
    assert len(hits) == 10
    assert not [figure["note"] for figure in hits if "NOT A HOST HIT" in figure["note"]]
