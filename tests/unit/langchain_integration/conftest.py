"""LangChain's parts on an engine that is a scripted server."""

from collections.abc import Callable
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout
from tests.support.scripted_source import ScriptedSource, Stage


@pytest.fixture
def llm(engine: Engine) -> ChatRAGCache:
    return ChatRAGCache(engine=engine)


@pytest.fixture
def make_rag(engine: Engine, llm: ChatRAGCache) -> Callable[..., SpeculativeRAG]:
    """Makes a SpeculativeRAG over a source of stages."""

    def made(*stages: Stage, is_endless: bool = False, **settings: Any) -> SpeculativeRAG:
        source = ScriptedSource(stages, is_endless)
        retriever = RAGCacheRetriever(store=source, engine=engine, k=2)
        return SpeculativeRAG(**{"retriever": retriever, "prompt": prompt_from_layout(), "llm": llm, **settings})

    return made


@pytest.fixture
def make(engine: Engine) -> Callable[..., RAGCacheRetriever]:
    """Makes a retriever over a source of stages."""

    def made(*stages: Stage, is_endless: bool = False, **settings: Any) -> RAGCacheRetriever:
        return RAGCacheRetriever(store=ScriptedSource(stages, is_endless), engine=engine, k=2, **settings)

    return made
