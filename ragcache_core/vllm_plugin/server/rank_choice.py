"""Choose the data-parallel engine for a request: the one with its documents, unless it is much busier."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ragcache_core.ordering import MAX_PATH_DOCUMENTS
from ragcache_core.runtime.tenant_entries import TenantEntries
from ragcache_core.wire import KEY

_MAX_KNOWN = 200_000
_MAX_KNOWN_OF_TENANT = 20_000
_MAX_MORE_RUNNING = 4
"""Requests that may run where the documents are, beyond those at the idlest: then to compute them there is faster."""


class RankChoice:
    """Remembers the last engine of each document order, for the last ``max_known`` orders.

    Each tenant has its own orders, as it hits no KV of others.

    An engine caches the orders sent to it, so the engines need not be queried. New orders go to the engine with the
    fewest running requests, of equal ones to the one with the fewest orders.
    """

    def __init__(self, num_engines: int, max_known: int = _MAX_KNOWN) -> None:
        self._num_running = [0] * num_engines
        self._num_known = Counter[int]()
        self._known: TenantEntries[int, int] = TenantEntries(max_known, min(max_known, _MAX_KNOWN_OF_TENANT))

    @contextmanager
    def sending(self, documents: Sequence[str], tenant: str | None = None) -> Iterator[int]:
        """Yield the engine for a prompt with ``documents`` in this order, counted as busy inside."""
        rank = self._choose(documents, tenant)
        self._num_running[rank] += 1
        try:
            yield rank
        finally:
            self._num_running[rank] -= 1

    def _choose(self, documents: Sequence[str], tenant: str | None) -> int:
        paths = list(_paths(documents))
        idlest = min(range(len(self._num_running)), key=lambda rank: (self._num_running[rank], self._num_known[rank]))
        known = (self._known.get(tenant, path) for path in reversed(paths))
        rank = next((each for each in known if each is not None), idlest)
        if self._num_running[rank] > self._num_running[idlest] + _MAX_MORE_RUNNING:
            rank = idlest
        for path in reversed(paths):  # ends of paths are evicted first
            self._know(path, rank, tenant)
        return rank

    def _know(self, path: int, rank: int, tenant: str | None) -> None:
        if (before := self._known.pop(tenant, path)) is not None:
            self._num_known[before] -= 1
        self._num_known[rank] += 1
        for evicted in self._known.put(tenant, path, rank):
            self._num_known[evicted] -= 1


def _paths(documents: Sequence[str]) -> Iterator[int]:
    """Yield a key for each document prefix; a collision is only a miss."""
    path = 0
    for document in documents[:MAX_PATH_DOCUMENTS]:
        path = hash((path, document))
        yield path


def documents_of(body: bytes) -> list[str]:
    """Return the documents that a request names, in prompt order; empty if invalid."""
    if b"kv_transfer_params" not in body:
        return []
    try:
        return [str(document["id"]) for document in json.loads(body)["kv_transfer_params"][KEY]["documents"]]
    except (ValueError, RecursionError, TypeError, KeyError):
        return []
