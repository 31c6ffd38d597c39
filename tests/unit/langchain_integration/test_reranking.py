"""A compressor as the last stage of a search: what goes into it is prefilled while it works, and that may not pay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnablePassthrough
from pydantic import ConfigDict

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, format_documents, prompt_from_layout
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("idle")


class Reranker(BaseDocumentCompressor):
    """Returns what ``choose`` makes of the documents, once ``once`` holds."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    choose: Callable[[list[Document]], Any]
    once: Callable[[], bool] = lambda: True

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Callbacks = None) -> Any:
        assert query == QUESTION
        until(self.once)
        return self.choose(list(documents))


def named(*doc_ids: str) -> Callable[[list[Document]], list[Document]]:
    return lambda documents: [next(d for d in documents if d.id == doc_id) for doc_id in doc_ids]


@pytest.fixture
def make(engine: Engine) -> Callable[..., RAGCacheRetriever]:
    """Makes a retriever that reranks three documents. One stage names all."""

    def made(choose: Any, once: Callable[[], bool] = lambda: True, **settings: Any) -> RAGCacheRetriever:
        source = ScriptedSource((Stage("moon sun mars"),))
        compressor = Reranker(choose=choose, once=once)
        return RAGCacheRetriever(store=source, engine=engine, k=2, num_candidates=3, compressor=compressor, **settings)

    return made


def chain_of(retriever: RAGCacheRetriever, engine: Engine) -> Any:
    engine.bind_prompt(prompt_from_layout(), format_documents)
    search = {"context": retriever | format_documents, "question": RunnablePassthrough()}
    return search | prompt_from_layout() | ChatRAGCache(engine=engine)


def test_a_reranker_that_always_reorders_stops_speculation_after_a_while(
    make: Any, engine: Engine, warmed: Any
) -> None:
    began: list[int] = []
    retriever = make(named("mars", "moon"), once=lambda: len(warmed()) > began[-1] or time.perf_counter() > until_s[-1])
    until_s: list[float] = []
    chain = chain_of(retriever, engine)
    for _ in range(30):
        began.append(len(warmed()))
        until_s.append(time.perf_counter() + 0.2)
        chain.invoke(QUESTION)
        if len(warmed()) == began[-1]:
            break
    assert 0 < len(warmed()) < 30


def test_documents_added_by_a_reranker_are_used_and_reported_once(
    make: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    summary = "All three of them are in the sky, and two of them go around something else."
    chain = chain_of(make(lambda documents: [Document(page_content=summary), documents[0]]), engine)
    with caplog.at_level(logging.WARNING, "ragcache"):
        answers = [chain.invoke(QUESTION) for _ in range(2)]
    assert summary in answers[0].content
    names = [d["doc_id"] for d in answers[0].response_metadata["ragcache"]["documents"]]
    assert names[0].startswith("text-")
    assert names[1] == "moon"
    (told,) = caplog.messages
    assert "the compressor Reranker returned 1 documents that it was not given" in told
