"""One answer of a server for its several data-parallel engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache_core.ordering import PATHS_VERSION


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
