"""Metrics of tenants: the first of the file by name, all others summed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.runtime.environment import TENANT_METRICS_ENV
from ragcache_core.stats import TENANT_SERIES, TENANT_TIER_SERIES

MAX_TENANTS = 1000
"""Each has two series, and three for each tier."""
OTHERS = "(others)"
"""No tenant can have this name."""


def num_shown(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of tenants with their own metrics.

    Raises:
        ConfigError: the environment's number cannot work.
    """
    text = environ.get(TENANT_METRICS_ENV) or "0"
    if not text.isdecimal() or int(text) > MAX_TENANTS:
        raise ConfigError(f"{TENANT_METRICS_ENV} is {quoted(text)}: give a number of tenants, {MAX_TENANTS} at most")
    return int(text)


def shown_tenants(report: Mapping[str, Any], num_tenants: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and statistics of tenants with their own metrics, then of all others together."""
    tenants = list(report.get("tenants", {}).items())
    yield from tenants[:num_tenants]
    if others := [figures for _, figures in tenants[num_tenants:]]:
        yield OTHERS, _summed(others)


def _summed(figures: list[dict[str, Any]]) -> dict[str, Any]:
    by_tier = zip(*(each["tiers"] for each in figures), strict=True)
    return {
        **{key: sum(each[key] for each in figures) for key in TENANT_SERIES},
        "tiers": [
            {"name": tiers[0]["name"], **{key: sum(tier[key] for tier in tiers) for key in TENANT_TIER_SERIES}}
            for tiers in by_tier
        ],
    }
