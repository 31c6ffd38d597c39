"""Each statistic is declared once: what clients read, Prometheus scrapes and the reference lists are its field."""

from __future__ import annotations

import importlib.util
from dataclasses import fields

from ragcache_core.client.stats.cache_summary import CacheSummary
from ragcache_core.stats import (
    CHUNK_SERIES,
    ENGINE_SERIES,
    TIER_SERIES,
    TOKENS_BY_ORIGIN,
    EngineStats,
    reported_fields,
    vllm_series_of,
)
from tests.conftest import ROOT


def test_the_reference_is_what_the_declarations_say() -> None:
    spec = importlib.util.spec_from_file_location("statistics_page", ROOT / "docs" / "statistics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/statistics.py"


def test_no_two_statistics_share_a_metric_and_each_of_an_engine_has_one_source() -> None:
    names = [series.name for table in (ENGINE_SERIES, TIER_SERIES, CHUNK_SERIES) for series in table.values()]
    assert len(set(names)) == len(names) > 40
    assert not set(reported_fields(EngineStats)) & vllm_series_of(EngineStats).keys()


def test_a_summary_adds_up_the_tokens_of_every_origin() -> None:
    assert tuple(f"num_{origin}_tokens" for origin in ("gpu", "host", "disk", "shared")) == TOKENS_BY_ORIGIN
    assert set(TOKENS_BY_ORIGIN) <= {each.name for each in fields(CacheSummary)}
