"""Staged retrieval: documents in a folder, searched by meaning, with a guess after every stage of the search."""

from ragcache_core.retrieval.adapters import LangChainEmbedder, LlamaIndexEmbedder, MiniLMEmbedder
from ragcache_core.retrieval.base import IndexOptions
from ragcache_core.retrieval.embed import Embedder, PrecomputedEmbedder, TrainableEmbedder, as_embedder
from ragcache_core.retrieval.shards import ShardedStore
from ragcache_core.retrieval.snapshot import StoreStats
from ragcache_core.retrieval.sources import StageSource, as_source, one_stage
from ragcache_core.retrieval.store import DocumentStore
from ragcache_core.retrieval.tfidf import TfidfSvdEmbedder

__all__ = [
    "DocumentStore",
    "Embedder",
    "IndexOptions",
    "LangChainEmbedder",
    "LlamaIndexEmbedder",
    "MiniLMEmbedder",
    "PrecomputedEmbedder",
    "ShardedStore",
    "StageSource",
    "StoreStats",
    "TfidfSvdEmbedder",
    "TrainableEmbedder",
    "as_embedder",
    "as_source",
    "one_stage",
]
