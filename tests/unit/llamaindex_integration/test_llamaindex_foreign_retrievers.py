"""Retrievers of other makes, in query engines that nobody changed: their nodes are known, or a hint says how."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM, TfidfSvdEmbedding
from tests.unit.llamaindex_integration.conftest import EventLog

TEXTS = {
    "ganymede": "Ganymede is the largest moon of Jupiter, larger than the planet Mercury.",
    "titan": "Titan is a moon of Saturn with seas of methane and a thick orange sky.",
    "ceres": "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.",
}
QUESTION = "Which moon has seas of methane?"


@pytest.fixture(autouse=True)
def _nothing_retrieved() -> Iterator[None]:
    RETRIEVED.clear()
    yield
    RETRIEVED.clear()


@pytest.fixture
def index() -> VectorStoreIndex:
    """An index in LlamaIndex's own store, with metadata that prompts show."""
    return VectorStoreIndex.from_documents(
        [LlamaDocument(id_=name, text=text, metadata={"found": "long ago"}) for name, text in TEXTS.items()],
        embed_model=TfidfSvdEmbedding(list(TEXTS.values()), dimension=8),
    )


class Shouting(BaseNodePostprocessor):
    """Shows other text than was retrieved."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=n.node.get_content().upper() * 6)) for n in nodes]


async def test_nodes_of_any_retriever_are_known_to_the_llm(
    index: VectorStoreIndex, llm: RAGCacheLLM, event_log: EventLog
) -> None:
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=2)
    response = query_engine.query(QUESTION)
    await query_engine.aquery(QUESTION)
    found = {n.node.node_id for n in response.source_nodes}
    assert len(found) == 2
    requests = event_log.of(CacheStatsEvent)
    assert [{d.doc_id for d in request.documents} for request in requests] == [found] * 2
    assert all(d.num_tokens > 10 for request in requests for d in request.documents)


def test_where_nodes_cannot_be_known_one_hint_names_the_way(
    index: VectorStoreIndex, llm: RAGCacheLLM, event_log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    query_engine = index.as_query_engine(llm=llm, node_postprocessors=[Shouting()])
    with caplog.at_level(logging.WARNING, "ragcache_core"):
        for _ in range(6):
            query_engine.query(QUESTION)
    assert [request.documents for request in event_log.of(CacheStatsEvent)] == [()] * 6
    (hint,) = caplog.messages
    assert "no known document" in hint
    assert "as_retriever()" in hint
    assert "remember_documents(" in hint
