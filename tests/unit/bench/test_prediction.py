"""What the simulator says of engines that were measured: the same requests, found again, in nearly the same time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ragcache_core.bench.compare.peers import PEERS
from ragcache_core.bench.compare.prediction import Prediction, predict, simulated, table
from ragcache_core.bench.compare.results import Results
from ragcache_core.cli import cli
from ragcache_core.errors import ConfigError
from ragcache_core.policy.step_times import StepTimes
from ragcache_core.sim.testbeds import PrefillFormula, Testbed, load_testbed

ROOT = Path(__file__).parents[3]
COLD = ROOT / "docs" / "results" / "bench-compare.json"
COST = COLD.with_name("bench-compare-cost.json")
TESTBED = Testbed(
    "as fast as that machine", PrefillFormula(0.012, 0.0, 6.5e-4, 0.0), 0.012, 131_072, 3.0,
    steps=StepTimes(0.008, 0.004, 0.001),
)  # fmt: skip


def some(path: Path, peers: tuple[str, ...], rates: tuple[int, ...] = (0, 1)) -> Results:
    """Return the results in a file, of some engines at some rates."""
    results = Results.read(path)
    results.runs = [run for run in results.runs if run.peer in peers and run.rate in rates]
    return results


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int, int], Prediction]:
    """All runs of the first comparison, by engine, MiB of host memory and rate."""
    predictions, notes = predict(Results.read(COLD), load_testbed(str(COST)))
    assert notes == []
    return {(each.peer, each.host_bytes >> 20, each.rate): each for each in predictions}


def test_of_vllm_the_simulator_finds_the_very_tokens_that_were_measured_also_under_load(
    found: dict[tuple[str, int, int], Prediction],
) -> None:
    for rate in range(4):
        each = found["vllm", 0, rate]
        assert each.predicted_cached_share == pytest.approx(each.measured_cached_share, abs=1e-9)
        assert each.measured_cached_share > 0.05
        assert found["no-cache", 0, rate].predicted_cached_share == 0


def test_of_tiers_it_finds_nearly_what_was_measured(found: dict[tuple[str, int, int], Prediction]) -> None:
    limits = {"vllm-host-lru": 0.012, "vllm-host-arc": 0.03, "ragcache": 0.03, "ragcache-cache-aware": 0.05}
    for peer, limit in limits.items():
        several = [each for (name, _, _), each in found.items() if name == peer]
        assert len(several) == 5
        for each in several:
            assert each.predicted_cached_share == pytest.approx(each.measured_cached_share, abs=limit)


def test_mean_ttft_of_six_engines_is_within_15_percent_where_none_is_overloaded(
    found: dict[tuple[str, int, int], Prediction],
) -> None:
    calm = [each for (_, _, rate), each in found.items() if rate < 2]
    assert {each.peer for each in calm} == set(Results.read(COLD).options["compare"])
    assert [(each.peer, each.ratio) for each in calm if not each.is_within] == []
    assert sum(each.is_within for each in found.values()) >= 20, "of 28"


def test_a_faster_machine_is_predicted_to_answer_sooner_and_what_is_off_is_marked() -> None:
    results = some(COLD, ("no-cache",), rates=(0,))
    (near,) = predict(results, TESTBED)[0]
    fast = replace(TESTBED, cost=PrefillFormula(0.012, 0.0, 3e-4, 0.0))
    (far,) = predict(results, fast)[0]
    assert near.is_within
    assert far.ratio < 0.6
    shown = table([near, far])
    assert "in 1 of 2 runs" in shown.title
    assert [row[-1] for row in shown.rows] == ["", "off"]


def test_engines_have_in_the_simulation_what_they_had() -> None:
    options = Results.read(COLD).options | {"disk_memory_bytes": 1 << 30}
    plain, theirs, ours = (simulated(PEERS[name], 1 << 26, options) for name in ("vllm", "vllm-host-arc", "ragcache"))
    assert (plain.policy, plain.queue, plain.host_tokens, plain.disk_tokens) == ("lru", "fifo", 0, 0)
    assert (theirs.policy, theirs.host_tokens, theirs.knows_documents) == ("arc", 8_192, False)
    assert theirs.disk_tokens > ours.disk_tokens == 131_072, "vLLM's file tier has no limit"
    assert (ours.policy, ours.queue, ours.knows_documents) == ("tournament", "cache-aware", True)
    assert ours.gpu_tokens == 5_120


def test_what_cannot_be_simulated_is_refused_or_named() -> None:
    results = some(COLD, ("no-cache",), rates=(0,))
    unknown = replace(results.runs[0], peer="ragcache-chunks")
    results.runs.append(unknown)
    found, notes = predict(results, TESTBED)
    assert len(found) == 1
    assert notes == ["ragcache-chunks is not simulated with requests that overlap"]
    for changes, message in (
        ({"engine": "http://127.0.0.1:1"}, "comparison of launches"),
        ({"search": 1_000}, "without --search"),
    ):
        results.options = {**results.options, **changes}
        with pytest.raises(ConfigError, match=message):
            predict(results, TESTBED)
        results.options = {**results.options, "engine": "launch"}


def test_another_trace_than_the_one_that_was_measured_is_refused(tmp_path: Path) -> None:
    results = some(COLD, ("no-cache",), rates=(0,))
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    results.options = {**results.options, "trace": str(path), "trace_sha256": "0" * 64}
    with pytest.raises(ConfigError, match="another trace"):
        predict(results, TESTBED)


def test_the_command_prints_a_row_for_each_run(tmp_path: Path) -> None:
    data: dict[str, Any] = json.loads(COLD.read_bytes())
    data["runs"] = data["runs"][:2]
    results, profile = tmp_path / "out.json", tmp_path / "profile.json"
    results.write_text(json.dumps(data))
    steps = {"request_s": 0.008, "step_s": 0.004, "sequence_s": 0.001}
    profile.write_text(json.dumps({"formula": {"base_s": 0.012, "per_new_s": 6.5e-4}, "steps": steps}))
    assert load_testbed(str(profile)).steps == StepTimes(**steps)
    done = CliRunner().invoke(cli, ["bench", "report", str(results), "--predict", str(profile)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Simulated: mean TTFT within 15% in ")
    assert done.stdout.count("no-cache") == 2
    told = CliRunner().invoke(cli, ["bench", "report", str(results), "--predict", str(profile), "--json"])
    assert [found["rate"] for found in json.loads(told.stdout)["predictions"]] == [0, 1]
    refused = CliRunner().invoke(cli, ["bench", "report", str(results), "--predict", str(profile), "--html", "a.html"])
    assert refused.exit_code == 2
    profile.write_text(json.dumps({"formula": {"base_s": 0.1}, "steps": {"step_s": 1}}))
    wrong = CliRunner().invoke(cli, ["bench", "report", str(results), "--predict", str(profile)])
    assert "it has request_s, step_s, sequence_s" in wrong.stderr
