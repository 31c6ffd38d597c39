"""Configuration, statistics and the error tree."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

import pytest

from ragcache_core import errors
from ragcache_core.errors import RAGCacheError
from ragcache_core.stats import (
    DocumentStats,
    DocumentUse,
    EngineStats,
    RequestStats,
    TierStats,
    document_stats,
    request_stats_from_dict,
)
from ragcache_core.types import PromptSegment, SegmentKind


def test_the_docstring_draws_every_error_of_the_tree() -> None:
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    assert classes
    assert all(issubclass(c, RAGCacheError) for c in classes)
    drawn = set(re.findall(r"── (\w+Error)\b", errors.__doc__ or ""))
    assert {c.__name__ for c in classes} == drawn | {"RAGCacheError"}


SEGMENTS = (
    PromptSegment(SegmentKind.PREFIX, 0, 7),
    PromptSegment(SegmentKind.DOCUMENT, 7, 36, "a"),
    PromptSegment(SegmentKind.DOCUMENT, 36, 70, "b"),
    PromptSegment(SegmentKind.QUESTION, 70, 81),
)


@pytest.mark.parametrize(
    ("num_cached_tokens", "of_a", "of_b"), [(0, 0, 0), (7, 0, 0), (8, 1, 0), (64, 29, 28), (70, 29, 34), (81, 29, 34)]
)
def test_a_document_is_cached_as_far_as_the_cached_prefix_reaches(num_cached_tokens: int, of_a: int, of_b: int) -> None:
    assert document_stats(SEGMENTS, num_cached_tokens) == (DocumentStats("a", 29, of_a), DocumentStats("b", 34, of_b))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"num_gpu_tokens": 32, "num_host_tokens": 16, "num_disk_tokens": 16, "num_loaded_bytes": 4096,
         "num_stored_bytes": 0, "queue_s": 0.002},
    ],
)  # fmt: skip
def test_request_statistics_survive_json(told: dict[str, Any]) -> None:
    stats = RequestStats(81, 64, 7, 0.03, 0.1, document_stats(SEGMENTS, 64), **told)
    data = json.loads(json.dumps(stats.to_dict()))
    assert data["num_computed_tokens"] == 17
    assert told.items() <= data.items()
    assert request_stats_from_dict(data) == stats


def test_engine_statistics_are_json_with_the_share_that_each_tier_served() -> None:
    tier = TierStats("host", 1 << 30, 1 << 28, 100, 7, 50, is_enabled=True)
    use = DocumentUse("a", 2.5, 300, ("gpu", "host"))
    stats = EngineStats(0, 0, 0.0, 0, 0, 200, 20, 0, policy="lru", tiers=(tier,), hottest_documents=(use,))
    data = stats.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert (tier.usage, stats.tier_hit_rate(tier)) == (0.25, 0.25)
    assert data["tiers"] == [{**dataclasses.asdict(tier), "hit_rate": 0.25}]
    assert data["hottest_documents"] == [{"doc_id": "a", "frequency": 2.5, "num_tokens": 300, "tiers": ["gpu", "host"]}]
