"""What the examples print, where the engine says less than all: plain vLLM knows no tiers."""

from __future__ import annotations

import json

import pytest

from examples import demo
from examples._shared import Options, Row, show
from ragcache_core import RequestStats

OPTIONS = Options(model="model", url=None, as_json=False)
TIERED = RequestStats(100, 96, 4, 0.5, 1.0, num_gpu_tokens=32, num_host_tokens=0, num_disk_tokens=64)
PLAIN = RequestStats(100, 96, 4, None, 1.0)


def test_a_table_shows_the_tokens_of_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row.of("Why?", "again", " because ", TIERED)], OPTIONS)
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["Why?", "again", "because", "500.0", "100", "96", "32", "0", "64"]


def test_a_table_has_a_dash_for_what_the_engine_does_not_say(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row.of("Why?", "again", "because", PLAIN)], OPTIONS)
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["Why?", "again", "because", "-", "100", "96", "-", "-", "-"]


def test_the_json_of_a_row_has_its_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row.of("Why?", "again", "because", TIERED)], Options(model="model", url=None, as_json=True))
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["num_gpu_tokens"], row["num_host_tokens"], row["num_disk_tokens"]) == (32, 0, 64)


def test_a_table_shows_what_was_hidden_where_something_was_searched(capsys: pytest.CaptureFixture[str]) -> None:
    searched, not_searched = Row.of("Why?", "tool", "because", TIERED, 0.25), Row.of("Why?", "step", "search", TIERED)
    show([searched, not_searched], OPTIONS)
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[-2:] == ["hidden", "ms"]
    assert [row.split()[-1] for row in rows] == ["250.0", "-"]


def test_a_round_of_the_demo_sums_its_requests(capsys: pytest.CaptureFixture[str]) -> None:
    summed = demo.Round.of("later", [TIERED, TIERED], num_same=2)
    assert (summed.prompt_tokens, summed.gpu_tokens, summed.host_tokens, summed.disk_tokens) == (200, 64, 0, 128)
    demo.print_rounds([summed])
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["later", "2", "200", "64", "0", "128", "8", "500.0", "ms", "2", "of", "2"]


def test_a_round_on_plain_vllm_has_no_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    summed = demo.Round.of("later", [TIERED, PLAIN], num_same=1)
    assert (summed.gpu_tokens, summed.host_tokens, summed.disk_tokens) == (None, None, None)
    demo.print_rounds([summed])
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["later", "2", "200", "-", "-", "-", "-", "500.0", "ms", "1", "of", "2"]
