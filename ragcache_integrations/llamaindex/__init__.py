"""RAGCache at LlamaIndex's door: an LLM, a vector store, a retriever, a query engine, and events about the cache.

::

    engine = Engine.launch("my-model")
    retriever = RAGCacheRetriever(DocumentStore.open("docs.ragcache"), engine)
    query_engine = RAGCacheQueryEngine(retriever, RAGCacheLLM(engine))
    response = query_engine.query("Who founded Nalna?")
    print(response, response.metadata["ragcache"], response.metadata["ragcache_pipeline"])

The engine answers from a search's candidates while it goes on; the last line says how much of it was hidden.
"""

from ragcache_core.errors import ConfigError

try:
    import llama_index.core as _llama_index_core  # noqa: F401
    import llama_index.llms.openai_like as _openai_like  # type: ignore[import-untyped]  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        f'{error.name} is not installed, ragcache_integrations.llamaindex needs it: pip install "ragcache[llamaindex]"'
    ) from error

from ragcache_core.client.stats.cache_summary import CacheSummary, DocumentHits
from ragcache_integrations.llamaindex.embedding import TfidfSvdEmbedding
from ragcache_integrations.llamaindex.events import (
    CacheStatsEvent,
    CacheStatsEventHandler,
    RetrievalStageEvent,
    SpeculationEvent,
    TraceEventHandler,
)
from ragcache_integrations.llamaindex.llm import RAGCacheLLM
from ragcache_integrations.llamaindex.nodes import document_from_node, node_from_document
from ragcache_integrations.llamaindex.query_engine import RAGCacheQueryEngine
from ragcache_integrations.llamaindex.retriever import RAGCacheRetriever
from ragcache_integrations.llamaindex.vector_store import StagedFAISSVectorStore

__all__ = [
    "CacheStatsEvent",
    "CacheStatsEventHandler",
    "CacheSummary",
    "DocumentHits",
    "RAGCacheLLM",
    "RAGCacheQueryEngine",
    "RAGCacheRetriever",
    "RetrievalStageEvent",
    "SpeculationEvent",
    "StagedFAISSVectorStore",
    "TfidfSvdEmbedding",
    "TraceEventHandler",
    "document_from_node",
    "node_from_document",
]
