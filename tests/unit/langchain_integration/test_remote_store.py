"""A store that is served elsewhere, wherever LangChain's side takes a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import ConfigError, SearchError, StoreError, StoreUnreachableError
from ragcache_core.retrieval import DocumentStore, RemoteStore, StoreService
from ragcache_core.types import Document
from ragcache_integrations.langchain import RAGCacheRetriever, StagedFAISS

TEXTS = ["The sun is a star.", "The moon is a moon.", "Mars is a red planet.", "A star shines in the night."]
QUESTION = "Which star shines?"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store", index="flat") as store:
        store.add(Document("abcd"[i], text, {"n": i}) for i, text in enumerate(TEXTS))
        yield store


@pytest.fixture
def remote(local: DocumentStore) -> Iterator[RemoteStore]:
    with StoreService(local) as service, RemoteStore(service.url) as store:
        yield store


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"filter": {"n": {"$gte": 1}}},
        {"search_type": "mmr", "search_kwargs": {"fetch_k": 4, "lambda_mult": 0.2}},
        {"search_type": "similarity_score_threshold", "search_kwargs": {"score_threshold": 0.4}},
        {"k": 99},
        {"search_kwargs": {"k": 0}},
    ],
    ids=["all", "filter", "mmr", "threshold", "more-than-there-are", "none"],
)
async def test_a_retriever_returns_what_it_returns_of_the_store_itself(
    local: DocumentStore, remote: RemoteStore, settings: dict[str, Any]
) -> None:
    here = RAGCacheRetriever(store=local, **{"k": 3, **settings})
    there = RAGCacheRetriever(store=remote, **{"k": 3, **settings})
    assert there.invoke(QUESTION) == here.invoke(QUESTION)
    assert await there.ainvoke(QUESTION) == await here.ainvoke(QUESTION)


def test_a_vector_store_over_a_service_reads_and_does_not_change(local: DocumentStore, remote: RemoteStore) -> None:
    here, there = StagedFAISS(local), StagedFAISS(remote)
    assert there.similarity_search_with_score(QUESTION, 3) == here.similarity_search_with_score(QUESTION, 3)
    assert there.get_by_ids(["b", "x", "a"]) == here.get_by_ids(["b", "x", "a"])
    assert there.embeddings.embed_query(QUESTION) == here.embeddings.embed_query(QUESTION)
    assert there.as_retriever(search_type="mmr").invoke(QUESTION) == here.as_retriever(search_type="mmr").invoke(
        QUESTION
    )
    assert RAGCacheRetriever(store=there).invoke(QUESTION) == RAGCacheRetriever(store=here).invoke(QUESTION)
    for change in (lambda: there.add_texts(["new"]), lambda: there.delete(["a"])):
        with pytest.raises(StoreError, match="is only read"):
            change()


def test_what_cannot_be_asked_of_a_service_is_refused(remote: RemoteStore) -> None:
    with pytest.raises(ConfigError, match="the filter is a function"):
        RAGCacheRetriever(store=remote, filter=lambda metadata: True).invoke(QUESTION)
    with pytest.raises(SearchError, match="no document has this field; the fields are n"):
        RAGCacheRetriever(store=remote, filter={"colour": "red"}).invoke(QUESTION)


def test_a_service_that_is_gone_fails_the_search_as_a_store_would(local: DocumentStore) -> None:
    with StoreService(local) as service:
        remote = RemoteStore(service.url)
    with remote:
        retriever = RAGCacheRetriever(store=remote)
        with pytest.raises(StoreUnreachableError, match="no service of a store answers"):
            retriever.invoke(QUESTION)
        with pytest.raises(StoreUnreachableError, match="no service of a store answers"):
            asyncio.run(retriever.ainvoke(QUESTION))
