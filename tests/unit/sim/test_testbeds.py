"""Testbeds: the papers', and those of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.sim.testbeds import MEASURED, TESTBEDS, load_testbed

TIMES = {"format": 1, "cached_tokens": [0, 512], "new_tokens": [32, 512], "seconds": [[0.03, 0.1], [0.04, 0.12]]}


def test_the_seven_billion_models_take_a_second_for_4128_tokens_and_gain_eleven_times_by_a_prefix() -> None:
    for name in ("a10g-mistral-7b", "a10g-llama2-7b"):
        cost = load_testbed(name).cost
        assert cost.estimate_s(0, 4_128) == pytest.approx(1.0, abs=0.005)
        assert cost.estimate_s(0, 4_128) / cost.estimate_s(4_096, 32) == pytest.approx(11.4, abs=0.1)
        assert cost.estimate_s(0, 0) == 0.0


def test_the_formula_is_what_the_default_profile_samples() -> None:
    formula, sampled = TESTBEDS["a10g-mistral-7b"].cost, PrefillCostModel.default()
    for num_cached_tokens in (0, 131_072):
        for num_new_tokens in (1, 48, 4_096, 131_072):
            expected = sampled.estimate_s(num_cached_tokens, num_new_tokens)
            assert formula.estimate_s(num_cached_tokens, num_new_tokens) == pytest.approx(expected, rel=1e-12)


def test_what_comes_from_disk_passes_through_the_host() -> None:
    testbed = TESTBEDS["a10g-mistral-7b"]
    assert testbed.transfer_s(8_192, 0) == pytest.approx(1 / 11.5)
    assert testbed.transfer_s(0, 8_192) == pytest.approx(1 / 11.5 + 1 / 2)


def test_an_h100_was_measured_and_can_be_named() -> None:
    testbed = load_testbed("h100-llama3-8b")
    assert testbed.name == "h100-llama3-8b" in MEASURED
    assert testbed.cost.estimate_s(0, 4_096) == pytest.approx(0.115, rel=0.01)
    assert testbed.cost.estimate_s(4_096, 16) < testbed.cost.estimate_s(0, 4_112) / 10
    assert testbed.lengths_beyond(32_768, 8_192) is None
    assert testbed.transfer_s(8_192, 0) == pytest.approx(1 / 51.4, rel=0.01)
    assert testbed.assumed == ("disk_gib_per_s 2",)


@pytest.mark.parametrize("holder", [lambda times: times, lambda times: {"kind": "profile", "cost_model": times}])
def test_a_file_of_times_is_a_testbed(tmp_path: Path, holder: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**holder(TIMES), "tokens_per_gib": 2_048, "host_gib_per_s": 20}))  # type: ignore[operator]
    testbed = load_testbed(str(path))
    assert testbed.cost.estimate_s(0, 512) == 0.1
    assert testbed.base_s == 0.03
    assert testbed.decode_s(512) >= testbed.base_s
    assert testbed.transfer_s(2_048, 0) == pytest.approx(1 / 20)
    assert testbed.assumed == ("disk_gib_per_s 2",)
    assert testbed.lengths_beyond(512, 512) is None
    missing = testbed.lengths_beyond(513, 512)
    assert missing is not None
    assert "512 cached" in missing
    assert "513" in missing


def test_a_file_may_hold_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"formula": {"base_s": 0.01, "per_new_s": 1e-4}}))
    testbed = load_testbed(str(path))
    assert testbed.cost.estimate_s(500, 100) == pytest.approx(0.02)
    assert testbed.lengths_beyond(10**9, 10**9) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"kind": "profile"}', "no prefill times"),
        (json.dumps({**TIMES, "tokens_per_gib": "many"}), "tokens_per_gib is 'many'"),
        (json.dumps({**TIMES, "host_gib_per_s": 0}), "host_gib_per_s is 0"),
        (json.dumps({"formula": {"base": 1}}), "formula has 'base'"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_testbed(str(path))
    assert str(path) in str(refused.value)


def test_a_name_that_is_neither_lists_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="h800-llama2-70b"):
        load_testbed("gpt-5")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_testbed(str(tmp_path))
