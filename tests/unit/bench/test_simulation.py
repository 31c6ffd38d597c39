"""The simulated benchmark pairs by seed, compares what it says, and measures every goal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ragcache_core.bench.paper.ratios import Ratio
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.sweep import FinishedRun, Run, run_all
from ragcache_core.sim.traces.workload import WORKLOADS
from tests.benchmarks.simulation import __main__ as simulation
from tests.benchmarks.simulation.__main__ import (
    ALGORITHM_1,
    CACHE_AWARE,
    GOALS,
    KEPT_ORDER,
    OUR_QUEUE,
    PAPERS_QUEUE,
    Setting,
    _options,
    main,
    workload,
)

pytestmark = pytest.mark.slow


def test_a_ratio_is_taken_seed_by_seed_and_has_their_spread() -> None:
    ratio = Ratio.of("mean_ttft_s", [{"mean_ttft_s": 1.0}, {"mean_ttft_s": 9.0}], [{"mean_ttft_s": 2.0}] * 2)
    assert ratio.pairs == (0.5, 4.5)
    assert (ratio.mean, round(ratio.spread, 3)) == (2.5, 2.828)
    assert Ratio((0.5,)).spread == 0.0


def test_the_baseline_is_the_papers_and_the_rival_is_what_users_get() -> None:
    setting = Setting("mmlu", 8)
    paper, ours = _options(ALGORITHM_1, setting, 100), _options(KEPT_ORDER, setting, 100)
    assert (paper.policy, paper.order, paper.queue, paper.keeps_frequency) == ("pgdsf", "retrieval", "fifo", False)
    assert (ours.policy, ours.order, ours.queue, ours.keeps_frequency) == (
        SimulationOptions().policy, "retrieval", "fifo", True,
    )  # fmt: skip
    assert (paper.gpu_tokens, paper.host_tokens) == (ours.gpu_tokens, ours.host_tokens) == (40_960, 65_536)
    assert _options(CACHE_AWARE, setting, 0).order == "cache_aware"
    reordering = [_options(system, setting, 0) for system in (PAPERS_QUEUE, OUR_QUEUE)]
    assert [(o.queue, o.window, o.order) for o in reordering] == [("cache-aware", 32, "retrieval")] * 2
    assert [o.keeps_frequency for o in reordering] == [False, True]


def test_every_workload_asks_for_two_documents_at_the_same_rate() -> None:
    for name in ("mmlu", "nq", "drift", "nq-drift"):
        assert (workload(name).documents_per_request, workload(name).requests_per_s) == (2, 0.8)
    drifting = workload("nq-drift")
    assert drifting.num_documents == WORKLOADS["nq"].num_documents
    assert drifting.drift_every > 0
    assert drifting.repeat_share > 0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("bench") / "simulation.json"
    done = CliRunner().invoke(main, ["--quick", "--output", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    data: dict[str, object] = json.loads(path.read_text())
    return data


def test_every_goal_is_measured_and_a_figure_is_what_the_runs_came_to(report: dict[str, Any]) -> None:
    assert report["goals_not_measured"] == []
    assert set(report) >= set(GOALS)
    for name, key, ours, other in (
        ("ttft_ratio", "mean_ttft_s", "order kept", "algorithm 1"),
        ("hit_of_bound", "token_hit_rate", "order kept", "bound"),
    ):
        for workload_name in ("mmlu", "nq"):
            for gib in (8, 32, 128):
                of = report["parts"][workload_name]["details"][f"{workload_name}, {gib} GiB"]
                pairs = [a / b for a, b in zip(of[ours][key], of[other][key], strict=True)]
                told = report[f"{workload_name}_{name}_{gib}"]
                assert told == pytest.approx(sum(pairs) / len(pairs), rel=1e-3)


def test_the_bound_is_one_and_systems_have_a_number_for_each_seed(report: dict[str, object]) -> None:
    parts = report["parts"]
    assert isinstance(parts, dict)
    assert list(parts["mmlu"]["details"]) == ["mmlu, 8 GiB", "mmlu, 32 GiB", "mmlu, 128 GiB"]
    for of in (*parts["mmlu"]["details"].values(), *parts["nq"]["details"].values()):
        hits = {system: numbers["token_hit_rate"] for system, numbers in of.items()}
        assert all(len(rates) == 2 for rates in hits.values())
        assert all(ours <= bound + 1e-9 for ours, bound in zip(hits["order kept"], hits["bound"], strict=True))


def test_the_load_is_one_at_which_somebody_waits(report: dict[str, object]) -> None:
    parts = report["parts"]
    assert isinstance(parts, dict)
    for setting, of in parts["load"]["details"].items():
        idle = parts["mmlu"]["details"][setting.removesuffix(", load 1.05")]["algorithm 1"]["mean_ttft_s"]
        waiting = of["the paper's reordering"]["mean_ttft_s"]
        assert all(w > i for w, i in zip(waiting, idle, strict=True))


def test_a_run_that_was_interrupted_goes_on_with_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--quick", "--only", "nq", "--output", str(tmp_path / "out.json")]
    journal = tmp_path / "out.json.runs.jsonl"

    def interrupted(runs: Sequence[Run], *, keep: Callable[[FinishedRun], None], **settings: Any) -> None:
        def keep_one(run: FinishedRun) -> None:
            keep(run)
            raise KeyboardInterrupt

        run_all(runs, keep=keep_one, **settings)

    monkeypatch.setattr(simulation, "run_all", interrupted)
    assert CliRunner().invoke(main, arguments).exit_code == 1
    assert len(journal.read_text().splitlines()) == 1
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "--resume" in refused.output
    assert len(journal.read_text().splitlines()) == 1
    num_finished = []

    def counted(runs: Sequence[Run], **settings: Any) -> list[FinishedRun]:
        num_finished.append(len(settings["finished"]))
        return run_all(runs, **settings)

    monkeypatch.setattr(simulation, "run_all", counted)
    done = CliRunner().invoke(main, [*arguments, "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert num_finished == [1]
    assert not journal.exists(), "all of it is in the report now"
