"""The plan of a comparison, its results file, and what its runs add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.bench.comparison import Amounts, Comparison, Session
from ragcache_core.bench.engines import BASELINES
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.bench.summary import ComparisonSummary, Estimate, highest_rate
from ragcache_core.errors import ConfigError

PLAIN, HOST, OURS = BASELINES["no-cache"], BASELINES["vllm-host-lru"], BASELINES["ragcache"]
MACHINE = {"processor": "a test"}
AMOUNTS = Amounts(num_warm_up=20, num_requests=5)


def a_run(engine: str, host: int = 0, seed: int = 0, rate: int = 0, ttft_s: float = 1.0) -> TimedRun:
    return TimedRun(
        engine, host, seed, rate, float(2**rate), 10.0, (ttft_s / 2, ttft_s, ttft_s * 1.5), (), 300, 150, 3, 1,
        {"gpu": 100, "host": 50}, 1.5,
    )  # fmt: skip


def test_another_engine_is_first_for_each_seed_and_one_without_a_host_tier_is_opened_once() -> None:
    comparison = Comparison((PLAIN, HOST, OURS), (64, 256), (1.0,), False, (5, 6, 7, 8), AMOUNTS)
    sessions = list(comparison.sessions(set()))
    assert [session.baseline for session in sessions[::5]] == [PLAIN, HOST, OURS, PLAIN]
    assert [session.host_bytes for session in sessions[:5]] == [0, 64, 256, 64, 256]


def test_finished_runs_are_not_planned_again() -> None:
    done = {a_run("no-cache", rate=0).key, a_run("ragcache", 64).key, a_run("ragcache", 64, rate=1).key}
    comparison = Comparison((PLAIN, OURS), (64, 256), (1.0, 2.0), False, (0,), AMOUNTS)
    assert list(comparison.sessions(done)) == [Session(PLAIN, 0, 0, (1,)), Session(OURS, 256, 0, (0, 1))]


def test_requests_before_a_rate_are_run_through_whether_they_were_measured_or_not() -> None:
    assert AMOUNTS.timed(2) == range(30, 35)
    assert AMOUNTS.before(2, has_cache=True) == range(30)
    assert AMOUNTS.before(2, has_cache=False) == range(8)
    assert AMOUNTS.count(Session(OURS, 64, 0, (0, 1, 2))) == AMOUNTS.count(Session(OURS, 64, 0, (2,))) == 35
    assert AMOUNTS.count(Session(PLAIN, 0, 0, (1, 2))) == 18


def test_finished_runs_are_in_the_file_and_a_new_machine_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results = Results.open(path, {"seeds": 2, "rates": (1.0, 2.0)}, MACHINE)
    results.set_rates((1.0, 2.0), 4.0)
    results.add(a_run("ragcache", 64))
    again = Results.open(path, {"seeds": 2, "rates": (1.0, 2.0)}, {"processor": "another"}, resume=True)
    assert again.runs == [a_run("ragcache", 64)]
    assert (again.rates_rps, again.capacity_rps) == ((1.0, 2.0), 4.0)
    assert again.machine == {"processor": "a test, then another"}
    assert list(path.parent.iterdir()) == [path]


def test_runs_are_neither_overwritten_nor_mixed_with_others(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Results.open(path, {"seeds": 2}, MACHINE).add(a_run("ragcache", 64))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="--resume"):
        Results.open(path, {"seeds": 2}, MACHINE)
    with pytest.raises(ConfigError, match="seeds = 2, not 3"):
        Results.open(path, {"seeds": 3}, MACHINE, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 99}', '{"version": 1, "options": {}}'])
def test_another_file_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"out\.json"):
        Results.open(path, {}, MACHINE, resume=True)
    assert path.read_text(encoding="utf-8") == content


def test_an_estimate_of_several_seeds_has_students_interval() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.low == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert estimate.high == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)
    assert Estimate.of([0.5, 2.0], is_ratio=True).mean == pytest.approx(1.0)
    assert Estimate.of([7.0]) == Estimate(7.0)
    many = Estimate.of([0.0, 1.0] * 15)
    assert many.high is not None
    assert many.high - many.mean == pytest.approx(2.0452 * 0.5085 / 30**0.5, abs=1e-3)


def test_ratios_to_the_first_engine_are_seed_by_seed_for_each_size_of_host_memory() -> None:
    runs = [a_run("no-cache", seed=s, ttft_s=t) for s, t in ((0, 4.0), (1, 16.0))]
    runs += [a_run("ragcache", size, seed=s, ttft_s=t) for size in (64, 256) for s, t in ((0, 1.0), (1, 2.0))]
    summary = ComparisonSummary(runs, ["no-cache", "ragcache"])
    first, *others = summary.points
    assert first.ttft_ratio is None
    assert [(point.host_bytes, point.ttft_ratio.mean) for point in others if point.ttft_ratio] == [
        (64, pytest.approx((4 * 8) ** 0.5)),
        (256, pytest.approx((4 * 8) ** 0.5)),
    ]
    point = summary.point("ragcache", 0)
    assert point is not None
    assert point.tier_shares == {"gpu": pytest.approx(1 / 3), "host": pytest.approx(1 / 6)}
    assert (point.cached_share.mean, point.completed_rps.mean, point.tpot_s) == (0.5, pytest.approx(0.3), None)
    assert json.loads(json.dumps(summary.to_dict()))["points"][0]["engine"] == "no-cache"


def test_throughput_is_where_ttft_leaves_five_times_the_first_engines_lowest() -> None:
    runs = [a_run("no-cache", rate=r, ttft_s=t) for r, t in enumerate((1.0, 3.0, 11.0))]
    assert ComparisonSummary(runs, ["no-cache"]).slo_s == 5.0
    curve = [(run.requests_per_s, run.ttft_s[1]) for run in runs]
    assert highest_rate(curve, 5.0) == pytest.approx(2 + 2 * (5 - 3) / (11 - 3))
    assert highest_rate(curve, 20.0) == 4.0
    assert highest_rate(curve, 0.5) == 0.0
