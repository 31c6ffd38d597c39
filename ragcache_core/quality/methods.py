"""Methods of answering: full recompute, prefix caching, chunk reuse, document orders, substitution, compression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ByteSize

from ragcache_core.config import CacheConfig, ChunkReuse, CompressionName
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder
from ragcache_core.types import SelectionName


@dataclass(frozen=True, slots=True)
class Method:
    """The settings of an engine that answers the questions.

    Attributes:
        chunks: chunk reuse; ``None`` for exact answers, by plain vLLM unless the method uses RAGCache's cache index.
        caches_prefixes: plain vLLM keeps prefixes.
        encodes_independently: each document is computed alone before the first question, and reused from there.
        refers: the questions are turns of conversations, which refer to an earlier document, or show it again
            (False); ``None`` for separate prompts.
        document_order: the order of documents in a prompt.
        max_score_loss: the bound of score-tolerant substitution.
        compression: documents' KV comes from disk, where an earlier engine stored it in this way.
    """

    name: str
    chunks: ChunkReuse | None = None
    caches_prefixes: bool = True
    encodes_independently: bool = False
    refers: bool | None = None
    document_order: DocumentOrder = "retrieval"
    max_score_loss: float | None = None
    compression: CompressionName | None = None

    @property
    def uses_cache(self) -> bool:
        """Whether the prompts depend on the cached documents."""
        return self.document_order == "cache_aware" or self.max_score_loss is not None

    def cache(self, sizes: CacheConfig) -> CacheConfig | None:
        """Return the cache configuration: ``sizes`` with the method's reuse; ``None`` for plain vLLM."""
        if self.compression is None:
            sizes = sizes.model_copy(update={"disk_bytes": ByteSize(0)})
            if self.chunks is None and not self.uses_cache:
                return None
        return sizes.model_copy(update={"chunk_reuse": self.chunks, "compression": self.compression or "auto"})


FULL = Method("full recompute", caches_prefixes=False)
PREFIX = Method("prefix caching")
SHOWN_AGAIN = Method("shown again", refers=False)
REFERRED_TO = Method("referred to", refers=True)
NAIVE = Method("naive reuse", ChunkReuse(selection="cache_craft", alpha=0.0), encodes_independently=True)
"""Documents computed alone, with only positions corrected: the cheapest baseline."""


def chunk_methods(selection: SelectionName, alphas: Iterable[float], max_recompute: float = 1.0) -> list[Method]:
    """Return a method for each alpha, ascending."""
    return [
        Method(
            f"{selection} {alpha:g}", ChunkReuse(selection=selection, alpha=float(alpha), max_recompute=max_recompute)
        )
        for alpha in sorted(set(alphas))
    ]


def compression_methods(names: Iterable[CompressionName]) -> list[Method]:
    """Return a method for each compression of the disk tier, without duplicates."""
    return [Method(f"disk, {name}", compression=name) for name in dict.fromkeys(names)]


def order_methods(orders: Iterable[DocumentOrder], max_score_loss: float | None) -> list[Method]:
    """Return a method for each order, one for score-tolerant substitution, and one for both."""
    orders = [order for order in DOCUMENT_ORDERS if order in set(orders) - {"retrieval"}]
    methods = [Method(order, document_order=order) for order in orders]
    if max_score_loss is not None:
        name = f"score loss {max_score_loss:g}"
        methods.append(Method(name, max_score_loss=max_score_loss))
        if "cache_aware" in orders:
            methods.append(Method(f"cache_aware, {name}", document_order="cache_aware", max_score_loss=max_score_loss))
    return methods
