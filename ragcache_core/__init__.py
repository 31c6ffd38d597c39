"""RAGCache: keep the key-value tensors of documents, and serve retrieval-augmented generation from them.

The public names of the core; framework integrations are in :mod:`ragcache_integrations`.
"""

from ragcache_core._version import __version__
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.prompt import PromptLayout, RenderedPrompt
from ragcache_core.stats import (
    ChunkReuseStats,
    ChunkStats,
    DocumentStats,
    DocumentUse,
    EngineStats,
    RequestStats,
    TierStats,
)
from ragcache_core.types import Document, PromptSegment, RetrievalUpdate, SegmentKind

__all__ = [
    "CacheConfig",
    "ChunkReuse",
    "ChunkReuseStats",
    "ChunkStats",
    "Document",
    "DocumentStats",
    "DocumentUse",
    "EngineStats",
    "PromptLayout",
    "PromptSegment",
    "RenderedPrompt",
    "RequestStats",
    "RetrievalUpdate",
    "SegmentKind",
    "TierStats",
    "__version__",
]
