"""RAGCacheQueryEngine over any retriever, alone, as a tool of an agent, and inside a workflow."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import QueryBundle, TextNode

from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine
from tests.contracts.rag.frameworks import ListRetriever
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # workflows' own

QUESTION = "Who keeps the lighthouse?"
TEXTS = {
    "zor": "The lighthouse of Zor stands on the northern cape and is kept by Mel Anvik since the great flood.",
    "mel": "Mel Anvik is a pilot who was born in Nalna and has kept birds on the roof of her house for years.",
    "sea": "The sea around the cape is rough in winter, and no boat leaves the harbour before the month of May.",
}


@pytest.fixture
def retriever() -> ListRetriever:
    return ListRetriever(*(TextNode(id_=name, text=text, metadata={}) for name, text in TEXTS.items()))


@pytest.fixture
def query_engine(retriever: ListRetriever, llm: RAGCacheLLM) -> RAGCacheQueryEngine:
    return RAGCacheQueryEngine(retriever, llm)


async def _ask(engine: RAGCacheQueryEngine, *, is_async: bool, question: str = QUESTION) -> tuple[str, dict[str, Any]]:
    """Return the whole answer and the metadata, in each of the ways to ask."""
    response = await engine.aquery(question) if is_async else engine.query(question)
    assert [n.node.node_id for n in response.source_nodes] == list(TEXTS)
    assert response.metadata is not None
    if isinstance(response, AsyncStreamingResponse):
        assert is_async
        assert response.metadata["ragcache"].keys() == {"pipeline"}  # no statistics
        text = "".join([token async for token in response.async_response_gen()])
    elif isinstance(response, StreamingResponse):
        assert not is_async
        assert response.metadata["ragcache"].keys() == {"pipeline"}  # no statistics
        text = "".join(response.response_gen)
    else:
        text = str(response)
    return text, response.metadata


def _prompt(question: str = QUESTION) -> str:
    return "\n\n".join([*(f"Document: {t}" for t in TEXTS.values()), f"Question: {question}"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
async def test_answers_with_sources_and_statistics(
    is_async: bool, streaming: bool, retriever: ListRetriever, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    engine = RAGCacheQueryEngine(retriever, llm, streaming=streaming)
    text, metadata = await _ask(engine, is_async=is_async)
    assert text == f"You said: {_prompt()}"
    stats = metadata["ragcache"]
    assert [d["doc_id"] for d in stats["documents"]] == list(TEXTS)
    assert [d["id"] for d in server.requests[-1].documents] == list(TEXTS)
    assert stats["num_cached_tokens"] == 0
    assert stats["ttft_s"] is not None

    _, metadata = await _ask(engine, is_async=is_async, question="And who is a pilot?")
    first, *_ = metadata["ragcache"]["documents"]
    assert metadata["ragcache"]["num_cached_tokens"] > first["num_tokens"] == first["num_cached_tokens"]


def test_layout_is_the_callers(retriever: ListRetriever, llm: RAGCacheLLM, server: ScriptedServer) -> None:
    layout = PromptLayout(static_prefix="", document_format="[{doc_id}] {text}", question_format="Q: {question}")
    engine = RAGCacheQueryEngine(retriever, llm, layout=layout)
    assert engine.layout is layout
    assert engine.llm is llm
    assert engine.retriever is retriever
    engine.query(QUESTION)
    (request,) = server.requests
    assert request.user_text.startswith("[zor] The lighthouse")
    assert request.user_text.endswith(f"Q: {QUESTION}")
    assert [d["id"] for d in request.documents] == list(TEXTS)
    assert engine.get_prompts() == {}


def test_post_processors_choose_what_is_read(
    retriever: ListRetriever, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    engine = RAGCacheQueryEngine(retriever, llm, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.85)])
    response = engine.query(QUESTION)
    assert [n.node.node_id for n in response.source_nodes] == ["zor", "mel"]
    assert TEXTS["sea"] not in server.requests[-1].user_text


@pytest.mark.parametrize("streaming", [False, True])
async def test_nothing_retrieved_is_answered_without_the_llm(
    streaming: bool, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    engine = RAGCacheQueryEngine(ListRetriever(), llm, streaming=streaming)
    assert str(engine.query(QUESTION)) == "Empty Response"
    response = await engine.aquery(QUESTION)
    whole = await response.get_response() if isinstance(response, AsyncStreamingResponse) else response
    assert str(whole) == "Empty Response"
    assert not server.requests


async def test_synthesize_answers_from_the_given_nodes(
    query_engine: RAGCacheQueryEngine, retriever: ListRetriever, server: ScriptedServer
) -> None:
    query = QueryBundle(QUESTION)
    zor, mel, sea = query_engine.retrieve(query)
    assert [n.node.node_id for n in await query_engine.aretrieve(query)] == list(TEXTS)
    for response in (
        query_engine.synthesize(query, [mel], additional_source_nodes=[sea]),
        await query_engine.asynthesize(QUESTION, [mel], additional_source_nodes=[sea]),
    ):
        assert [n.node.node_id for n in response.source_nodes] == ["mel", "sea"]
        assert response.metadata is not None
        assert set(response.metadata) == {"mel", "sea", "ragcache"}
        assert TEXTS["sea"] not in server.requests[-1].user_text
    assert zor.node.get_content() not in server.requests[-1].user_text


def test_settings_of_a_query_engine_are_those_of_its_llms_requests(
    retriever: ListRetriever, llm: RAGCacheLLM, server: ScriptedServer
) -> None:
    engine = RAGCacheQueryEngine(retriever, llm, chunk_reuse=False)
    engine.synthesize(QUESTION, engine.retrieve(QueryBundle(QUESTION)))
    assert server.requests[-1].chunk_reuse is False
    for settings, why in (({"chunk_reuse": {"alpha": -1}}, "alpha is -1"), ({"ttft_slo": 0}, "ttft_slo is 0")):
        with pytest.raises(ConfigError, match=why):
            RAGCacheQueryEngine(retriever, llm, **settings)  # type: ignore[arg-type]  # refused
    with pytest.raises(ConfigError, match="MockLLM cannot do"):
        RAGCacheQueryEngine(retriever, MockLLM(), ttft_slo=1.0)
