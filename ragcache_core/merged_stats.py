"""One report for those of several engines: of one server, or of a fleet's replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache_core.stats import MAX_HOTTEST
from ragcache_core.types import Tier


def merged_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report for those of several engines, which have the same settings: figures add up.

    A tier is enabled where it is in all of them.
    """
    if len(reports) == 1:
        return reports[0]
    total = _merged(reports)
    names = dict.fromkeys(name for report in reports for name in report.get("tenants", ()))
    tenants = {name: _merged([report["tenants"][name] for report in reports]) for name in names}
    return {
        **total,
        "max_overtaken": max(report["max_overtaken"] for report in reports),
        **({"tenants": tenants} if tenants else {}),
    }


def _merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures that are added up, tier by tier and document by document."""
    total = reports[0]
    for report in reports[1:]:
        total = added(total, report)
    tiers: dict[str, dict[str, Any]] = {}
    uses: dict[str, dict[str, Any]] = {}
    for report in reports:
        for tier in report["tiers"]:
            tiers[tier["name"]] = added(tiers[tier["name"]], tier) if tier["name"] in tiers else tier
        for use in report["hottest_documents"]:
            uses[use["doc_id"]] = _merged_use(uses[use["doc_id"]], use) if use["doc_id"] in uses else use
    return {
        **total,
        "tiers": [*tiers.values()],
        "hottest_documents": sorted(uses.values(), key=lambda use: (-use["frequency"], use["doc_id"]))[:MAX_HOTTEST],
    }


def _merged_use(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": one["doc_id"],
        "frequency": one["frequency"] + other["frequency"],
        "num_tokens": max(one["num_tokens"], other["num_tokens"]),
        "tiers": [tier.label for tier in Tier if tier.label in {*one["tiers"], *other["tiers"]}],
    }


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two records, number by number; a flag is set where it is in both, all else is the first's."""
    total = {**other, **one}
    for name in one.keys() & other.keys():
        match one[name], other[name]:
            case bool(first), bool(second):
                total[name] = first and second
            case (int() | float()) as first, (int() | float()) as second:
                total[name] = first + second
            case dict(first), dict(second):
                total[name] = added(first, second)
    return total
