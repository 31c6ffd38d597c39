"""The cached versions of chunks: one per context, a limited number per chunk, the least reusable replaced first."""

from __future__ import annotations

from collections.abc import Callable

from ragcache_core.chunk.types import ChunkKey, ChunkStatistics, ChunkVariant, ContextKey
from ragcache_core.errors import ConfigError


class VariantTable:
    """The cached versions and their reuse frequencies f_r (Cache-Craft §3.3), without KV.

    A chunk has at most ``max_variants`` of them, which bounds those that a plan searches. A use of a variant adds
    ``1 / CFO`` to its f_r; of a chunk's variants the one with the lowest f_r is replaced first, the older of equals.

    The caller makes space before it adds::

        if table.captured_in(key, context) is None:
            while table.is_full(key): remove(table.victim(key, is_evictable))
            table.add(key, num_tokens, statistics)

    Raises:
        ConfigError: ``max_variants`` is below 1.
    """

    def __init__(self, max_variants: int) -> None:
        if max_variants < 1:
            raise ConfigError(f"max_variants is {max_variants!r}; it must be 1 or more")
        self._max_variants = max_variants
        self._variants: dict[ChunkKey, dict[int, ChunkVariant]] = {}
        self._reuse: dict[int, float] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._reuse)

    def __contains__(self, variant: ChunkVariant) -> bool:
        return variant.number in self._variants.get(variant.key, {})

    def variants(self, key: ChunkKey) -> tuple[ChunkVariant, ...]:
        """Return the versions of a chunk, the oldest first."""
        return tuple(self._variants.get(key, {}).values())

    def captured_in(self, key: ChunkKey, context: ContextKey) -> ChunkVariant | None:
        """Return the version captured in exactly this context; ``None`` if there is none."""
        known = self._variants.get(key, {}).values()
        return next((variant for variant in known if variant.statistics.context == context), None)

    def reuse(self, variant: ChunkVariant) -> float:
        """Return f_r of a stored version."""
        return self._reuse[variant.number]

    def is_full(self, key: ChunkKey) -> bool:
        """Return whether a version must be removed before another one of ``key`` is added."""
        return len(self._variants.get(key, {})) >= self._max_variants

    def victim(
        self, key: ChunkKey, is_evictable: Callable[[ChunkVariant], bool] = lambda _: True
    ) -> ChunkVariant | None:
        """Return the evictable version of a chunk with the lowest f_r, without removing it; ``None`` if none is."""
        own = [variant for variant in self._variants.get(key, {}).values() if is_evictable(variant)]
        return min(own, key=lambda variant: (self._reuse[variant.number], variant.number), default=None)

    def add(self, key: ChunkKey, num_tokens: int, statistics: ChunkStatistics) -> ChunkVariant:
        """Return the new version of a chunk, with f_r 0 and an unused number.

        Raises:
            ValueError: the table is full for that chunk, or has this variant already.
        """
        variant = ChunkVariant(key, self._next_number, num_tokens, statistics)
        self.restore(variant, reuse=0.0)
        return variant

    def restore(self, variant: ChunkVariant, *, reuse: float) -> None:
        """Restore a version of an earlier table with its f_r.

        Raises:
            ValueError: the table is full for its chunk, has this variant already, or its number is another's.
        """
        if self.is_full(variant.key):
            raise ValueError(f"{self._max_variants} variants of this chunk are kept: evict first")
        known = self.captured_in(variant.key, variant.statistics.context)
        if known is not None or variant.number in self._reuse:
            raise ValueError(f"variant {variant.number} of chunk {variant.key.hex()[:12]} is kept already")
        self._variants.setdefault(variant.key, {})[variant.number] = variant
        self.retire(variant.number)
        self._reuse[variant.number] = reuse

    def retire(self, number: int) -> None:
        """Never use a number again."""
        self._next_number = max(self._next_number, number + 1)

    def remove(self, variant: ChunkVariant) -> None:
        """Remove a version, if it is stored."""
        if variant in self:
            del self._reuse[variant.number]
            of_chunk = self._variants[variant.key]
            del of_chunk[variant.number]
            if not of_chunk:
                del self._variants[variant.key]

    def record_use(self, variant: ChunkVariant, overhead: float) -> None:
        """Count a use with that CFO: ``f_r += 1 / CFO``. Ignores a version that is not stored.

        A use that recomputed nothing counts as if it had been one token: 1 / CFO has no bound there.
        """
        if variant in self:
            self._reuse[variant.number] += 1.0 / max(overhead, 1.0 / variant.num_tokens)
