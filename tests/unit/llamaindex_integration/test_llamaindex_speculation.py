"""Whole answers that are under way before the search has ended, in every way to ask a query engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex import (
    CacheStatsEvent,
    CacheStatsEventHandler,
    RAGCacheLLM,
    RAGCacheRetriever,
    RetrievalStageEvent,
    SpeculationEvent,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import (
    DOCUMENTS,
    EVENTS_OF_A_CHANGE,
    QUESTION,
    InTurn,
    ScriptedSource,
    Stage,
    expected,
    once_answered,
)
from tests.support.waiting import until
from tests.unit.llamaindex_integration.conftest import EventLog
from tests.unit.llamaindex_integration.test_llamaindex_query_engine import ListRetriever
from tests.unit.llamaindex_integration.ways import every_query, query, streamed_query

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)  # twice as long as anything here is waited for


@every_query
async def test_the_request_joins_the_speculation_that_was_right(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer, num_begun: Any
) -> None:
    make = partial(make_engine, Stage("moon sun"), Stage("moon sun", once=lambda: num_begun() == 1))
    text, metadata = await ask(make, QUESTION)
    assert text == expected("moon", "sun")
    (seen,) = generations()
    assert seen.speculation is not None
    assert until(lambda: server.confirmed == [seen.speculation])
    assert [d["id"] for d in seen.documents] == ["moon", "sun"]
    assert server.aborted == []
    report = metadata["ragcache"]["pipeline"]
    assert (report["num_stages"], report["num_started"], report["num_cancelled"]) == (2, 1, 0)
    assert report["is_confirmed"]
    assert 0 < report["hidden_search_s"] < report["search_s"]
    assert report["skipped_because"] is None
    assert [d["doc_id"] for d in metadata["ragcache"]["documents"]] == ["moon", "sun"]


@every_query
async def test_a_speculation_that_was_wrong_is_cancelled_and_the_next_one_joined(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.script(ENDLESS)
    make = partial(
        make_engine,
        Stage("mars"),
        Stage("moon sun", once=lambda: len(generations()) == 1),
        Stage("moon sun", once=lambda: len(generations()) == 2),
    )
    text, metadata = await ask(make, QUESTION)
    assert text == expected("moon", "sun")
    wrong, right = generations()
    assert [d["id"] for d in wrong.documents] == ["mars"]
    assert until(lambda: server.aborted == [wrong])
    assert until(lambda: server.confirmed == [right.speculation])
    report = metadata["ragcache"]["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 1, True)


@every_query
async def test_equal_questions_join_their_own_speculations(
    ask: Any, make_engine: Any, scripted: Engine, generations: Any, server: ScriptedServer
) -> None:
    answers: list[Any] = []
    first = ScriptedSource((Stage("moon"), Stage("moon", once=lambda: bool(answers))))
    second = ScriptedSource(
        (Stage("moon", once=lambda: bool(generations())), Stage("moon", once=lambda: len(generations()) == 2))
    )
    make = partial(make_engine, retriever=RAGCacheRetriever(InTurn(first, second), scripted))
    asking = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(ask(make, QUESTION))))
    assert await asyncio.to_thread(until, lambda: bool(generations()))
    answers.append(await asyncio.to_thread(lambda: asyncio.run(ask(make, QUESTION))))
    answers.append(await asking)
    assert [text for text, _ in answers] == [expected("moon")] * 2
    assert all(metadata["ragcache"]["pipeline"]["is_confirmed"] for _, metadata in answers)
    assert until(lambda: sorted(server.confirmed) == sorted(g.speculation for g in generations()))
    assert len(generations()) == 2


@every_query
async def test_candidates_that_never_settle_cost_one_more_request(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.script(ENDLESS)
    text, metadata = await ask(
        partial(make_engine, Stage("mars"), Stage("moon", once=lambda: len(generations()) == 1)), QUESTION
    )
    assert text == expected("moon")
    wrong, real = generations()
    assert real.speculation is None
    assert until(lambda: server.aborted == [wrong])
    assert server.confirmed == []
    assert metadata["ragcache"]["pipeline"]["hidden_search_s"] == 0


@every_query
async def test_without_our_plugin_the_request_is_sent_when_the_search_has_ended(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.load = None
    make = partial(make_engine, Stage("mars"), Stage("moon", once=lambda: bool(caplog.records)))
    for _ in range(2):
        text, metadata = await ask(make, QUESTION)
        assert text == expected("moon")
        assert metadata["ragcache"]["pipeline"]["skipped_because"] is not None
    assert [seen.speculation for seen in generations()] == [None, None]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "RAGCache's scheduler" in warning.message


async def test_nothing_of_the_answer_comes_before_the_documents_are_final(
    make_engine: Any, server: ScriptedServer
) -> None:
    events: list[str] = []
    final = Stage("moon sun", once=once_answered(server, events))
    response = await make_engine(Stage("moon sun"), final, streaming=True).aquery(QUESTION)
    events.extend([token async for token in response.response_gen])
    assert events[0] == "final"
    assert "".join(events[1:]) == expected("moon", "sun")


@pytest.mark.parametrize("is_async", [False, True])
async def test_events_tell_of_each_stage_and_each_speculation_in_order(
    is_async: bool, make_engine: Any, num_begun: Any, event_log: EventLog
) -> None:
    engine = make_engine(
        Stage("mars"),
        Stage("moon", once=lambda: len(event_log.of(SpeculationEvent)) == num_begun() == 1),
        Stage("moon", once=lambda: len(event_log.of(SpeculationEvent)) == 3 and num_begun() == 2),
    )
    handler = CacheStatsEventHandler()
    response = await engine.aquery(QUESTION) if is_async else engine.query(QUESTION)
    events = event_log.of(RetrievalStageEvent, SpeculationEvent)
    seen = [(getattr(e, "kind", "stage"), e.stage, *e.document_ids) for e in events]
    assert seen == [*EVENTS_OF_A_CHANGE, ("settle", 2, "moon")]
    assert {e.query for e in events} == {QUESTION}
    assert len({e.span_id for e in events[:-1]}) == 1
    assert events[0].span_id is not None
    assert "RAGCacheRetriever" in events[0].span_id
    confirm, settle = events[-2:]
    assert confirm.hidden_search_s is None
    assert 0 < settle.hidden_search_s < settle.search_s
    assert "RAGCacheQueryEngine" in settle.span_id
    for event in events:
        handler.handle(event)
    summary = handler.summary()
    assert (summary.num_speculations, summary.num_confirmed_speculations, summary.num_requests) == (2, 1, 0)
    assert summary.hidden_search_s == response.metadata["ragcache"]["pipeline"]["hidden_search_s"]


async def test_a_rehearsal_publishes_nothing(make_engine: Any, generations: Any, event_log: EventLog) -> None:
    engine = make_engine(Stage("mars"), Stage("moon", once=lambda: bool(generations())))
    assert str(await engine.aquery(QUESTION)) == expected("moon")
    assert len(generations()) == 2
    assert len(event_log.of(LLMChatStartEvent)) == len(event_log.of(CacheStatsEvent)) == 1


async def test_an_agent_that_retrieves_overlaps_too(make_engine: Any, generations: Any, llm: RAGCacheLLM) -> None:
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: len(generations()) == 2))
    tool = QueryEngineTool.from_defaults(engine, name="search", description="Searches the documents.")
    run = FunctionAgent(tools=[tool], llm=llm, system_prompt="Use the tool.").run("Find out 'what goes around'")
    (result,) = [event async for event in run.stream_events() if isinstance(event, ToolCallResult)]
    assert "The tool said" in str((await run).response.content)
    assert result.tool_output.raw_output.metadata["ragcache"]["pipeline"]["is_confirmed"]
    assert len(generations()) == 3  # call the tool, answer in it, answer


async def test_many_ask_the_same_at_the_same_time(make_engine: Any, generations: Any, server: ScriptedServer) -> None:
    server.rules = (lambda _: Reply("word " * 50, token_wait_s=0.001),)
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: len(generations()) >= 4))
    answers = await asyncio.gather(*(engine.aquery(QUESTION) for _ in range(8)))
    assert {str(a) for a in answers} == {("word " * 50).strip()}


async def test_those_who_share_a_retriever_ask_ahead_each_for_themselves(
    make_engine: Any, generations: Any, scripted: Engine, server: ScriptedServer
) -> None:
    num_awaited = 2
    stages = Stage("moon"), Stage("moon", once=lambda: len(server.requests) == num_awaited)
    retriever = RAGCacheRetriever(ScriptedSource(stages), scripted)
    one, other = make_engine(retriever=retriever), make_engine(retriever=retriever)
    answers = await asyncio.gather(one.aquery("Which moon?"), other.aquery("Which month?"))
    assert [str(a) for a in answers] == [expected("moon", question=q) for q in ("Which moon?", "Which month?")]
    assert all(a.metadata["ragcache"]["pipeline"]["is_confirmed"] for a in answers)
    num_awaited = 3
    await retriever.aretrieve("Which light?")  # by itself again: the beginning of the prompt, and no answer
    assert [r.path for r in server.requests][2:] == ["/v1/completions"]
    assert len(generations()) == 2


async def test_a_model_without_chat_template_is_asked_ahead_where_it_is_asked(
    make_engine: Any, scripted: Engine, server: ScriptedServer
) -> None:
    llm = RAGCacheLLM(scripted, temperature=0, max_tokens=200, is_chat_model=False)
    for ask in (query, streamed_query):
        server.clear()
        make = partial(make_engine, Stage("moon"), Stage("moon", once=lambda: bool(server.requests)), llm=llm)
        _, metadata = await ask(make, QUESTION)
        assert metadata["ragcache"]["pipeline"]["is_confirmed"]
        assert [r.path for r in server.requests] == ["/v1/completions"]


# What it is made of


async def test_another_llm_answers_when_the_search_has_ended_and_that_is_said_once(
    make_engine: Any, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(Stage("mars"), Stage("moon"), llm=MockLLM())
    for _ in range(2):
        response = await engine.aquery(QUESTION)
        assert DOCUMENTS["moon"].text in str(response)
        assert response.metadata["ragcache"]["pipeline"]["num_stages"] == 2
    assert server.requests == []
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "MockLLM" in warning.message


@every_query
async def test_any_retriever_is_one_stage(ask: Any, make_engine: Any, generations: Any, event_log: EventLog) -> None:
    nodes = [TextNode(id_=d.doc_id, text=d.text) for d in DOCUMENTS.values()]
    text, metadata = await ask(partial(make_engine, retriever=ListRetriever(*nodes)), QUESTION)
    assert text == expected(*DOCUMENTS)
    (seen,) = generations()
    assert seen.speculation is None
    report = metadata["ragcache"]["pipeline"]
    assert (report["num_stages"], report["hidden_search_s"]) == (1, 0)
    assert "one stage only" in report["skipped_because"]
    (stage,) = event_log.of(RetrievalStageEvent)
    assert (stage.is_final, stage.document_ids, stage.scores) == (True, tuple(DOCUMENTS), ())


class WorstFirst(BaseNodePostprocessor):
    """Turns the order around."""

    seen: list[Sequence[str]] = []

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.seen.append([n.node.node_id for n in nodes])
        return nodes[::-1]


@every_query
async def test_with_post_processors_nothing_is_asked_ahead_unless_they_run_ahead_too(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    worst_first = WorstFirst(seen=[])
    make = partial(make_engine, Stage("sun moon"), Stage("sun moon"), node_postprocessors=[worst_first])
    text, metadata = await ask(make, QUESTION)
    assert text == expected("moon", "sun")
    assert "speculate_postprocessed" in metadata["ragcache"]["pipeline"]["skipped_because"]
    assert [seen.speculation for seen in generations()] == [None]
    assert worst_first.seen == [["sun", "moon"]]

    server.clear()
    make = partial(
        make_engine,
        Stage("sun moon"),
        Stage("sun moon", once=lambda: bool(generations())),
        node_postprocessors=[worst_first],
        speculate_postprocessed=True,
    )
    text, metadata = await ask(make, QUESTION)
    assert text == expected("moon", "sun")
    assert metadata["ragcache"]["pipeline"]["is_confirmed"]
    assert len(generations()) == 1
    assert worst_first.seen == [["sun", "moon"]] * 3
    assert not caplog.records


async def test_a_post_processor_that_drops_all_candidates_leaves_nothing_to_ask(
    make_engine: Any, generations: Any
) -> None:
    cutoff = SimilarityPostprocessor(similarity_cutoff=5.0)
    engine = make_engine(Stage("moon"), Stage("moon"), node_postprocessors=[cutoff], speculate_postprocessed=True)
    response = await engine.aquery(QUESTION)
    assert str(response) == "Empty Response"
    assert response.metadata["ragcache"]["pipeline"]["num_started"] == 0
    assert generations() == []


@every_query
async def test_reordered_documents_are_asked_ahead_with_the_line_that_names_the_best(
    ask: Any, make_engine: Any, generations: Any, scripted: Engine
) -> None:
    source = ScriptedSource((Stage("sun mars moon"), Stage("sun mars moon", once=lambda: bool(generations()))))
    make = partial(
        make_engine,
        retriever=RAGCacheRetriever(source, scripted, similarity_top_k=3, document_order="canonical"),
        layout=PromptLayout(relevance_hint="Best first: {order}"),
    )
    text, metadata = await ask(make, QUESTION)
    assert text == expected("mars", "moon", "sun").replace("\n\nQuestion", "\n\nBest first: 3, 1, 2\n\nQuestion")
    (seen,) = generations()
    assert metadata["ragcache"]["pipeline"]["is_confirmed"]
    assert seen.kv_transfer_params["ragcache"]["reordered"]


async def test_two_steps_prefill_the_beginning_of_the_prompt_that_was_learned(
    make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    await make_engine(Stage("mars sun")).aquery("What is red?")
    stages = Stage("moon sun"), Stage("moon sun", once=lambda: len(server.requests) == 2)
    engine = make_engine(*stages)
    nodes = await engine.aretrieve(QueryBundle(QUESTION))
    response = await engine.asynthesize(QUESTION, nodes)
    assert str(response) == expected("moon", "sun")
    _, warm, real = server.requests
    assert (warm.path, warm.body["max_tokens"]) == ("/v1/completions", 1)
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    known = warm.body["prompt"]
    assert real.kv_transfer_params["prompt_token_ids"][: len(known)] == known
    assert real.speculation is None
