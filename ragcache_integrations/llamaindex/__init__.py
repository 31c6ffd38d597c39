"""LlamaIndex integration: LLM, vector store, retriever, query engine, and cache events.

::

    engine = Engine.launch("my-model")
    retriever = RAGCacheRetriever(DocumentStore.open("docs.ragcache"), engine)
    query_engine = RAGCacheQueryEngine(retriever, RAGCacheLLM(engine))
    response = query_engine.query("Who founded Nalna?")
    print(response, response.metadata["ragcache"]["pipeline"])

The engine answers from a search's candidates while the search runs. The last line prints the overlapped time.
"""

from typing import TYPE_CHECKING

from ragcache_core._lazy import exported_lazily
from ragcache_integrations._installed import check_installed

check_installed("llamaindex", "llama_index.core", "llama_index.llms.openai_like")

if TYPE_CHECKING:
    from ragcache_core.answers import AnswerCache
    from ragcache_core.client.stats.cache_summary import CacheSummary, DocumentHits
    from ragcache_integrations.llamaindex.events import (
        CachedAnswerEvent,
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
    from ragcache_integrations.llamaindex.vector_store import StagedFAISSVectorStore, TfidfSvdEmbedding
else:
    __getattr__, __dir__ = exported_lazily(
        globals(),
        {
            "ragcache_core.answers": ("AnswerCache",),
            "ragcache_core.client.stats.cache_summary": ("CacheSummary", "DocumentHits"),
            "ragcache_integrations.llamaindex.events": (
                "CacheStatsEvent",
                "CacheStatsEventHandler",
                "CachedAnswerEvent",
                "RetrievalStageEvent",
                "SpeculationEvent",
                "TraceEventHandler",
            ),
            "ragcache_integrations.llamaindex.llm": ("RAGCacheLLM",),
            "ragcache_integrations.llamaindex.nodes": ("document_from_node", "node_from_document"),
            "ragcache_integrations.llamaindex.query_engine": ("RAGCacheQueryEngine",),
            "ragcache_integrations.llamaindex.retriever": ("RAGCacheRetriever",),
            "ragcache_integrations.llamaindex.vector_store": ("StagedFAISSVectorStore", "TfidfSvdEmbedding"),
        },
    )

__all__ = [
    "AnswerCache",
    "CacheStatsEvent",
    "CacheStatsEventHandler",
    "CacheSummary",
    "CachedAnswerEvent",
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
