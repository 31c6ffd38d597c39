"""A semantic cache of answers before a real engine: what it gives again asks nothing, and what is forgotten is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnablePassthrough

from ragcache_core import Document, DocumentStore
from ragcache_core.answers import AnswerCache
from ragcache_core.client import Engine
from ragcache_integrations import langchain, llamaindex

QUESTION = "Where does the lighthouse keeper of Zor live?"
NEAR = "where does the lighthouse keeper of zor live"
ZOR = Document("kept-zor", "Zor has a lighthouse. Its keeper lives in a white house of stone near the harbour. " * 3)
MEL = Document("kept-mel", "Mel is a village of fishers without any lighthouse, far up the river of Oru. " * 3)


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store") as store:
        store.add([ZOR, MEL])
        store.bind(engine)
        yield store


class LangChain:
    """A chain over a chat model with a cache of answers; its search, which runs first, sends nothing ahead."""

    def __init__(self, engine: Engine, store: DocumentStore) -> None:
        self.answers: Any = langchain.SemanticAnswerCache()
        retriever = langchain.RAGCacheRetriever(store=store, engine=engine, k=1, speculate=False)
        search = retriever | langchain.format_documents
        llm = langchain.ChatRAGCache(engine=engine, cache=self.answers, temperature=0, max_tokens=8)
        asking = {"context": search, "question": RunnablePassthrough()}
        self._chain = asking | langchain.prompt_from_layout() | llm

    def ask(self, question: str) -> tuple[str, bool]:
        """Return an answer, and whether it was kept."""
        answer = self._chain.invoke(question)
        return answer.text, "answer_cache" in answer.response_metadata["ragcache"]


class LlamaIndex:
    """A query engine over an LLM with a cache of answers."""

    def __init__(self, engine: Engine, store: DocumentStore) -> None:
        self.answers: Any = AnswerCache()
        llm = llamaindex.RAGCacheLLM(engine, answer_cache=self.answers, temperature=0, max_tokens=8)
        self._asking = llamaindex.RAGCacheQueryEngine(
            llamaindex.RAGCacheRetriever(store, engine, similarity_top_k=1, speculate=False), llm
        )

    def ask(self, question: str) -> tuple[str, bool]:
        """Return an answer, and whether it was kept."""
        response = self._asking.query(question)
        assert response.metadata is not None
        return str(response), "answer_cache" in response.metadata["ragcache"]


def num_requests(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_requests + stats.num_speculative_requests


@pytest.mark.parametrize("framework", [LangChain, LlamaIndex])
def test_a_near_question_sends_no_request_until_its_document_changes_or_is_forgotten(
    framework: type[LangChain | LlamaIndex], engine: Engine, store: DocumentStore
) -> None:
    asking = framework(engine, store)
    said, is_kept = asking.ask(QUESTION)
    assert said
    assert not is_kept
    before = num_requests(engine)
    assert asking.ask(NEAR) == (said, True)
    assert num_requests(engine) == before

    store.replace(Document(ZOR.doc_id, ZOR.text.replace("white", "black")))
    assert len(asking.answers) == 0
    assert not asking.ask(NEAR)[1]
    assert num_requests(engine) > before

    before = num_requests(engine)
    engine.forget([MEL.doc_id])  # nothing stands on it
    assert asking.ask(NEAR)[1]
    assert num_requests(engine) == before
    engine.forget([ZOR.doc_id])
    assert len(asking.answers) == 0
    assert not asking.ask(NEAR)[1]
