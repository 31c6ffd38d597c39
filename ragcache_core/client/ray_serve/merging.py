"""One answer for those of all replicas: figures, what was forgotten, what is cached where."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from ragcache_core.ordering import PATHS_VERSION
from ragcache_core.stats import ForgetReceipt, merged_report

Bodies = Mapping[str, bytes]
"""What replicas answered, by their names."""
_RECEIPT = TypeAdapter(ForgetReceipt)


def _report(bodies: Bodies) -> bytes:
    return json.dumps(merged_report([json.loads(body) for body in bodies.values()])).encode()


def _receipt(bodies: Bodies) -> bytes:
    receipts = [_RECEIPT.validate_python({**json.loads(body), "is_complete": None}) for body in bodies.values()]
    return json.dumps(reduce(ForgetReceipt.beside, receipts).to_dict()).encode()


def _most_read(bodies: Bodies) -> bytes:
    return max(bodies.values(), key=lambda body: int(json.loads(body)["num_read_tokens"]))


def _metrics(bodies: Bodies) -> bytes:
    """Return pages of Prometheus as one, each sample with its replica's name."""
    families: dict[str, Metric] = {}
    for name, body in bodies.items():
        for family in text_string_to_metric_families(body.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [each._replace(labels={**each.labels, "replica": name}) for each in family.samples]
    page: bytes = generate_latest(SimpleNamespace(collect=families.values))
    return page


def _paths(bodies: Bodies) -> bytes:
    """Return what replicas have cached side by side, as one server's several engines do."""
    told: dict[str, dict[str, Any]] = {name: json.loads(bodies[name]) for name in sorted(bodies)}
    whole = {
        "version": PATHS_VERSION,
        "cursor": ",".join(f"{name}~{answer['cursor']}" for name, answer in told.items()),
        "is_complete": all(answer["is_complete"] for answer in told.values()),
        "engines": [engine for answer in told.values() for engine in answer["engines"]],
    }
    return json.dumps(whole, separators=(",", ":")).encode()


PATHS_ROUTE = "/v1/ragcache/cached_paths"
MERGED: Mapping[tuple[str, str], Callable[[Bodies], bytes]] = {
    ("GET", "/metrics"): _metrics,
    ("GET", "/metrics/"): _metrics,
    ("GET", "/v1/ragcache/stats"): _report,
    ("GET", PATHS_ROUTE): _paths,
    ("POST", "/v1/ragcache/documents/forget"): _receipt,
    ("POST", "/v1/ragcache/cache/purge"): _receipt,
    ("POST", "/v1/ragcache/prefetch"): _most_read,
}
"""Routes that every replica answers, and what one answer is made of theirs."""


def cursors_of(cursor: str) -> dict[str, str]:
    """Return where the mirror of each replica goes on, of the cursor that :data:`PATHS_ROUTE` was answered with."""
    return dict(each.split("~", 1) for each in cursor.split(",") if "~" in each)
