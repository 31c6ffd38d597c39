"""The plan of a comparison, its results file, and what its runs add up to."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

import pytest

from ragcache_core.bench.compare.caveats import afterwards, beforehand
from ragcache_core.bench.compare.comparison import Comparison, duration, run_comparison
from ragcache_core.bench.compare.peers import PEERS
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.sessions import Amounts, Run, Session, plan
from ragcache_core.bench.compare.summary import Estimate, Summary
from ragcache_core.bench.compare.tables import throughput_table
from ragcache_core.errors import ConfigError

PLAIN, HOST, OURS = PEERS["no-cache"], PEERS["vllm-host-lru"], PEERS["ragcache"]
SIZES = (64, 256, 1024)
MACHINE = {"processor": "a test"}


def a_run(peer: str, host: int = 0, seed: int = 0, rate: int = 0, ttft_s: float = 1.0) -> Run:
    return Run(
        peer, host, seed, rate, float(2**rate), 10.0, (ttft_s / 2, ttft_s, ttft_s * 1.5), (), 300, 150, 3, 1,
        {"gpu": 100, "host": 50}, 1.5, 1 << 20,
    )  # fmt: skip


def test_all_rates_are_measured_with_the_middle_size_and_all_sizes_with_the_middle_rate() -> None:
    sessions = plan((PLAIN, OURS), SIZES, 4, (0,))
    assert sessions == [
        Session("no-cache", 0, 0, (0, 1, 2, 3)),
        Session("ragcache", 64, 0, (1,)),
        Session("ragcache", 256, 0, (0, 1, 2, 3)),
        Session("ragcache", 1024, 0, (1,)),
    ]


def test_another_engine_is_first_for_each_seed() -> None:
    sessions = plan((PLAIN, HOST, OURS), (64,), 1, (5, 6, 7, 8))
    first = {session.seed: session.peer for session in reversed(sessions)}
    assert first == {5: "no-cache", 6: "vllm-host-lru", 7: "ragcache", 8: "no-cache"}
    assert len(sessions) == 12


def test_what_is_done_is_not_planned_again() -> None:
    done = [a_run("no-cache", rate=0), a_run("ragcache", 64)]
    assert plan((PLAIN, OURS), (64,), 2, (0,), done) == [
        Session("no-cache", 0, 0, (1,)),
        Session("ragcache", 64, 0, (1,)),
    ]


def test_what_comes_before_a_rate_is_run_through_whatever_was_measured_of_it() -> None:
    amounts = Amounts(num_warm_up=20, num_requests=5)
    assert amounts.timed(2) == range(30, 35)
    assert amounts.before(2, keeps_anything=True) == range(30)
    assert amounts.before(2, keeps_anything=False) == range(8)
    assert amounts.count(Session("ragcache", 64, 0, (0, 1, 2)), True) == 35
    assert amounts.count(Session("ragcache", 64, 0, (0, 2)), True) == 35
    assert amounts.count(Session("no-cache", 0, 0, (0, 2)), False) == 18


@pytest.mark.parametrize(
    ("host_bytes", "rates", "seeds", "message"),
    [
        ((64, 32), (1.0,), (0,), "ascending"),
        ((64,), (), (0,), "rates"),
        ((64,), (1.0, 1.0), (0,), "each once"),
        ((0,), (1.0,), (0,), "above 0"),
        ((64,), (1.0,), (), "no seeds"),
    ],
)
def test_a_comparison_of_nothing_is_refused(
    host_bytes: tuple[int, ...], rates: tuple[float, ...], seeds: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Comparison((OURS,), host_bytes, rates, False, seeds, Amounts(1, 1))
    with pytest.raises(ConfigError, match="once"):
        Comparison((OURS, OURS), (64,), (1.0,), False, (0,), Amounts(1, 1))


def test_finished_runs_are_in_the_file_and_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results = Results.open(path, {"seeds": 2, "rates": (1.0, 2.0)}, MACHINE)
    results.set_rates((1.0, 2.0), 4.0)
    results.add(a_run("ragcache", 64))
    again = Results.open(path, {"seeds": 2, "rates": (1.0, 2.0)}, MACHINE, resume=True)
    assert again.runs == [a_run("ragcache", 64)]
    assert (again.rates_rps, again.capacity_rps, again.machine) == ((1.0, 2.0), 4.0, MACHINE)
    assert list(path.parent.iterdir()) == [path]


def test_runs_of_two_machines_or_commits_name_both(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    before, now = {"processor": "one", "cores": 2, "commit": "a"}, {"processor": "one", "cores": 4, "commit": "b"}
    Results.open(path, {}, before).add(a_run("ragcache", 64))
    again = Results.open(path, {}, now, resume=True)
    again.write()
    assert again.machine == before, "nothing was measured there"
    for rate in (1, 2):
        again.add(a_run("ragcache", 64, rate=rate))
        assert Results.read(path).machine == {"processor": "one", "cores": "2, then 4", "commit": "a, then b"}


def test_runs_are_neither_overwritten_nor_mixed_with_others(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Results.open(path, {"seeds": 2}, MACHINE).add(a_run("ragcache", 64))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="--resume goes on with it"):
        Results.open(path, {"seeds": 2}, MACHINE)
    with pytest.raises(ConfigError, match="seeds = 2, not 3"):
        Results.open(path, {"seeds": 3}, MACHINE, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 99}', '{"version": 1, "options": {}}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
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


def test_ratios_are_seed_by_seed_and_an_engine_without_host_memory_stands_beside_every_size() -> None:
    runs = [a_run("no-cache", seed=s, ttft_s=t) for s, t in ((0, 4.0), (1, 16.0))]
    runs += [a_run("ragcache", size, seed=s, ttft_s=t) for size in (64, 256) for s, t in ((0, 1.0), (1, 2.0))]
    summary = Summary(runs, ["no-cache", "ragcache"], (64, 256), 1)
    for size in (64, 256):
        (ratio,) = [r for r in summary.ratios("no-cache", size) if r.peer == "ragcache"]
        assert ratio.ttft.mean == pytest.approx((4 * 8) ** 0.5)
        assert ratio.host_bytes == size
    point = summary.point("ragcache", 64, 0)
    assert point is not None
    assert point.tier_shares == {"gpu": pytest.approx(1 / 3), "host": pytest.approx(1 / 6)}
    assert point.cached_share.mean == 0.5
    assert point.completed_rps.mean == pytest.approx(0.3)
    assert point.tpot_s is None


def test_throughput_is_where_ttft_leaves_five_times_the_first_engines_lowest() -> None:
    runs = [a_run("no-cache", rate=r, ttft_s=t) for r, t in enumerate((1.0, 3.0, 11.0))]
    runs += [a_run("ragcache", 64, rate=r, ttft_s=t) for r, t in enumerate((0.2, 0.3, 4.0))]
    summary = Summary(runs, ["no-cache", "ragcache"], (64,), 3)
    base, ours = summary.throughputs()
    assert base.slo_s == ours.slo_s == 5.0
    assert base.requests_per_s.mean == pytest.approx(2 + 2 * (5 - 3) / (11 - 3))
    assert not base.is_bound
    assert ours.requests_per_s.mean == 4.0
    assert ours.is_bound
    assert ours.ratio is not None
    assert ours.ratio.mean == pytest.approx(4 / 2.5)


def test_a_throughput_that_was_not_reached_with_every_seed_is_a_lower_bound() -> None:
    ttft_s = {
        ("no-cache", 0): (1.0, 9.0),
        ("no-cache", 1): (1.0, 9.0),
        ("vllm", 0): (1.0, 9.0),
        ("vllm", 1): (1.0, 2.0),
    }
    runs = [a_run(peer, seed=s, rate=r, ttft_s=t) for (peer, s), of in ttft_s.items() for r, t in enumerate(of)]
    summary = Summary(runs, ["no-cache", "vllm"], (64,), 2)
    assert [found.is_bound for found in summary.throughputs()] == [False, True]
    assert [cell.partition(" [")[0] for cell in throughput_table(summary).rows[1]] == ["vllm", ">= 1.75", ">= 1.15"]


@pytest.mark.parametrize(
    ("baseline", "other", "shown"),
    [
        ((1.0, 2.0), (1.0, 2.0), [[">= 2", "-"], [">= 2", "-"]]),  # two bounds say nothing of each other
        ((1.0, 2.0), (1.0, 9.0), [[">= 2", "-"], ["1.5", "<= 0.75"]]),
        ((1.0, 9.0), (1.0, 2.0), [["1.5", "1.00"], [">= 2", ">= 1.33"]]),
    ],
)
def test_the_ratio_to_a_lower_bound_is_shown_as_what_it_is(
    baseline: tuple[float, ...], other: tuple[float, ...], shown: list[list[str]]
) -> None:
    runs = [a_run(p, rate=r, ttft_s=t) for p, of in (("no-cache", baseline), ("vllm", other)) for r, t in enumerate(of)]
    assert [row[1:] for row in throughput_table(Summary(runs, ["no-cache", "vllm"], (64,), 2)).rows] == shown


def test_a_summary_is_plain_json() -> None:
    summary = Summary([a_run("no-cache"), a_run("ragcache", 64)], ["no-cache", "ragcache"], (64,), 1)
    assert json.loads(json.dumps(summary.to_dict()))["points"][0]["peer"] == "no-cache"


@dataclass
class Told:
    """Keeps what a comparison tells those who wait."""

    sentences: list[str] = field(default_factory=list)

    def announce(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def plan(self, num_requests: int) -> None: ...
    def say(self, what: str) -> None: ...
    def advance(self) -> None: ...


class Opened(Exception):
    """An engine would be opened now."""


def announced(comparison: Comparison, results: Results) -> list[str]:
    def open_engine(*_: object) -> Never:
        raise Opened

    told = Told()
    with suppress(Opened):
        run_comparison(comparison, results, lambda _: [], open_engine, told)  # type: ignore[arg-type, return-value]
    return told.sentences


def test_how_long_it_will_take_is_said_before_the_first_engine_is_opened(tmp_path: Path) -> None:
    amounts = Amounts(num_warm_up=30, num_requests=100)
    comparison = Comparison((PLAIN, OURS), (64,), (0.5, 2.0), False, (0, 1), amounts, start_s=20.0)
    # Four engines of 20 s; for each seed 38 requests of warm-up at the highest rate, and twice 100 at 0.5 and at 2.
    seconds = 4 * 20 + 2 * (8 + 30) / 2.0 + 4 * (100 / 0.5 + 100 / 2.0)
    assert seconds == 1118
    assert announced(comparison, Results(tmp_path / "a.json", {}, {})) == [
        "4 engines to open one after the other, 876 requests: about 19 min"
    ]
    half_done = Results(tmp_path / "b.json", {}, {})
    half_done.rates_rps = (0.5, 2.0)
    half_done.runs = [a_run(peer, size, 0, r) for peer, size in (("no-cache", 0), ("ragcache", 64)) for r in (0, 1)]
    assert announced(comparison, half_done) == ["2 engines to open one after the other, 438 requests: about 9 min"]


def test_shares_of_a_capacity_that_is_not_known_yet_are_announced_as_such(tmp_path: Path) -> None:
    comparison = Comparison((PLAIN,), (64,), (0.5, 2.0), True, (0,), Amounts(8, 100))
    (said,) = announced(comparison, Results(tmp_path / "a.json", {}, {}))
    assert said.endswith("208 requests; how long that takes is said when it is known what no-cache can serve")
    known = Results(tmp_path / "b.json", {}, {})
    known.rates_rps, known.capacity_rps = (1.0, 4.0), 2.0
    # No engine answers more than it can: 8 / 2 + 100 / 1 + 100 / 2 s, and 30 s of its start.
    assert announced(comparison, known)[0].endswith(f"about {duration(30 + 4 + 100 + 50)}")


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (45, "45 s"), (600, "10 min"), (11_520, "3 h 12 min")])
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_figures_that_mean_little_are_named_before_and_after() -> None:
    assert beforehand(3, 100) == []
    one, few = beforehand(1, 99)
    assert "--seeds 3" in one
    assert "99 requests at each rate" in few
    ttfts = {"no-cache": (2.0, 2.1, 1.9), "ragcache": (1.0, 1.1, 0.9), "vllm-host-lru": (1.0, 3.0, 2.0)}
    runs = [a_run(p, 0 if p == "no-cache" else 64, seed, 0, t) for p, of in ttfts.items() for seed, t in enumerate(of)]
    sure, unsure = ([run for run in runs if run.peer != peer] for peer in ("vllm-host-lru", "none"))
    assert afterwards(Summary(sure, list(ttfts), (64,), 1), (1.0,)) == []
    wide, alike = afterwards(Summary(unsure, list(ttfts), (64,), 1), (1.0,))
    assert wide.startswith("1 of 3 mean TTFTs are known no better than to 25%")
    assert "vllm-host-lru at 1 requests/s to 124%" in wide
    assert alike.startswith("1 of 2 comparisons with no-cache have 1 in their interval")
