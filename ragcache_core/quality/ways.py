"""Ways to answer: all computed, prefixes cached, chunks reused, documents in another order, or nearly equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.types import SelectionName


@dataclass(frozen=True, slots=True)
class Way:
    """An engine to answer with. Without ``chunks`` it is exact; plain vLLM, unless something goes by what is cached.

    ``reads_alone``: every document is computed once by itself before the first question, and reused from there.
    ``refers``: the questions are turns of conversations, which refer to a document that they hold already, or show it
    again; None: each is a prompt of its own.
    Documents are shown in ``document_order``, and exchanged for nearly equal ones with a ``max_score_loss``.
    """

    name: str
    chunks: ChunkReuse | None = None
    caches_prefixes: bool = True
    reads_alone: bool = False
    refers: bool | None = None
    document_order: DocumentOrder = "retrieval"
    max_score_loss: float | None = None

    @property
    def goes_by_the_cache(self) -> bool:
        """Whether what is shown depends on what is cached."""
        return self.document_order == "cache_aware" or self.max_score_loss is not None

    def cache(self, sizes: CacheConfig) -> CacheConfig | None:
        """Return the cache to launch with: that of ``sizes`` with the way's reuse; None for plain vLLM."""
        is_plain = self.chunks is None and not self.goes_by_the_cache
        return None if is_plain else sizes.model_copy(update={"chunk_reuse": self.chunks})


FULL = Way("full recompute", caches_prefixes=False)
PREFIX = Way("prefix caching")
SHOWN_AGAIN = Way("shown again", refers=False)
REFERRED_TO = Way("referred to", refers=True)
NAIVE = Way("naive reuse", ChunkReuse(selection="cache_craft", alpha=0.0), reads_alone=True)
"""Documents computed alone, of whose KV only the positions are put right: what costs least, and what mending beats."""


def chunk_ways(selection: SelectionName, alphas: Iterable[float], max_recompute: float = 1.0) -> list[Way]:
    """Return a way for each alpha, ascending."""
    return [
        Way(f"{selection} {alpha:g}", ChunkReuse(selection=selection, alpha=float(alpha), max_recompute=max_recompute))
        for alpha in sorted(set(alphas))
    ]


def order_ways(orders: Iterable[DocumentOrder], max_score_loss: float | None) -> list[Way]:
    """Return a way for each order, one for nearly equal documents in the order of the search, and for both together."""
    orders = [order for order in DOCUMENT_ORDERS if order in set(orders) - {"retrieval"}]
    ways = [Way(order, document_order=order) for order in orders]
    if max_score_loss is not None:
        name = f"score loss {max_score_loss:g}"
        ways.append(Way(name, max_score_loss=max_score_loss))
        if "cache_aware" in orders:
            ways.append(Way(f"cache_aware, {name}", document_order="cache_aware", max_score_loss=max_score_loss))
    return ways
