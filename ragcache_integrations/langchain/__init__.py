"""RAGCache at LangChain's door: a chat model, a vector store, a retriever, a chain that overlaps them, and callbacks.

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

from ragcache_core.errors import ConfigError

try:
    import langchain_core as _langchain_core  # noqa: F401
    import langchain_openai as _langchain_openai  # noqa: F401
except ModuleNotFoundError as error:
    raise ConfigError(
        f'{error.name} is not installed, ragcache_integrations.langchain needs it: pip install "ragcache[langchain]"'
    ) from error

from ragcache_core.client.stats.cache_summary import CacheSummary, DocumentHits
from ragcache_integrations.langchain.callbacks import CacheStatsCallbackHandler, TraceCallbackHandler
from ragcache_integrations.langchain.chain import format_documents, prompt_from_layout
from ragcache_integrations.langchain.chat_model import ChatRAGCache
from ragcache_integrations.langchain.documents import to_core, to_langchain
from ragcache_integrations.langchain.embeddings import TfidfSvdEmbeddings
from ragcache_integrations.langchain.retriever import RAGCacheRetriever
from ragcache_integrations.langchain.speculative_rag import SpeculativeRAG
from ragcache_integrations.langchain.vectorstore import StagedFAISS

__all__ = [
    "CacheStatsCallbackHandler",
    "CacheSummary",
    "ChatRAGCache",
    "DocumentHits",
    "RAGCacheRetriever",
    "SpeculativeRAG",
    "StagedFAISS",
    "TfidfSvdEmbeddings",
    "TraceCallbackHandler",
    "format_documents",
    "prompt_from_layout",
    "to_core",
    "to_langchain",
]
