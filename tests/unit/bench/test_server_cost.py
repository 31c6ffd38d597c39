"""``benchmarks.server_cost`` without engines: which run at once, and what a request is."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.server_cost.engines import process_time_s
from benchmarks.server_cost.measure import group_engines
from benchmarks.server_cost.scenes import SCENES
from ragcache_core.bench.prompts import TokenRequest


def test_the_baseline_runs_beside_every_group_of_engines() -> None:
    engines = ("vllm", "vllm-control", "vllm-offload", "ragcache-gpu", "ragcache-host")
    assert group_engines(engines, 5) == group_engines(engines, 9) == [[*engines]]
    groups = group_engines(engines, 3)
    assert [len(group) for group in groups] == [3, 3]
    assert all(group[0] == "vllm" for group in groups)
    assert [name for group in groups for name in group[1:]] == [*engines[1:]]


def test_memory_for_one_engine_is_an_error_that_names_the_memory_for_two() -> None:
    with pytest.raises(ValueError, match="two engines at once need 6 GiB"):
        group_engines(("vllm", "ragcache-host"), 1)
    assert group_engines(("vllm",), 1) == [["vllm"]]


def test_requests_of_a_scene_share_documents_only_where_they_are_hits() -> None:
    for scene in SCENES:
        first, second = scene.make_request(1), scene.make_request(2)
        assert first == scene.make_request(1)
        assert first.token_ids != second.token_ids
        assert 3_850 < len(first.token_ids) == len(second.token_ids) < 3_950
        assert (_common_tokens(first, second) > 3_800) is scene.is_cached


def test_the_processor_time_of_a_process_grows_while_it_works() -> None:
    before_s, own_before_s = process_time_s(os.getpid()), time.process_time()
    while time.process_time() - own_before_s < 0.05:
        pass
    assert process_time_s(os.getpid()) - before_s == pytest.approx(0.05, abs=0.02)


def _common_tokens(first: TokenRequest, second: TokenRequest) -> int:
    pairs = enumerate(zip(first.token_ids, second.token_ids, strict=True))
    return next(number for number, (a, b) in pairs if a != b)
