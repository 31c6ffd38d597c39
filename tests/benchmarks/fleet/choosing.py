"""What it costs to choose a replica, and an order of documents with it, where 64 replicas have 10,000 paths each."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx

from ragcache_core.client.fleet.replicas import HOME, FleetPrefixes, ReplicaSet
from ragcache_core.client.http.attempt import Health
from ragcache_core.ordering import CachedPaths, PathChange, static_prefix_digest
from ragcache_core.routing.index import PathIndex
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms

_NUM_REPLICAS, _NUM_PATHS = 64, 10_000
_NUM_DOCUMENTS, _DOCUMENT_TOKENS, _STATIC_TOKENS = 5, 400, 40
_MANY_REPLICAS = 1_000
_RUNNING_EACH = 1.5


class _Watch:
    run = 1

    def health(self) -> Health:
        return Health.READY


class _Mirror:
    def __init__(self, paths: CachedPaths) -> None:
        self._paths = paths

    def keep_in(self, index: PathIndex, lock: threading.Lock) -> None:
        for _ in index.join(self._paths):
            pass

    def known_in(self, index: PathIndex) -> list[CachedPaths]:
        return [self._paths]


def measure_choosing(plan: Plan) -> Part:
    """Time the client's own code from documents to the replica's address, with requests on their way everywhere.

    A choice is both steps: the order of five documents, and the replica of the request that shows them so. Reading the
    request's body is timed with it, sending is not.
    """
    ordering, sending = _timed(plan, _NUM_REPLICAS, plan.sized(_NUM_PATHS, 500))
    many = _timed(plan, _MANY_REPLICAS, plan.sized(_NUM_PATHS // 10, 50))
    whole = ("choice", "order and replica together")
    figures = [
        _figure(*whole, [a + b for a, b in zip(ordering, sending, strict=True)]),
        _figure("order", "the order of documents alone", ordering),
        _figure("send", "the replica alone, the body of 2,000 token ids read", sending),
        _figure(f"choice_{_MANY_REPLICAS}", f"among {_MANY_REPLICAS:,}", [a + b for a, b in zip(*many, strict=True)]),
    ]
    details = {"replicas": _NUM_REPLICAS, "paths_each": plan.sized(_NUM_PATHS, 500), "requests": len(ordering)}
    return Part(f"{plan.sized(200, 20)} choices", tuple(figures), details)


def _figure(key: str, note: str, times_s: Sequence[float]) -> Figure:
    p50_ms, p99_ms = percentiles_ms(times_s)
    return Figure(f"{key}_p99_ms", p99_ms, p50_ms=p50_ms, p99_ms=p99_ms, note=note)


def _timed(plan: Plan, num_replicas: int, num_paths: int) -> tuple[list[float], list[float]]:
    """Return the seconds of this thread that choices of an order took, and those of a replica."""
    rng = random.Random(plan.seed)
    static = list(range(_STATIC_TOKENS))
    prefix = static_prefix_digest([*static, 0], [PromptSegment(SegmentKind.DOCUMENT, _STATIC_TOKENS, 41, "any")])
    assert prefix is not None
    names = [f"document-{i}" for i in range(2 * num_paths)]
    engines = [
        SimpleNamespace(
            base_url=f"http://replica-{i}:8000/v1",
            api_key="key",
            integration=SimpleNamespace(
                watch=_Watch(), cached_prefixes=_Mirror(_cached(rng, names, prefix, num_paths))
            ),
        )
        for i in range(num_replicas)
    ]
    replicas = ReplicaSet(cast("Any", engines), None)
    prefixes = FleetPrefixes(replicas)
    ordering, sending = [], []
    running: list[Any] = []
    num_warm_up, num_timed = plan.sized(200, 20), plan.sized(3_000, 600)
    for number in range(num_warm_up + num_timed):
        found = rng.sample(names[: num_paths // 5], _NUM_DOCUMENTS)  # what is asked for is what many have
        began_s = time.thread_time()
        order = prefixes.order(found, prefix=prefix, keep_first=False) or range(_NUM_DOCUMENTS)
        ordered_s = time.thread_time()
        request = _request([found[i] for i in order], static)
        built_s = time.thread_time()
        running.append(replicas.send(request))
        sent_s = time.thread_time()
        if number >= num_warm_up:
            ordering.append(ordered_s - began_s)
            sending.append(sent_s - built_s)
        if len(running) > _RUNNING_EACH * num_replicas:
            running.pop(rng.randrange(len(running))).end()
    return ordering, sending


def _cached(rng: random.Random, names: list[str], prefix: bytes, num_paths: int) -> CachedPaths:
    """Return a mirror with so many paths of one to five documents; the first names are in many of them."""
    paths = CachedPaths()
    paths.set(PathChange(prefix, (), _STATIC_TOKENS))
    while len(paths) <= num_paths:
        path = tuple(names[int(len(names) * rng.random() ** 2)] for _ in range(_NUM_DOCUMENTS))
        for end in range(1, _NUM_DOCUMENTS + 1):
            paths.set(PathChange(prefix, path[:end], _STATIC_TOKENS + _DOCUMENT_TOKENS * end))
    return paths


def _request(documents: list[str], static: list[int]) -> httpx.Request:
    ends = [_STATIC_TOKENS + _DOCUMENT_TOKENS * (n + 1) for n in range(len(documents))]
    segments = [
        PromptSegment(SegmentKind.DOCUMENT, end - _DOCUMENT_TOKENS, end, name)
        for end, name in zip(ends, documents, strict=True)
    ]
    token_ids = [*static, *range(_DOCUMENT_TOKENS * len(documents) + 30)]
    body = {"model": "m", "prompt": token_ids, "kv_transfer_params": encode_kv_transfer_params(segments)}
    return httpx.Request("POST", f"{HOME}/v1/completions", content=json.dumps(body))
