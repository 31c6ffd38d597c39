"""Merge the results of a server's data-parallel engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragcache_core.ordering import PATHS_VERSION
from ragcache_core.stats import PinReceipt, added
from ragcache_core.vllm_plugin.cache.recent_requests import response_id_of

_ORDERS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "bytes": lambda document: sum(document["bytes"].values()),
    "uses": lambda document: document["uses"],
    "saved": lambda document: document["saved_s"],
    "age": lambda document: document["age_s"] or 0.0,
}


def merged_contents(answers: Sequence[dict[str, Any]], sort: str, limit: int) -> dict[str, Any]:
    """Return the merged contents of engines; the sizes of a document in several are added.

    ``total`` counts a document once, as far as the engines listed it.
    """
    if len(answers) == 1:
        return answers[0]
    documents: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for document in answer["documents"]:
            known = documents.get(document["id"])
            documents[document["id"]] = document if known is None else _merged_document(known, document)
    kept = sorted(documents.values(), key=lambda document: (_ORDERS[sort](document), document["id"]), reverse=True)
    return {"documents": kept[:limit], "total": max(len(documents), *(answer["total"] for answer in answers))}


def merged_pins(answers: Sequence[dict[str, Any]], doc_ids: Sequence[str]) -> PinReceipt:
    """Return one receipt for several engines: known if cached in one, pinned in all."""
    changed = {doc_id for answer in answers for doc_id in answer["changed"]}
    return PinReceipt(
        changed=tuple(doc_id for doc_id in doc_ids if doc_id in changed),
        unknown=tuple(doc_id for doc_id in doc_ids if doc_id not in changed),
        num_pinned=max(answer["num_pinned"] for answer in answers),
        num_bytes=sum(answer["num_bytes"] for answer in answers),
        limit_bytes=sum(answer["limit_bytes"] for answer in answers),
    )


def joined_changes(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the engines' cached prefixes side by side, as an order is scored by one engine.

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
    """Return the engines' latest requests merged, each with its ``engine``, running ones first."""
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


def _merged_document(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    ages = [age for age in (one["age_s"], other["age_s"]) if age is not None]
    places = [*one.get("places", ()), *other.get("places", ())]
    return {
        **added(one, other),
        "tokens": max(one["tokens"], other["tokens"]),
        "age_s": max(ages, default=None),
        "pinned": one["pinned"] or other["pinned"],
        **({"places": places} if places else {}),
    }
