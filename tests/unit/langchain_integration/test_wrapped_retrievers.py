"""LangChain's retrievers around ours and around those of others: what they return is known in the final prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.stores import InMemoryStore

from ragcache_core.client import Engine
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    StagedFAISS,
    TfidfSvdEmbeddings,
    format_documents,
    prompt_from_layout,
)
from tests.support.moons import QUESTION, TEXTS
from tests.support.scripted_server import ScriptedServer

classic = pytest.importorskip("langchain_classic.retrievers", reason="LangChain's older retrievers are a package apart")

pytestmark = pytest.mark.usefixtures("idle")

REWORDED = FakeListLLM(responses=["Where are seas of methane?\nWhich moon is orange?"])


@pytest.fixture
def store() -> Iterator[StagedFAISS]:
    documents = [Document(id=doc_id, page_content=text) for doc_id, text in TEXTS.items()]
    with StagedFAISS.from_documents(documents, TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8)) as store:
        yield store


@pytest.fixture(params=["ours", "others"])
def inner(request: pytest.FixtureRequest, store: StagedFAISS, engine: Engine) -> BaseRetriever:
    if request.param == "ours":
        return RAGCacheRetriever(store=store, engine=engine, k=2)
    return store.as_retriever(search_kwargs={"k": 2})


class Last(BaseDocumentCompressor):
    """Keeps the document that was found last."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> Sequence[Document]:
        return documents[-1:]


def parents(store: StagedFAISS, search: BaseRetriever) -> BaseRetriever:
    """Returns whole documents and searches their parts: those that another search finds."""
    whole: InMemoryStore = InMemoryStore()
    whole.mset([(doc_id, Document(id=f"{doc_id}-whole", page_content=f"{t} {t}")) for doc_id, t in TEXTS.items()])
    parts = StagedFAISS.from_documents(
        [Document(id=f"{i}#0", page_content=text, metadata={"doc_id": i}) for i, text in TEXTS.items()],
        TfidfSvdEmbeddings(list(TEXTS.values()), dimension=8),
    )
    return classic.MultiVectorRetriever(vectorstore=parts, docstore=whole, search_kwargs={"k": 2})


WRAPPERS: dict[str, Callable[[StagedFAISS, BaseRetriever], BaseRetriever]] = {
    "ContextualCompressionRetriever": lambda _, inner: classic.ContextualCompressionRetriever(
        base_compressor=Last(), base_retriever=inner
    ),
    "EnsembleRetriever": lambda store, inner: classic.EnsembleRetriever(
        retrievers=[inner, store.as_retriever(search_kwargs={"k": 3})], weights=[0.5, 0.5]
    ),
    "MultiQueryRetriever": lambda _, inner: classic.MultiQueryRetriever.from_llm(
        inner, REWORDED, include_original=True
    ),
    "MultiVectorRetriever": parents,
}


def named(answer: Any) -> list[str]:
    return [d["doc_id"] for d in answer.response_metadata["ragcache"]["documents"]]


@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_what_a_retriever_around_another_returns_is_known_in_the_prompt(
    wrapper: str,
    inner: BaseRetriever,
    store: StagedFAISS,
    engine: Engine,
    server: ScriptedServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    retriever = WRAPPERS[wrapper](store, inner)
    search = {"context": retriever | format_documents, "question": RunnablePassthrough()}
    chain = search | prompt_from_layout() | ChatRAGCache(engine=engine)
    with caplog.at_level(logging.WARNING, "ragcache"):
        answers = [chain.invoke(QUESTION), await chain.ainvoke(QUESTION)]
    found = [d.id for d in retriever.invoke(QUESTION)]
    assert [named(answer) for answer in answers] == [found] * 2
    assert len(found) == (1 if wrapper == "ContextualCompressionRetriever" else len(set(found)))
    last = [r for r in server.requests if r.path == "/v1/chat/completions"][-1]
    assert [d["id"] for d in last.documents] == found
    cached = [d["num_cached_tokens"] for d in answers[1].response_metadata["ragcache"]["documents"]]
    assert sum(cached) > 0
    assert caplog.messages == []


@pytest.mark.parametrize("include_original", [True, False])
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "MultiVectorRetriever"])
def test_a_prompt_of_a_retriever_around_ours_teaches_its_layout(
    wrapper: str, include_original: bool, store: StagedFAISS, engine: Engine
) -> None:
    retriever = WRAPPERS[wrapper](store, RAGCacheRetriever(store=store, engine=engine, k=2))
    if isinstance(retriever, classic.MultiQueryRetriever):
        retriever.include_original = include_original
    search = {"context": retriever | format_documents, "question": RunnablePassthrough()}
    (search | prompt_from_layout() | ChatRAGCache(engine=engine)).invoke(QUESTION)
    learned = engine.integration.prompts.bound_prompt
    assert learned is not None
    assert not learned.is_question_first
