"""The tiers' benchmark: goals are judged as they are worded, parts are kept over runs, and the cheap parts measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragcache_core.bench.token_client import TokenAnswer
from tests.benchmarks.engines import BLOCK_SIZE
from tests.benchmarks.report import Figure, Goal, Part, merged, percentiles_ms, read_report, table, to_json
from tests.benchmarks.tiers.__main__ import GOALS, main
from tests.benchmarks.tiers.exactness import mismatches
from tests.benchmarks.tiers.hit_share import cached_share
from tests.benchmarks.tiers.idle_overhead import LOADS, Start, geometric_mean, random_texts, unique_requests

pytestmark = pytest.mark.slow

CHEAP = ("decisions", "index", "killpoints", "policies", "warm-forecast")


def run(path: Path, *parts: str) -> str:
    arguments = ["--quick", "--output", str(path), *(word for part in parts for word in ("--only", part))]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("goal", "value", "is_met"),
    [
        (Goal("<", 0.3), 0.299, True),
        (Goal("<", 0.3), 0.3, False),
        (Goal("<=", 1.0), 1.0, True),
        (Goal(">=", 1.4), 1.399, False),
        (Goal(">", 0), 0, False),
        (Goal("=", 0), 1, False),
    ],
)
def test_a_goal_is_judged_at_its_very_bound(goal: Goal, value: float, is_met: bool) -> None:
    assert goal.is_met(value) is is_met


def test_a_missed_goal_is_named_and_not_hidden_by_the_table() -> None:
    part = to_json(Part("none", (Figure("swap_out_ratio", 1.2, 1.0), Figure("index_open_s", 2.0))), {})
    report = merged({}, {"x": part}, GOALS)
    assert report["goals_missed"] == ["swap_out_ratio"]
    assert report["index_open_s"] == 2.0
    rows = table(part["figures"], GOALS).splitlines()
    assert "MISSED" in rows[1]
    assert "met" in rows[2]


def test_a_part_measured_anew_replaces_its_figures_and_keeps_the_others() -> None:
    before = merged({}, {"a": to_json(Part("", (Figure("index_open_s", 9.0),)), {}),
                         "b": to_json(Part("", (Figure("killpoint_lost", 0),)), {})}, GOALS)  # fmt: skip
    after = merged(before, {"a": to_json(Part("", (Figure("index_open_s", 1.0),)), {})}, GOALS)
    assert (after["index_open_s"], after["killpoint_lost"]) == (1.0, 0)
    assert after["goals_missed"] == []
    assert "idle_throughput_ratio" in after["goals_not_measured"]


def test_a_damaged_report_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("[1, 2", encoding="utf-8")
    assert read_report(path) == {}
    assert read_report(tmp_path / "missing.json") == {}


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles_ms([0.001 * i for i in range(101)]) == (50.0, 99.0)


def answer(token_ids: tuple[int, ...], num_prompt_tokens: int = 10, num_cached_tokens: int = 0) -> TokenAnswer:
    return TokenAnswer(token_ids, num_prompt_tokens, num_cached_tokens)


def test_an_answer_that_differs_in_its_last_token_or_its_length_is_a_mismatch() -> None:
    expected = [answer((1, 2)), answer((1, 2)), answer((1, 2))]
    assert mismatches([answer((1, 2)), answer((1, 3)), answer((1,))], expected) == [1, 2]


def test_the_cached_share_weighs_requests_by_their_tokens() -> None:
    assert cached_share([answer((), 100, 50), answer((), 300, 50)]) == 0.25


def test_twice_the_time_of_plain_vllm_at_the_same_moment_is_half_its_throughput() -> None:
    slow_for_a_while = {"plain": (1.0, 1.0, 9.0), "twin": (1.0, 1.0, 9.0), "ours": (2.0, 2.0, 18.0)}
    assert Start(slow_for_a_while).throughput_ratio == 0.5
    assert Start(slow_for_a_while).twin_ratio == 1.0
    twins_differ = Start({"plain": (1.0, 1.0, 1.0), "twin": (4.0, 4.0, 4.0), "ours": (2.0, 2.0, 2.0)})
    assert (twins_differ.throughput_ratio, twins_differ.twin_ratio) == (1.0, 0.25)


def test_no_prompt_of_the_idle_loads_begins_like_another() -> None:
    requests = [
        request
        for i, load in enumerate(LOADS)
        for request in unique_requests(random_texts(0, i), load, 0, 7 * load.batch)
    ]
    first_blocks = {request.token_ids[:BLOCK_SIZE] for request in requests}
    assert len(first_blocks) == len(requests) == 7 * sum(load.batch for load in LOADS)


def test_a_half_and_a_double_are_no_difference_in_the_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == 1.0


def test_the_cheap_parts_write_every_figure_that_has_a_goal(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run(path, *CHEAP[:2])
    output = run(path, *CHEAP[2:])
    report = json.loads(path.read_text())
    assert set(report["parts"]) == set(CHEAP)
    needs_engine = {
        key
        for key in GOALS
        if key.startswith(("exact", "mixed", "cached", "disk_ttft", "idle", "shared", "swap", "warm"))
    }
    assert set(report["goals_not_measured"]) == needs_engine
    assert report["killpoints"] == 5
    assert report["killpoint_lost"] == report["killpoint_wrong"] == 0
    assert GOALS["bytes_per_node"].is_met(report["bytes_per_node"])
    timed = [f for part in report["parts"].values() for f in part["figures"] if f["p99_ms"] is not None]
    assert {"decision_p99_ms_1k", "decision_p99_ms_100k"} <= {figure["key"] for figure in timed}
    assert all(0 < figure["p50_ms"] < figure["p99_ms"] for figure in timed)
    assert report["parts"]["policies"]["details"]["recommended"] in output
    assert all(part["quick"] and part["warm_up"] for part in report["parts"].values())
