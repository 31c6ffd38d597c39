"""Choose a prompt's documents, of nearly equal ones, and their order from the engine's cached prefixes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragcache_core.client.ordering.cached_prefixes import CachedPrefixIndex
from ragcache_core.client.pipeline.result import similarities
from ragcache_core.client.pipeline.stages import check_stage, check_updates, close_stages, cut_stage
from ragcache_core.ordering import DocumentOrder, arrange
from ragcache_core.swaps import Choice, prefer_cached
from ragcache_core.types import DocId, Document, RetrievalUpdate

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric


_NUM_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Documents in prompt order; ``is_reordered``: whether it differs from the retrieval order."""

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
    """Recent document orders that differ from retrieval order, bounded and thread-safe, for counting."""

    def __init__(self, capacity: int = _NUM_REMEMBERED) -> None:
        self._capacity = capacity
        self._orders: OrderedDict[tuple[DocId, ...], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, documents: tuple[DocId, ...]) -> None:
        """Record an order that differs from retrieval order."""
        with self._lock:
            self._orders[documents] = None
            self._orders.move_to_end(documents)
            while len(self._orders) > self._capacity:
                self._orders.popitem(last=False)

    def discard(self, documents: tuple[DocId, ...]) -> None:
        """Remove an order, as the search returned it this time."""
        with self._lock:
            self._orders.pop(documents, None)

    def __contains__(self, documents: object) -> bool:
        with self._lock:
            return documents in self._orders


class OrderingClient:
    """Orders documents for one engine's prompts."""

    def __init__(self, cached: CachedPrefixIndex, reordered: RememberedOrders) -> None:
        """Take ``cached``, the engine's cached prefixes, and ``reordered``, which records changed orders."""
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
        """Update the cached prefixes now, and return whether the engine answered in time. For measurements."""
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
        """Do :func:`~ragcache_core.swaps.prefer_cached` by its cached prefixes; if unknown, choose the best."""
        options: dict[str, Any] = {"order": order, "keep_first": keep_first, "prefix": prefix}
        chosen = self._cached.look(
            lambda engines: prefer_cached(candidates, scores, k, engines, max_score_loss=max_score_loss, **options)
        )
        return chosen or Choice(tuple(range(min(k, len(candidates)))))


@dataclass(frozen=True, slots=True)
class Swapping:
    """Settings of score-tolerant substitution; see :func:`~ragcache_core.swaps.prefer_cached`.

    ``metric`` is that of the scores; ``prefix_of`` returns the static prefix of these documents' prompt.
    """

    ordering: OrderingClient
    max_score_loss: float
    order: DocumentOrder
    keep_first: bool
    metric: Metric | None
    prefix_of: Callable[[Sequence[Document]], bytes | None]

    async def stages(self, updates: AsyncIterator[RetrievalUpdate], k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates`` reduced to ``k`` documents each; they name more.

        The choice for equal candidates stays the same during a search, although speculation changes the cache.
        """
        chosen: dict[tuple[DocId, ...], Choice] = {}
        try:
            check_updates(updates)
            async for update in updates:
                check_stage(update)
                update = cut_stage(update, None)
                ids = tuple(document.doc_id for document in update.documents)
                if ids not in chosen:
                    chosen[ids] = self._choose(update, ids, k)
                yield _with(update, chosen[ids])
        finally:
            await close_stages(updates)

    def _choose(self, update: RetrievalUpdate, ids: Sequence[DocId], k: int) -> Choice:
        scores = similarities([float(score) for score in update.scores], self.metric)
        if len(scores) < len(ids):
            return Choice(tuple(range(min(k, len(ids)))))
        return self.ordering.prefer_cached(
            ids,
            scores,
            k,
            max_score_loss=self.max_score_loss,
            order=self.order,
            keep_first=self.keep_first,
            prefix=self.prefix_of(update.documents),
        )


def _with(update: RetrievalUpdate, choice: Choice) -> RetrievalUpdate:
    return replace(
        update,
        documents=tuple(update.documents[i] for i in choice.places),
        scores=tuple(update.scores[i] for i in choice.places if i < len(update.scores)),
        swaps=choice.swaps,
    )
