"""LlamaIndex on a real vLLM server with the demo model and the demo corpus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any, Literal

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from ragcache_core.client import Engine
from ragcache_core.errors import EngineError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.stats import RequestStats, request_stats_from_dict
from ragcache_core.types import Document
from ragcache_integrations.llamaindex import CacheStatsEventHandler, RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever
from tests.conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # workflows' own

QUESTION = "Who founded Nalna?"
_numbers = count(time.time_ns())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentStore]:
    files = sorted((ROOT / "examples" / "demo_corpus").glob("*.md"))
    with DocumentStore.create(tmp_path_factory.mktemp("corpus") / "store") as store:
        store.add(Document(file.name, file.read_text("utf-8")) for file in files)
        yield store


@pytest.fixture
def llm(engine: Engine) -> RAGCacheLLM:
    return RAGCacheLLM(engine, temperature=0, max_tokens=24)


@pytest.fixture
def retriever(store: DocumentStore, engine: Engine) -> RAGCacheRetriever:
    return RAGCacheRetriever(store, engine, similarity_top_k=2, stages=2)


def cold_prompt() -> str:
    """Return a prompt of more than two blocks that no other test has asked, from its first block on."""
    return f"{next(_numbers)} Nalna is a company. It makes ships. It was founded by Jonas Foksan. " * 3 + QUESTION


Asked = tuple[str, dict[str, Any]]


async def _complete(llm: RAGCacheLLM, prompt: str) -> Asked:
    response = llm.complete(prompt)
    return response.text, response.additional_kwargs


async def _achat(llm: RAGCacheLLM, prompt: str) -> Asked:
    response = await llm.achat([ChatMessage(content=prompt)])
    return response.message.content or "", response.additional_kwargs


async def _stream_chat(llm: RAGCacheLLM, prompt: str) -> Asked:
    responses = list(llm.stream_chat([ChatMessage(content=prompt)]))
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


async def _astream_complete(llm: RAGCacheLLM, prompt: str) -> Asked:
    responses = [r async for r in await llm.astream_complete(prompt)]
    return "".join(r.delta or "" for r in responses), responses[-1].additional_kwargs


Ask = Callable[[RAGCacheLLM, str], Awaitable[Asked]]


@pytest.mark.parametrize("ask", [_complete, _achat, _stream_chat, _astream_complete])
async def test_second_time_the_prompt_comes_out_of_the_cache(ask: Ask, llm: RAGCacheLLM) -> None:
    prompt = cold_prompt()
    cold_text, cold = await ask(llm, prompt)
    warm_text, warm = await ask(llm, prompt)
    assert cold_text == warm_text
    first, second = (request_stats_from_dict(extra["ragcache"]) for extra in (cold, warm))
    assert first.num_prompt_tokens == len(llm.engine.tokenize([{"role": "user", "content": prompt}]))
    assert first.num_cached_tokens < 32
    assert second.num_cached_tokens == (second.num_prompt_tokens - 1) // 32 * 32 >= 64
    assert 0 < first.num_output_tokens <= 24
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.total_s
    assert second.num_gpu_tokens == second.num_cached_tokens
    assert first.num_stored_bytes
    assert first.queue_s is not None


async def _query(engine: RAGCacheQueryEngine, question: str, *, is_async: bool) -> tuple[str, RequestStats]:
    response = await engine.aquery(question) if is_async else engine.query(question)
    if isinstance(response, AsyncStreamingResponse):
        text = str(await response.get_response())
    elif isinstance(response, StreamingResponse):
        text = "".join(response.response_gen)
    else:
        text = str(response)
    assert response.metadata is not None
    stats = request_stats_from_dict(response.metadata["ragcache"])
    assert [n.node.node_id for n in response.source_nodes] == [d.doc_id for d in stats.documents]
    return text, stats


async def test_query_engine_finds_its_documents_cached_in_every_way(
    retriever: RAGCacheRetriever, llm: RAGCacheLLM
) -> None:
    answers = set()
    for i, (is_async, streaming) in enumerate(((False, False), (True, False), (False, True), (True, True))):
        engine = RAGCacheQueryEngine(retriever, llm, streaming=streaming)
        text, stats = await _query(engine, QUESTION, is_async=is_async)
        answers.add(text)
        assert stats.documents[0].doc_id == "nalna.md"
        assert sum(d.num_tokens for d in stats.documents) < stats.num_prompt_tokens
        assert stats.ttft_s is not None
        assert stats.num_gpu_tokens == stats.num_cached_tokens
        if i:
            assert stats.num_cached_tokens == (stats.num_prompt_tokens - 1) // 32 * 32
            assert stats.documents[0].num_cached_tokens == stats.documents[0].num_tokens
    assert len(answers) == 1


async def test_many_queries_at_once_are_all_answered(retriever: RAGCacheRetriever, llm: RAGCacheLLM) -> None:
    engine = RAGCacheQueryEngine(retriever, llm)
    questions = [QUESTION, "What does Nalna make?", "Who is Olga Zuvlarn?", "Where is Nalna based?"]
    handler = CacheStatsEventHandler()
    root = get_dispatcher()
    root.add_event_handler(handler)
    try:
        answers = await asyncio.gather(*(_query(engine, question, is_async=True) for question in questions))
    finally:
        root.event_handlers.remove(handler)
    summary = handler.summary()
    assert summary.num_requests == len(questions)
    assert summary.num_prompt_tokens == sum(stats.num_prompt_tokens for _, stats in answers)
    assert summary.num_cached_tokens == sum(stats.num_cached_tokens for _, stats in answers)


def search(input: str) -> str:
    """Search the documents."""
    return input


async def test_required_tool_is_called_in_every_way(engine: Engine) -> None:
    llm = RAGCacheLLM(engine, temperature=0, max_tokens=48)
    tools, asked = [FunctionTool.from_defaults(search)], {"user_msg": QUESTION, "tool_required": True}
    for response in (
        llm.chat_with_tools(tools, **asked),
        await llm.achat_with_tools(tools, **asked),
        list(llm.stream_chat_with_tools(tools, **asked))[-1],
        [r async for r in await llm.astream_chat_with_tools(tools, **asked)][-1],
    ):
        (call,) = llm.get_tool_calls_from_response(response)
        assert call.tool_name == "search"
        assert response.additional_kwargs["ragcache"]["num_prompt_tokens"] > 0


@pytest.mark.parametrize("choice", [None, "search"], ids=["by itself", "told to"])
async def test_agent_searches_and_answers(
    choice: str | None, retriever: RAGCacheRetriever, engine: Engine, llm: RAGCacheLLM
) -> None:
    tool = QueryEngineTool.from_defaults(RAGCacheQueryEngine(retriever, llm), name="search", description="Documents.")
    agent = FunctionAgent(
        tools=[tool], llm=RAGCacheLLM(engine, temperature=0, max_tokens=64), initial_tool_choice=choice
    )
    run = agent.run(QUESTION, max_iterations=4)
    results = [event async for event in run.stream_events() if isinstance(event, ToolCallResult)]
    output = await run
    assert results
    raw = results[0].tool_output.raw_output
    assert isinstance(raw, Response)
    assert raw.metadata is not None
    assert raw.metadata["ragcache"]["num_prompt_tokens"] > 0
    assert output.raw["ragcache"]["num_output_tokens"] > 0
    if choice is None:
        assert results[0].tool_kwargs["input"].strip() == QUESTION
        assert "Foksan" in str(output)


class Token(Event):
    text: str


class Answering(Workflow):
    """Retrieve in one step, answer in the next, and stream the tokens."""

    def __init__(self, query_engine: RAGCacheQueryEngine) -> None:
        super().__init__(timeout=120)
        self.query_engine = query_engine

    @step
    async def answer(self, ctx: Context, event: StartEvent) -> StopEvent:
        query = QueryBundle(event.question)
        response = await self.query_engine.asynthesize(query, await self.query_engine.aretrieve(query))
        assert isinstance(response, AsyncStreamingResponse)
        async for token in response.async_response_gen():
            ctx.write_event_to_stream(Token(text=token))
        return StopEvent(result=await response.get_response())


async def test_workflow_streams_the_answer(retriever: RAGCacheRetriever, llm: RAGCacheLLM) -> None:
    run = Answering(RAGCacheQueryEngine(retriever, llm, streaming=True)).run(question=QUESTION)
    text = "".join([event.text async for event in run.stream_events() if isinstance(event, Token)])
    response = await run
    assert text == str(response)
    assert response.metadata["ragcache"]["ttft_s"] > 0


def test_structured_output_is_enforced(llm: RAGCacheLLM) -> None:
    class Judged(BaseModel):
        answer: Literal["yes", "no"]

    schema = {"name": "Judged", "schema": Judged.model_json_schema()}
    response = llm.chat(
        [ChatMessage(content="Nalna is a company. Is Nalna a company?")],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    spelled = "".join((response.message.content or "").split())  # the demo model's tokens have spaces between them
    assert Judged.model_validate_json(spelled).answer in ("yes", "no")


def test_a_router_asks_the_selector_and_reports_which_to_use_where_the_model_cannot_spell_a_choice(
    llm: RAGCacheLLM, retriever: RAGCacheRetriever
) -> None:
    """The demo model has no token for the beginning of what LlamaIndex's own choice of a selector requires."""
    engine = RAGCacheQueryEngine(retriever, llm)
    tools = [QueryEngineTool.from_defaults(engine, description=what) for what in ("for towns", "for companies")]
    with pytest.raises(EngineError, match="has to follow a grammar .* LLMSingleSelector"):
        RouterQueryEngine.from_defaults(tools, llm=llm).query(QUESTION)
