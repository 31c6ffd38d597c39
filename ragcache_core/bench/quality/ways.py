"""Ways to answer: everything computed, prefixes cached, chunks reused as they are, or mended with various budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.types import SelectionName


@dataclass(frozen=True, slots=True)
class Way:
    """An engine to answer with. Without ``chunks`` it is plain vLLM, exact; ``caches_prefixes`` or nothing.

    ``reads_alone``: every document is computed once by itself before the first question, and reused from there.
    ``refers``: the questions are turns of conversations, which refer to a document that they hold already, or show it
    again; None: each is a prompt of its own.
    """

    name: str
    chunks: ChunkReuse | None = None
    caches_prefixes: bool = True
    reads_alone: bool = False
    refers: bool | None = None

    def cache(self, sizes: CacheConfig) -> CacheConfig | None:
        """Return the cache to launch with: that of ``sizes`` with the way's reuse; None for plain vLLM."""
        return None if self.chunks is None else sizes.model_copy(update={"chunk_reuse": self.chunks})


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
