"""The simulated benchmark pairs by seed, compares what it says, and measures every goal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import simulated
from benchmarks.simulated.laboratory import LabOptions
from ragcache_core.bench.paper.ratios import DEFAULT_POLICY, Ratio
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.sweep import FinishedRun, Run, run_all
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from tests.benchmarks.report import Plan
from tests.benchmarks.simulation import rivals
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
from tests.benchmarks.simulation.rivals import RIVALS, distinct_tokens, figures_of, goals, measure_policies, one_by_one

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
        LabOptions().policy, "retrieval", "fifo", True,
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

    monkeypatch.setattr(simulated, "run_all", interrupted)
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

    monkeypatch.setattr(simulated, "run_all", counted)
    done = CliRunner().invoke(main, [*arguments, "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert num_finished == [1]
    assert not journal.exists(), "all of it is in the report now"


def _prompt(arrival_s: float, *documents: str) -> TracedRequest:
    return TracedRequest(arrival_s, documents, (100,) * len(documents), 32, 5)


def test_distinct_tokens_are_those_of_each_document_behind_each_others() -> None:
    trace = Trace.from_requests([_prompt(0, "a", "b"), _prompt(1, "a", "b"), _prompt(2, "b"), _prompt(3, "a", "c")])
    assert distinct_tokens(trace) == 400


def test_requests_that_come_at_once_wait_for_nobody_when_they_come_one_by_one() -> None:
    trace = Trace.from_requests(_prompt(0, f"d{i % 4}", "d9") for i in range(20))
    options = LabOptions(retrieval_s=0.0)
    waiting, alone = (simulate(of, options).summary for of in (trace, one_by_one(trace)))
    assert waiting.mean_ttft_s > 5 * alone.mean_ttft_s
    assert alone.mean_ttft_s == pytest.approx(alone.prefill_s / 20)
    assert alone.token_hit_rate == waiting.token_hit_rate


def test_a_figure_is_the_worst_ratio_to_the_best_rival_and_names_both() -> None:
    def summaries(hit_rate: float, ttft_s: float, **better: float) -> dict[str, dict[str, float]]:
        behind = {name: {"token_hit_rate": better.get(name, 0.0), "mean_ttft_s": 2.0} for name in RIVALS}
        return {DEFAULT_POLICY: {"token_hit_rate": hit_rate, "mean_ttft_s": ttft_s}, **behind}

    hits, ttft = figures_of("nq", "gpu", {0.01: summaries(0.0, 1.0), 0.3: summaries(0.3, 3.0, arc=0.4, lfu=0.1)})
    assert (hits.key, hits.value, hits.note) == ("nq_hit_of_best_gpu", 0.75, "at 30%: 0.300 against 0.400 of arc")
    assert (ttft.key, ttft.value) == ("nq_ttft_of_best_gpu", 1.5)
    (found_nothing, _) = figures_of("nq", "gpu", {0.01: summaries(0.0, 1.0)})
    assert found_nothing.value == 1.0


def test_every_policy_is_run_at_every_size_and_the_figures_are_of_those_runs(report: dict[str, Any]) -> None:
    details = report["parts"]["policies"]["details"]
    assert len(details) >= 8
    for name, by_share in details.items():
        trace, tiers = name.split(", ")
        assert list(by_share) == ["10%", "60%"]
        assert all(set(of) == {DEFAULT_POLICY, *RIVALS} for of in by_share.values())
        ratios = [
            of[DEFAULT_POLICY]["mean_ttft_s"] / min(of[rival]["mean_ttft_s"] for rival in RIVALS)
            for of in by_share.values()
        ]
        assert report[f"{trace}_ttft_of_best_{tiers}"] == pytest.approx(max(ratios), abs=1e-3)


def test_an_imported_trace_is_measured_and_has_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "IMPORTED", tmp_path / "traces")
    monkeypatch.setattr(rivals, "MADE", ())
    assert goals() == {}, "nothing was imported"
    (tmp_path / "traces").mkdir()
    trace = make_trace(WORKLOADS["mmlu"], 300, 5)
    write_trace(replace(trace, arrival_s=np.zeros(300)), tmp_path / "traces" / "campus.jsonl")
    part = measure_policies(Plan("", tmp_path, seed=0, is_quick=True, report=lambda _: None))
    assert {figure.key for figure in part.figures} == set(goals())
    assert set(part.details) == {"campus, gpu", "campus, tiers"}
