"""The plan of a comparison, its results file, and what its runs add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.bench.comparison import Amounts, Comparison, Session
from ragcache_core.bench.engines import BASELINES
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.bench.summary import ComparisonSummary
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
