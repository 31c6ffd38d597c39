"""In which order a prompt shows its documents, by what the engine has cached."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.client.ordering.cached_prefixes import CachedPrefixIndex
from ragcache_core.ordering import DocumentOrder, arrange
from ragcache_core.swaps import Choice, prefer_cached
from ragcache_core.types import DocId, Document

_NUM_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Documents in the order to show them; ``is_reordered``: it is not the one that they were retrieved in."""

    documents: tuple[Document, ...]
    is_reordered: bool
    duration_s: float


def in_order(
    ordering: OrderingClient | None,
    documents: Sequence[Document],
    order: DocumentOrder,
    *,
    keep_first: bool,
    prefix: bytes | None = None,
) -> Sequence[Document]:
    """Return documents as :meth:`OrderingClient.arrange` does; without an engine ``cache_aware`` changes nothing."""
    if ordering is not None:
        return ordering.arrange(documents, order, keep_first=keep_first, prefix=prefix).documents
    return [documents[i] for i in arrange([d.doc_id for d in documents], order, None, keep_first=keep_first)]


class RememberedOrders:
    """The orders that documents were brought into lately, bounded and thread-safe: for counting such requests."""

    def __init__(self, capacity: int = _NUM_REMEMBERED) -> None:
        self._capacity = capacity
        self._orders: OrderedDict[tuple[DocId, ...], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, documents: tuple[DocId, ...]) -> None:
        """Remember an order that is not the one of the search."""
        with self._lock:
            self._orders[documents] = None
            self._orders.move_to_end(documents)
            while len(self._orders) > self._capacity:
                self._orders.popitem(last=False)

    def discard(self, documents: tuple[DocId, ...]) -> None:
        """Forget an order: this time the search had it."""
        with self._lock:
            self._orders.pop(documents, None)

    def __contains__(self, documents: object) -> bool:
        with self._lock:
            return documents in self._orders


class OrderingClient:
    """Orders documents for one engine's prompts."""

    def __init__(self, cached: CachedPrefixIndex, reordered: RememberedOrders) -> None:
        """``cached`` is what the engine has, ``reordered`` takes note of the orders that were changed."""
        self._cached = cached
        self._reordered = reordered

    def arrange(
        self,
        documents: Sequence[Document],
        order: DocumentOrder,
        *,
        keep_first: bool = False,
        prefix: bytes | None = None,
    ) -> Arrangement:
        """See ``Engine.arrange_documents``."""
        began_s = time.perf_counter()
        ids = tuple(d.doc_id for d in documents)
        if order == "cache_aware":
            places = self._cached.order(ids, prefix=prefix, keep_first=keep_first)
        else:
            places = arrange(ids, order, None, keep_first=keep_first)
        is_reordered = places is not None and places != tuple(range(len(ids)))
        if places is None or not is_reordered:
            self._reordered.discard(ids)
            return Arrangement(tuple(documents), False, time.perf_counter() - began_s)
        self._reordered.add(tuple(ids[i] for i in places))
        return Arrangement(tuple(documents[i] for i in places), True, time.perf_counter() - began_s)

    def refresh(self, timeout_s: float = 5.0) -> bool:
        """Ask the engine now what it has cached, and return whether it has answered in time. For who measures."""
        return self._cached.refresh(timeout_s)

    def prefer_cached(
        self,
        candidates: Sequence[DocId],
        scores: Sequence[float],
        k: int,
        *,
        max_score_loss: float,
        order: DocumentOrder,
        keep_first: bool,
        prefix: bytes | None,
    ) -> Choice:
        """Do :func:`~ragcache_core.swaps.prefer_cached` by what the engine has; without knowing it, choose the best."""
        options: dict[str, Any] = {"order": order, "keep_first": keep_first, "prefix": prefix}
        chosen = self._cached.look(
            lambda engines: prefer_cached(candidates, scores, k, engines, max_score_loss=max_score_loss, **options)
        )
        return chosen or Choice(tuple(range(min(k, len(candidates)))))
