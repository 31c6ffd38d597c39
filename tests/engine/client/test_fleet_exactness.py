"""Two engines over one store, killed and with damaged objects, answer as plain vLLM: a small run of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.fleet.__main__ import main

pytestmark = pytest.mark.benchmark


def test_a_fleet_over_a_store_answers_as_plain_vllm_whatever_is_killed_and_damaged(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    arguments = ["--quick", "--only", "exactness", "--output", str(path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text("utf-8"))
    assert (told["exact_requests"], told["exact_mismatches"]) == (24, 0), told["parts"]["exactness"]["details"]
    assert told["exact_restarts"] >= 2
    assert told["exact_damaged"] > 0
