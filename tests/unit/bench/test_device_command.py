"""``make gpu-check`` on a machine that has vLLM and little else."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.benchmarks import command
from tests.benchmarks.report import Figure, Part, Plan


def test_frameworks_and_faiss_are_loaded_for_speculation_alone() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(('llama_index', 'langchain_core', 'faiss')))"
    ended = subprocess.run(
        [sys.executable, "-c", f"{missing}; from tests.benchmarks.device.__main__ import PARTS; print(*PARTS)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    names = ended.stdout.split()
    assert names[:3] == ["steps", "request", "host-hits"]
    assert {"kernels", "tiers", "tiers-bf16", "speculation", "chunks", "copies", "compare-ragcache"} <= {*names}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the command's clock: minutes that have passed."""
    minutes = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: 60 * minutes[0])
    return minutes


def parts_of_minutes(clock: list[float], **minutes: float) -> tuple[list[str], click.Command]:
    """Return a list of the parts that ran, and a command whose parts take these minutes."""
    ran: list[str] = []

    def measure(name: str, plan: Plan) -> Part:
        ran.append(name)
        clock[0] += minutes[name]
        return Part("none", (Figure(f"{name}_value", len(ran), plan.found.get("a_value")),))

    parts = {name: partial(measure, name) for name in minutes}
    return ran, command.benchmark("check", "Check.", parts, {}, "", part_minutes=4)


def test_no_part_starts_that_could_end_after_the_time_and_resume_runs_the_rest(
    tmp_path: Path, clock: list[float]
) -> None:
    ran, main = parts_of_minutes(clock, a=4, b=3, c=4, d=1)
    arguments = ["--output", str(tmp_path / "check.json"), "--corpus", str(tmp_path)]
    first = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert ran == ["a", "b"]
    assert "not run within 10 minutes: c, d;" in first.output
    second = CliRunner().invoke(main, [*arguments, "--resume"], catch_exceptions=False)
    assert ran == ["a", "b", "c", "d"]
    assert "not run" not in second.output
    report = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert [*report["parts"]] == ["a", "b", "c", "d"]
    (figure,) = report["parts"]["d"]["figures"]
    assert figure["baseline"] == 1  # the figure of part a, of the run before


def test_one_part_runs_where_the_time_is_shorter_than_a_part(tmp_path: Path, clock: list[float]) -> None:
    ran, main = parts_of_minutes(clock, a=4, b=3)
    arguments = ["--minutes", "1", "--output", str(tmp_path / "check.json"), "--corpus", str(tmp_path)]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert ran == ["a"]
