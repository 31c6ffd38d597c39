"""One answer of a server for its several data-parallel engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache_core.ordering import PATHS_VERSION
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.document_usage import MAX_HOTTEST


def merged_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report for those of several engines, which have the same settings: figures add up.

    A tier is enabled where it is in all of them.
    """
    if len(reports) == 1:
        return reports[0]
    total = reports[0]
    for report in reports[1:]:
        total = _added(total, report)
    tiers: dict[str, dict[str, Any]] = {}
    uses: dict[str, dict[str, Any]] = {}
    for report in reports:
        for tier in report["tiers"]:
            tiers[tier["name"]] = _added(tiers[tier["name"]], tier) if tier["name"] in tiers else tier
        for use in report["hottest_documents"]:
            uses[use["doc_id"]] = _merged_use(uses[use["doc_id"]], use) if use["doc_id"] in uses else use
    return {
        **total,
        "max_overtaken": max(report["max_overtaken"] for report in reports),
        "tiers": [*tiers.values()],
        "hottest_documents": sorted(uses.values(), key=lambda use: (-use["frequency"], use["doc_id"]))[:MAX_HOTTEST],
    }


def joined_changes(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what engines say of their cached paths, side by side: an order is worth what one of them has of it.

    ::

        GET /v1/ragcache/cached_paths?cursor=             ->  {"version": 3, "cursor": "5f0c.2-77ab.9",
                                                               "is_complete": true, "engines": [
                                                                   {"is_reset": true, "changes": [...]}, ...]}
        GET /v1/ragcache/cached_paths?cursor=5f0c.2-77ab.9 -> what has changed since
    """
    return {
        "version": PATHS_VERSION,
        "cursor": "-".join(answer["cursor"] for answer in answers),
        "is_complete": all(answer["is_complete"] for answer in answers),
        "engines": [{"is_reset": answer["is_reset"], "changes": answer["changes"]} for answer in answers],
    }


def joined_requests(answers: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return what engines say of their latest requests as one: each with its ``engine``, those that run first."""
    requests = [
        {**request, "engine": engine, "id": response_id_of(request["id"])}
        for engine, answer in enumerate(answers)
        for request in answer["requests"]
    ]
    requests.sort(key=lambda request: (request["total_s"] is not None, request["age_s"]))
    return {
        "num_queued": sum(answer["num_queued"] for answer in answers),
        "num_running": sum(answer["num_running"] for answer in answers),
        "requests": requests[:limit],
    }


def response_id_of(request_id: str) -> str:
    """Return a request's id without the eight random digits that vLLM adds inside."""
    head, dash, tail = request_id.rpartition("-")
    return head if dash and len(tail) == 8 else request_id


def _merged_use(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": one["doc_id"],
        "frequency": one["frequency"] + other["frequency"],
        "num_tokens": max(one["num_tokens"], other["num_tokens"]),
        "tiers": [tier.label for tier in Tier if tier.label in {*one["tiers"], *other["tiers"]}],
    }


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two records, number by number; a flag is set where it is in both, all else is the first's."""
    total = {**other, **one}
    for name in one.keys() & other.keys():
        match one[name], other[name]:
            case bool(first), bool(second):
                total[name] = first and second
            case (int() | float()) as first, (int() | float()) as second:
                total[name] = first + second
            case dict(first), dict(second):
                total[name] = _added(first, second)
    return total
