"""RAGCacheQueryEngine over any retriever, alone, as a tool of an agent, and inside a workflow."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.instrumentation.events.query import QueryEndEvent, QueryStartEvent
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex import CacheStatsEvent, RAGCacheLLM, RAGCacheQueryEngine
from tests.support.scripted_server import ScriptedServer
from tests.unit.llamaindex_integration.conftest import EventLog

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # workflows' own

QUESTION = "Who keeps the lighthouse?"
TEXTS = {
    "zor": "The lighthouse of Zor stands on the northern cape and is kept by Mel Anvik since the great flood.",
    "mel": "Mel Anvik is a pilot who was born in Nalna and has kept birds on the roof of her house for years.",
    "sea": "The sea around the cape is rough in winter, and no boat leaves the harbour before the month of May.",
}


class ListRetriever(BaseRetriever):
    """Finds the nodes that it was given."""

    def __init__(self, *nodes: TextNode) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0 - i / 10) for i, node in enumerate(self.nodes)]


@pytest.fixture
def retriever() -> ListRetriever:
    return ListRetriever(*(TextNode(id_=name, text=text, metadata={}) for name, text in TEXTS.items()))


@pytest.fixture
def query_engine(retriever: ListRetriever, llm: RAGCacheLLM) -> RAGCacheQueryEngine:
    return RAGCacheQueryEngine(retriever, llm)


@pytest.fixture
def streaming_engine(retriever: ListRetriever, llm: RAGCacheLLM) -> RAGCacheQueryEngine:
    return RAGCacheQueryEngine(retriever, llm, streaming=True)


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


def test_prompt_has_the_documents_before_the_question_and_is_asked_once(
    query_engine: RAGCacheQueryEngine, server: ScriptedServer
) -> None:
    query_engine.query(QUESTION)
    (request,) = server.requests
    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert request.user_text == _prompt()


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


def test_metadata_that_a_node_shows_is_part_of_its_document(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    node = TextNode(id_="zor", text=TEXTS["zor"], metadata={"title": "Zor", "secret": "x"})
    node.excluded_llm_metadata_keys = ["secret"]
    response = RAGCacheQueryEngine(ListRetriever(node), llm).query(QUESTION)
    assert f"Document: title: Zor\n\n{TEXTS['zor']}" in server.requests[-1].user_text
    assert response.metadata is not None
    assert response.metadata["zor"] == node.metadata
    assert [d["doc_id"] for d in response.metadata["ragcache"]["documents"]] == ["zor"]


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


async def test_query_publishes_each_event_once(query_engine: RAGCacheQueryEngine, event_log: EventLog) -> None:
    for is_async in (False, True):
        event_log.events.clear()
        await _ask(query_engine, is_async=is_async)
        for kind in (QueryStartEvent, QueryEndEvent, SynthesizeStartEvent, SynthesizeEndEvent, CacheStatsEvent):
            assert len(event_log.of(kind)) == 1, kind


# As a tool


async def test_agent_calls_the_query_engine_as_a_tool(
    query_engine: RAGCacheQueryEngine, llm: RAGCacheLLM, server: ScriptedServer, event_log: EventLog
) -> None:
    tool = QueryEngineTool.from_defaults(query_engine, name="search", description="Searches the documents.")
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Use the tool.")
    run = agent.run("Find out 'who keeps the lighthouse'")
    results = [event async for event in run.stream_events() if isinstance(event, ToolCallResult)]
    output = await run

    (result,) = results
    assert (result.tool_name, result.tool_kwargs) == ("search", {"input": "who keeps the lighthouse"})
    raw = result.tool_output.raw_output
    assert isinstance(raw, Response)
    assert raw.metadata is not None
    assert [d["doc_id"] for d in raw.metadata["ragcache"]["documents"]] == list(TEXTS)
    assert isinstance(output, AgentOutput)
    assert str(output.response.content).startswith("The tool said: You said: Document: The lighthouse of Zor")
    assert output.raw["ragcache"]["num_prompt_tokens"] > 0
    assert len(event_log.of(CacheStatsEvent)) == len(server.requests) == 3  # call the tool, answer in it, answer


# In a workflow


class Found(Event):
    nodes: list[NodeWithScore]


class Token(Event):
    text: str


class Answering(Workflow):
    """Retrieve in one step, answer in the next, and stream the tokens."""

    def __init__(self, query_engine: RAGCacheQueryEngine) -> None:
        super().__init__(timeout=30)
        self.query_engine = query_engine

    @step
    async def retrieve(self, ctx: Context, event: StartEvent) -> Found:
        await ctx.store.set("question", event.question)
        found = Found(nodes=await self.query_engine.aretrieve(QueryBundle(event.question)))
        ctx.write_event_to_stream(found)
        return found

    @step
    async def answer(self, ctx: Context, event: Found) -> StopEvent:
        response = await self.query_engine.asynthesize(await ctx.store.get("question"), event.nodes)
        assert isinstance(response, AsyncStreamingResponse)
        async for token in response.async_response_gen():
            ctx.write_event_to_stream(Token(text=token))
        return StopEvent(result=await response.get_response())


async def test_workflow_streams_what_was_found_and_every_token(streaming_engine: RAGCacheQueryEngine) -> None:
    run = Answering(streaming_engine).run(question=QUESTION)
    events = [event async for event in run.stream_events()]
    response = await run
    found = [e for e in events if isinstance(e, Found)]
    assert [n.node.node_id for n in found[0].nodes] == list(TEXTS)
    assert "".join(e.text for e in events if isinstance(e, Token)) == str(response) == f"You said: {_prompt()}"
    assert response.metadata["ragcache"]["ttft_s"] is not None


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


def test_a_completion_is_sent_without_a_plan_and_says_why(llm: RAGCacheLLM, server: ScriptedServer) -> None:
    response = llm.complete("What is the sun?", use_chat_completions=False, ttft_slo=5, chunk_reuse=True)
    told = response.additional_kwargs["ragcache"]["deadline"]
    assert (told["choice"], told["is_in_time"]) == ("exact", None)
    assert "completions endpoint" in told["why"]
    assert "chunk_reuse" not in server.requests[-1].body
