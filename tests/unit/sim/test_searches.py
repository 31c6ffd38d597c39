"""Measured searches in place of a constant: how they are read, drawn and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.testbeds import TESTBEDS, read_searches
from ragcache_core.sim.traces.trace import Trace, TracedRequest

T = TESTBEDS["a10g-mistral-7b"].cost.estimate_s


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "search.json"
    path.write_text(json.dumps(data))
    return path


def test_searches_are_those_of_all_runs_of_a_comparison_that_had_any(tmp_path: Path) -> None:
    runs = [{"search": {"search_s": [0.1, 0.2]}}, {"search": None}, {"search": {"search_s": [0.3]}}]
    assert read_searches(written(tmp_path, {"runs": runs})) == (0.1, 0.2, 0.3)
    assert read_searches(written(tmp_path, {"search_s": [1]})) == (1.0,)


def test_each_request_waits_for_a_search_of_the_file_and_one_may_overtake_another(tmp_path: Path) -> None:
    path = written(tmp_path, {"search_s": [0.25, 40.0]})
    requests = [TracedRequest(0.001 * i, (f"d{i}",), (100,), 10, 1) for i in range(40)]
    options = SimulationOptions(policy="lru", search=str(path), seed=2)
    found = simulate(Trace.from_requests(requests), options, keeps_requests=True).requests
    assert found is not None
    slow = [record.ttft_s >= 40.0 for record in found]
    assert 8 < sum(slow) < 32
    assert min(record.ttft_s for record in found) == pytest.approx(0.25 + T(0, 110))
    assert found[slow.index(False, slow.index(True))].ttft_s < 40.0, "a later one is not held up"
