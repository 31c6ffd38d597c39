"""In which order a prompt shows its documents: what a server's door offers to those who lay prompts out."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes
from ragcache_core.ordering import DocumentOrder, arrange
from ragcache_core.types import DocId, Document

_NUM_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Documents in the order to show them; ``is_reordered``: it is not the one that they were retrieved in."""

    documents: tuple[Document, ...]
    is_reordered: bool
    took_s: float


def in_order(
    door: OrderingClient | None,
    documents: Sequence[Document],
    order: DocumentOrder,
    *,
    keep_first: bool,
    prefix: bytes | None = None,
) -> Sequence[Document]:
    """Return documents as :meth:`OrderingClient.arrange_documents` does; ``cache_aware`` needs a door to go by."""
    if door is not None:
        return door.arrange_documents(documents, order, keep_first=keep_first, prefix=prefix).documents
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
    """The part of :class:`~ragcache_core.client.engine_client.EngineClient` that knows what the engine has cached."""

    _mirror: CachedPrefixes
    _reordered: RememberedOrders

    def arrange_documents(
        self,
        documents: Sequence[Document],
        order: DocumentOrder,
        *,
        keep_first: bool = False,
        prefix: bytes | None = None,
    ) -> Arrangement:
        """Return retrieved documents, the best first, in the order in which a prompt should show them.

        ``cache_aware`` answers from a local mirror of the engine's cache, which the first call begins to fill; until it
        is there, and whenever the connection is lost, the documents stay as they are. Never waits for the server.

        Args:
            documents: what was retrieved, the best first.
            order: ``retrieval``, ``canonical`` or ``cache_aware``.
            keep_first: the best document stays in front.
            prefix: :func:`~ragcache_core.ordering.static_prefix_digest` of the prompt; without it the prefixes that
                the engine has seen last are tried.

        Raises:
            ValueError: there is no such order.
        """
        began_s = time.perf_counter()
        ids = tuple(d.doc_id for d in documents)
        if order == "cache_aware":
            places = self._mirror.order(ids, prefix=prefix, keep_first=keep_first)
        else:
            places = arrange(ids, order, None, keep_first=keep_first)
        is_reordered = places is not None and places != tuple(range(len(ids)))
        if places is None or not is_reordered:
            self._reordered.discard(ids)
            return Arrangement(tuple(documents), False, time.perf_counter() - began_s)
        self._reordered.add(tuple(ids[i] for i in places))
        return Arrangement(tuple(documents[i] for i in places), True, time.perf_counter() - began_s)
