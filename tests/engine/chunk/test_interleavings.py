"""Whatever goes on with approximate requests, a plain one is exact, and one that recomputes everything: across aborts,
evictions, preemptions, tiers and restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # two engines, one after the other, and a hundred requests for each
_NUM_ROUNDS = 24


def _run(seed: int, directory: Path) -> dict[str, Any]:
    module = "tests.engine.chunk.interleaving_facts"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(seed), str(_NUM_ROUNDS), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """An engine, and the next one on the same disk."""
    directory = tmp_path_factory.mktemp("chunks")
    return [_run(seed, directory) for seed in (1, 2)]


def test_every_plain_request_is_exact(runs: list[dict[str, Any]]) -> None:
    for facts in runs:
        assert facts["requests"]["plain"] > 12
        assert facts["requests"]["approximate"] > 8
        assert facts["requests"]["aborted"] > 4
        assert facts["requests"]["preempted"] > 4
        assert facts["worst plain"] <= 1e-4


def test_every_request_that_computes_everything_is_exact(runs: list[dict[str, Any]]) -> None:
    for facts in runs:
        assert facts["requests"]["full"] > 8
        assert facts["worst with everything computed"] <= 1e-4


def test_a_plain_request_that_goes_on_behind_an_approximate_answer_is_exact(runs: list[dict[str, Any]]) -> None:
    for facts in runs:
        assert facts["conversations"] > 4
        assert facts["worst behind an approximate answer"] <= 1e-4


def test_plain_requests_are_served_exactly_from_the_disk_of_the_engine_before(runs: list[dict[str, Any]]) -> None:
    first, second = runs
    assert first["is disk in service"]
    assert first["tokens from disk at the start"] < second["tokens from disk at the start"]
    assert second["tokens from disk at the start"] > 64


def test_chunks_were_reused_evicted_and_found_on_disk_by_the_next_engine(runs: list[dict[str, Any]]) -> None:
    first, second = runs
    assert first["restored"] == 0
    assert second["restored"] > 0
    for facts in runs:
        assert facts["chunks"]["num_reused_chunks"] > 0
        assert facts["chunks"]["num_captured_chunks"] > 0
    assert first["chunks"]["num_evicted_chunks"] > 0


def test_nothing_is_left_of_requests_that_are_over(runs: list[dict[str, Any]]) -> None:
    for facts in runs:
        assert facts["left over"] == facts["pinned"] == facts["held blocks"] == 0
