"""Staged retrieval: a store of documents in a folder, searched by meaning, which yields candidates after each stage."""

from ragcache_core.retrieval.base import IndexOptions
from ragcache_core.retrieval.embedders.base import (
    Embedder,
    LangChainEmbedder,
    LlamaIndexEmbedder,
    MiniLMEmbedder,
    PrecomputedEmbedder,
    TrainableEmbedder,
    as_embedder,
)
from ragcache_core.retrieval.embedders.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.remote.growing import GrowingEffort
from ragcache_core.retrieval.remote.lancedb import lancedb_stages
from ragcache_core.retrieval.remote.pgvector import pgvector_stages
from ragcache_core.retrieval.remote.qdrant import qdrant_stages
from ragcache_core.retrieval.search import MMR
from ragcache_core.retrieval.sources import StageSource, as_source, one_stage
from ragcache_core.retrieval.storage.snapshot import StoreStats
from ragcache_core.retrieval.store import DocumentStore

__all__ = [
    "MMR",
    "DocumentStore",
    "Embedder",
    "GrowingEffort",
    "IndexOptions",
    "LangChainEmbedder",
    "LlamaIndexEmbedder",
    "MiniLMEmbedder",
    "PrecomputedEmbedder",
    "StageSource",
    "StoreStats",
    "TfidfSvdEmbedder",
    "TrainableEmbedder",
    "as_embedder",
    "as_source",
    "lancedb_stages",
    "one_stage",
    "pgvector_stages",
    "qdrant_stages",
]
