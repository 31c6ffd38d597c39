"""LangChain integration: chat model, vector store, retriever, overlapped chain, and callbacks.

::

    engine = Engine.launch("my-model")
    store = StagedFAISS.from_documents(documents)
    chain = (
        {"context": RAGCacheRetriever(store=store, engine=engine) | format_documents, "question": RunnablePassthrough()}
        | prompt_from_layout()
        | ChatRAGCache(engine=engine)
        | StrOutputParser()
    )
    chain.invoke("Who founded Nalna?", {"callbacks": [CacheStatsCallbackHandler()]})

With ``engine.bind_prompt(prompt, format_documents)`` such a chain prefills while it searches; :class:`SpeculativeRAG`
also generates.
"""

from typing import TYPE_CHECKING

from ragcache_core._lazy import exported_lazily
from ragcache_integrations._installed import check_installed

check_installed("langchain", "langchain_core", "langchain_openai")

if TYPE_CHECKING:
    from ragcache_core.client.stats.cache_summary import CacheSummary, DocumentHits
    from ragcache_integrations.langchain.answers import SemanticAnswerCache
    from ragcache_integrations.langchain.callbacks import CacheStatsCallbackHandler, TraceCallbackHandler
    from ragcache_integrations.langchain.chat_model import ChatRAGCache
    from ragcache_integrations.langchain.documents import format_documents, prompt_from_layout, to_core, to_langchain
    from ragcache_integrations.langchain.retriever import RAGCacheRetriever
    from ragcache_integrations.langchain.speculative_rag import SpeculativeRAG
    from ragcache_integrations.langchain.vectorstore import StagedFAISS, TfidfSvdEmbeddings
else:
    __getattr__, __dir__ = exported_lazily(
        globals(),
        {
            "ragcache_core.client.stats.cache_summary": ("CacheSummary", "DocumentHits"),
            "ragcache_integrations.langchain.answers": ("SemanticAnswerCache",),
            "ragcache_integrations.langchain.callbacks": ("CacheStatsCallbackHandler", "TraceCallbackHandler"),
            "ragcache_integrations.langchain.chat_model": ("ChatRAGCache",),
            "ragcache_integrations.langchain.documents": (
                "format_documents",
                "prompt_from_layout",
                "to_core",
                "to_langchain",
            ),
            "ragcache_integrations.langchain.retriever": ("RAGCacheRetriever",),
            "ragcache_integrations.langchain.speculative_rag": ("SpeculativeRAG",),
            "ragcache_integrations.langchain.vectorstore": ("StagedFAISS", "TfidfSvdEmbeddings"),
        },
    )

__all__ = [
    "CacheStatsCallbackHandler",
    "CacheSummary",
    "ChatRAGCache",
    "DocumentHits",
    "RAGCacheRetriever",
    "SemanticAnswerCache",
    "SpeculativeRAG",
    "StagedFAISS",
    "TfidfSvdEmbeddings",
    "TraceCallbackHandler",
    "format_documents",
    "prompt_from_layout",
    "to_core",
    "to_langchain",
]
