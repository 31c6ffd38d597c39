"""Copies of LlamaIndex's objects, errors of the OpenAI SDK's types, and several answers of one request."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_integrations.llamaindex import (
    CacheStatsEventHandler,
    RAGCacheLLM,
    RAGCacheQueryEngine,
    RAGCacheRetriever,
    StagedFAISSVectorStore,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import ScriptedSource
from tests.unit.llamaindex_integration.ways import MESSAGES, QUESTION, STREAMED, Ask


def test_an_llm_is_made_again_from_what_it_says_of_itself(llm: RAGCacheLLM, scripted: Engine) -> None:
    described = llm.to_dict()
    again = RAGCacheLLM.from_dict(described, engine=scripted)
    assert again.engine is scripted
    assert again.to_dict() == described
    joined = RAGCacheLLM.from_dict(described)
    assert joined.engine.base_url == scripted.base_url
    joined.close()


def test_shallow_copies_share_and_others_are_refused_by_name(llm: RAGCacheLLM, tmp_path: Path) -> None:
    retriever = RAGCacheRetriever(ScriptedSource([]), llm.engine)
    with StagedFAISSVectorStore(tmp_path / "store").client as store:
        objects: list[tuple[Any, str]] = [
            (llm, "RAGCacheLLM"),
            (retriever, "Engine"),
            (RAGCacheQueryEngine(retriever, llm), "Engine|RAGCacheLLM"),
            (StagedFAISSVectorStore(store), "StagedFAISSVectorStore"),
            (store, "DocumentStore"),
            (RAGCacheRetriever(store), "DocumentStore"),
            (CacheStatsEventHandler(), "CacheTally"),
        ]
        for each, name in objects:
            for duplicate in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"({name}) holds"):
                    duplicate(each)
    assert llm.model_copy(update={"temperature": 0.5}).engine is llm.engine
    assert copy.copy(llm).engine is llm.engine


@pytest.mark.parametrize("ask", STREAMED)
async def test_a_stream_of_several_answers_holds_the_first(ask: Ask, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    server.rules = [lambda _: Reply("one two three")]
    several = llm.model_copy(update={"additional_kwargs": {"n": 2}})
    assert (await ask(several))[0] == "one two three"
    assert "".join(part.delta or "" for part in several.stream_complete(QUESTION)) == "one two three"


@pytest.mark.parametrize("settings", [{"n": 2}, {"extra_body": {"n": 2}}])
async def test_several_answers_are_refused_where_one_text_is_returned(llm: RAGCacheLLM, settings: Any) -> None:
    of_llm = llm.model_copy(update={"additional_kwargs": settings})
    refused = "n is 2, but one text is returned"
    for each, of_call in ((llm, settings), (of_llm, {})):
        with pytest.raises(ConfigError, match=refused):
            each.chat(MESSAGES, **of_call)
        with pytest.raises(ConfigError, match=refused):
            await each.achat(MESSAGES, **of_call)
        with pytest.raises(ConfigError, match=refused):
            each.complete(QUESTION, **of_call)
        with pytest.raises(ConfigError, match=refused):
            await each.acomplete(QUESTION, **of_call)
