"""Records of chunks and of their cached versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ragcache_core.chunk.types import ChunkKey, ChunkVariant, ContextKey
from ragcache_core.stats import ChunkReuseStats
from ragcache_core.types import Tier


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a chunk's KV, computed in ``context``; ``number`` is unique.

    ``documents`` are the chunk's and those before it, by their digests.
    """

    number: int
    key: ChunkKey
    num_tokens: int
    context: ContextKey
    pages: tuple[int, ...]
    request_id: str
    documents: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A version on disk without its pages: 32-bit token ids, and metadata.

    That is what it is worth, when it was computed, and its documents and those before it, see
    :func:`~ragcache_core.vllm_plugin.chunks.page_layout.digest_of`.
    """

    variant: ChunkVariant
    token_ids: bytes
    frequency: float
    worth: float
    documents: frozenset[str] = frozenset()
    stored_s: float = 0.0


@dataclass(slots=True)
class Variant:
    """A cached version of a chunk: its tiers and pins.

    ``pages`` are empty where it lies on disk alone. A doomed one is not found, and dropped when it is released.
    ``documents`` are digests of the chunk's documents and of those before it, ``stored_s`` when it was computed.
    """

    variant: ChunkVariant
    num_pages: int
    pages: tuple[int, ...] = ()
    num_pins: int = 0
    is_on_disk: bool = False
    is_loading: bool = False
    is_writing: bool = False
    is_doomed: bool = False
    documents: frozenset[str] = frozenset()
    stored_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request and no transfer uses it."""
        return not (self.num_pins or self.is_loading or self.is_writing)

    def is_in(self, tier: Tier) -> bool:
        """Return whether it takes space in a tier, or soon will."""
        return bool(self.pages) if tier is Tier.HOST else self.is_on_disk

    def num_idle_pages(self, tier: Tier) -> int:
        """Return the number of a tier's pages that its eviction frees."""
        return self.num_pages if self.is_idle and self.is_in(tier) else 0


@dataclass(slots=True)
class StoredVariants:
    """A chunk: 32-bit token ids, cached versions by number, and the contexts of present captures.

    ``names`` are digests of the documents that it is.
    """

    key: ChunkKey
    token_ids: bytes
    num_tokens: int
    stored: dict[int, Variant] = field(default_factory=dict)
    reserved: dict[int, ContextKey] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    @property
    def num_variants(self) -> int:
        """Number of versions that are stored or in flight."""
        return len(self.stored) + len(self.reserved)


@dataclass(frozen=True, slots=True)
class ForgottenChunks:
    """The deleted chunks of documents: documents with chunks, versions and pages."""

    keys: set[ChunkKey]
    documents: set[str]
    num_variants: int
    num_pages: int
    num_disk_pages: int


@dataclass(slots=True)
class ChunkCounters:
    """Counts of chunks since the engine started: reused by ``num_requests``, with their tokens.

    ``num_refused_requests`` asked for reuse that is unsupported, and were answered exactly.
    ``num_mismatched_chunks`` were requested with other tokens than stored, ``num_too_long_chunks`` are longer than the
    memory, ``num_capacity_misses`` found no free page because the rest was in use; ``num_dropped_chunks`` were not
    written to disk. Of those on disk ``num_corrupt_chunks`` were damaged or missing when they were read,
    ``num_lost_chunks`` were deleted for this or another reason.
    """

    num_requests: int = 0
    num_refused_requests: int = 0
    num_reused_chunks: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_tokens: int = 0
    num_captured_chunks: int = 0
    num_evicted_chunks: int = 0
    num_mismatched_chunks: int = 0
    num_too_long_chunks: int = 0
    num_capacity_misses: int = 0
    num_dropped_chunks: int = 0
    num_corrupt_chunks: int = 0
    num_lost_chunks: int = 0

    def count(self, reuse: ChunkReuseStats) -> None:
        """Count a request that reused chunks."""
        self.num_requests += 1
        self.num_reused_chunks += reuse.num_chunks
        self.num_reused_tokens += reuse.num_reused_tokens
        self.num_recomputed_tokens += reuse.num_recomputed_tokens
        self.num_prefix_tokens += reuse.num_prefix_tokens

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)
