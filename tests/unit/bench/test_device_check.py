"""``make gpu-check`` without a GPU: which parts run with which seeds, what another run goes on with, what it writes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.device import __main__ as device
from benchmarks.report import BenchmarkPlan, Figure, Part

_MINUTES = 3.5
"""What each stubbed part takes."""


class Check:
    """The command on parts that compute nothing, over a clock that they alone move."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = output
        self.ran: list[tuple[str, int]] = []
        self.found: list[dict[str, float]] = []
        self.values: dict[tuple[str, int], float] = {}
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr("benchmarks.command.time", clock)
        for name in device.PARTS:
            monkeypatch.setitem(device.PARTS, name, partial(self._measure, name))

    def _measure(self, name: str, plan: BenchmarkPlan) -> Part:
        self.ran.append((name, plan.seed))
        self.found.append(dict(plan.found))
        self.now_s += 60 * _MINUTES
        key = "step_throughput_ratio_32" if name == "steps" else f"figure_of_{name}"
        return Part("none", (Figure(key, self.values.get((name, plan.seed), 1.0)),))

    def run(self, *arguments: str) -> str:
        """Return what is printed."""
        self.ran.clear()
        self.found.clear()
        command = ["--cpu", "--output", str(self.output), *arguments]
        done = CliRunner().invoke(device.main, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text(encoding="utf-8"))
        return found


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    return Check(tmp_path / "gpu-check.json", monkeypatch)


def test_a_run_ends_in_its_time_and_another_goes_on_until_all_parts_are_there(check: Check) -> None:
    ran: list[tuple[str, int]] = []
    rest = list(device.PARTS)
    while rest:
        said = check.run("--resume")
        assert [name for name, _ in check.ran] == rest[:2], "the third could end after the tenth minute"
        ran += check.ran
        rest = rest[2:]
        assert ("not run within 10 minutes: " + ", ".join(rest) in said) == bool(rest)
        assert list(check.report["parts"]) == [name for name, _ in ran]
    check.run("--resume")
    assert check.ran == []
    assert check.report["figure_of_copies"] == 1.0


def test_a_run_of_an_hour_has_all_parts_in_their_order(check: Check) -> None:
    check.run("--minutes", "60")
    assert check.ran == [(name, 0) for name in device.PARTS]
    assert check.found[1] == {"step_throughput_ratio_32": 1.0}, "a part is told of those before it"


def test_one_part_runs_however_short_the_time_is(check: Check) -> None:
    check.run("--minutes", "1")
    assert len(check.ran) == 1


def test_a_file_has_several_seeds_of_a_part_and_goes_on_with_the_missing_ones(check: Check) -> None:
    check.values = {("steps", 0): 0.99, ("steps", 1): 0.9, ("steps", 2): 0.98}
    seeds = ("--seed", "0", "--seed", "1", "--seed", "2", "--only", "steps", "--only", "tiers")
    assert "steps@1, tiers@1, steps@2, tiers@2" in check.run(*seeds)
    assert check.ran == [("steps", 0), ("tiers", 0)]
    check.run(*seeds, "--resume", "--minutes", "60")
    assert check.ran == [("steps", 1), ("tiers", 1), ("steps", 2), ("tiers", 2)]
    assert check.found[1] == {"step_throughput_ratio_32": 0.9}, "a part is told of what its own seed gave"
    report = check.report
    assert {key: part["seed"] for key, part in report["parts"].items()} == {
        "steps": 0,
        "tiers": 0,
        "steps@1": 1,
        "tiers@1": 1,
        "steps@2": 2,
        "tiers@2": 2,
    }
    assert report["step_throughput_ratio_32"] == 0.98, "the median"
    assert report["goals_missed"] == ["step_throughput_ratio_32"], "a goal holds for each seed"


def test_a_seed_that_is_measured_again_replaces_its_own_part_alone(check: Check) -> None:
    for seed in ("0", "1"):
        check.run("--seed", seed, "--only", "steps")
    check.values = {("steps", 1): 3.0}
    check.run("--seed", "1", "--only", "steps")
    parts = check.report["parts"]
    assert [parts[key]["figures"][0]["value"] for key in ("steps", "steps@1")] == [1.0, 3.0]


def test_what_an_earlier_commit_gave_is_not_mixed_with_what_this_one_gives(check: Check) -> None:
    check.run("--seed", "0", "--seed", "1", "--only", "steps")
    report = check.report
    for part in report["parts"].values():
        part["commit"] = "0000000"
    check.output.write_text(json.dumps(report), encoding="utf-8")
    check.run("--seed", "1", "--only", "steps", "--resume")
    assert list(check.report["parts"]) == ["steps@1"]
    assert check.ran == [("steps", 1)]


def test_a_machine_without_a_gpu_is_told_so(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    done = CliRunner().invoke(device.main, ["--output", str(check.output)])
    assert (done.exit_code, check.ran) == (0, [])
    assert "no GPU" in done.output
