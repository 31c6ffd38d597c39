"""Chunk reuse (Cache-Craft) as pure decisions, without I/O."""

from ragcache_core.chunk.calibration import AlphaPoint, choose_alpha
from ragcache_core.chunk.focus import FocusedChunks
from ragcache_core.chunk.preload import preload_depth
from ragcache_core.chunk.recompute import plan_reuse
from ragcache_core.chunk.selection import SELECTIONS, SelectableChunk, TokenSelection, make_selection
from ragcache_core.chunk.types import (
    ChunkKey,
    ChunkSpan,
    ChunkStatistics,
    ChunkVariant,
    ContextKey,
    PlannedChunk,
    ReusePlan,
    chunk_key,
    chunk_spans,
)
from ragcache_core.chunk.variants import VariantTable

__all__ = [
    "SELECTIONS",
    "AlphaPoint",
    "ChunkKey",
    "ChunkSpan",
    "ChunkStatistics",
    "ChunkVariant",
    "ContextKey",
    "FocusedChunks",
    "PlannedChunk",
    "ReusePlan",
    "SelectableChunk",
    "TokenSelection",
    "VariantTable",
    "choose_alpha",
    "chunk_key",
    "chunk_spans",
    "make_selection",
    "plan_reuse",
    "preload_depth",
]
