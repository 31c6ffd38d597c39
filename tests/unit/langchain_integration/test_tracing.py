"""OpenTelemetry spans of a chain's search, speculations and request, in the trace of whatever span is current."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import THREE_TIERS, Refusal, Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, Stage, expected
from tests.support.traced import Traced, traced
from tests.unit.langchain_integration.ways import answered, each_way

__all__ = ["traced"]
pytestmark = pytest.mark.usefixtures("idle")
ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)
CHAT = "chat scripted-model"


@each_way
async def test_a_search_its_speculations_and_the_request_are_in_the_callers_trace(
    way: Any, make_rag: Any, generations: Any, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    server.script(ENDLESS)
    rag = make_rag(
        Stage("mars"),
        Stage("moon sun", once=lambda: len(generations()) == 1),
        Stage("moon sun", once=lambda: len(generations()) == 2),
    )
    with traced.tracer.start_as_current_span("application") as outer:
        assert await answered(way, rag) == expected("moon", "sun")
    wrong, right = await asyncio.to_thread(traced.await_spans, "ragcache.speculation", 2)
    assert (wrong.attributes or {})["ragcache.speculation.outcome"] == "cancelled"
    assert (right.attributes or {})["ragcache.speculation.outcome"] == "confirmed"
    assert {span.context.trace_id for span in traced.spans} == {outer.get_span_context().trace_id}
    (search,) = traced.named("ragcache.search")
    assert [list(traced.tree(search)), traced.tree(right)] == [
        ["ragcache.search.stage", "ragcache.speculation"],
        {"ragcache.queue": {}, "ragcache.prefill": {}},
    ]
    assert [(s.attributes or {})["ragcache.search.is_final"] for s in traced.named("ragcache.search.stage")] == [
        False, False, True,
    ]  # fmt: skip
    assert (search.attributes or {})["gen_ai.operation.name"] == "retrieval"
    assert (search.attributes or {})["ragcache.search.num_cancelled_speculations"] == 1
    (request,) = traced.named(CHAT)
    assert request.parent is not None
    assert request.parent.span_id == outer.get_span_context().span_id
    assert [link.context.span_id for link in request.links] == [right.context.span_id]
    said = request.attributes or {}
    assert said["gen_ai.usage.output_tokens"] > 0
    assert said["gen_ai.response.id"].startswith("chatcmpl-")
    # The engine's server joins: what was sent ahead names its own span as the parent.
    assert [seen.traceparent[:-3] for seen in generations()] == [header(wrong), header(right)]
    for text in (QUESTION, *(document.text for document in DOCUMENTS.values())):
        assert text not in traced.texts()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_was_not_speculated_has_the_engines_phases_below_it(
    is_streamed: bool, llm: ChatRAGCache, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    server.rules = (lambda _: Reply("Paris", wait_s=0.004),)  # not sooner than it says
    with traced.tracer.start_as_current_span("application"):
        for _ in range(2):  # the second finds tokens in a tier
            if is_streamed:
                list(llm.stream(QUESTION * 20))
            else:
                llm.invoke(QUESTION * 20)
    assert traced.tree() == {"application": {CHAT: {"ragcache.queue": {}, "ragcache.prefill": {}}}}
    request = traced.named(CHAT)[1]
    queue, prefill = traced.named("ragcache.queue")[1], traced.named("ragcache.prefill")[1]
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(1e6, abs=1e5), "the server says 1 ms"
    assert (prefill.end_time or 0) - (queue.start_time or 0) == pytest.approx(2e6, abs=1e5), "and 2 ms to the token"
    assert request.start_time <= queue.start_time <= queue.end_time == prefill.start_time <= request.end_time
    loaded = {e.attributes["ragcache.tier"]: e.attributes["ragcache.tokens"] for e in prefill.events}
    assert sum(loaded.values()) == (request.attributes or {})["gen_ai.usage.cache_read.input_tokens"] > 0
    assert [event.name for event in request.events] == (["ragcache.first_token"] if is_streamed else [])
    assert (server.requests[-1].traceparent or "")[:-3] == header(request)


def header(span: ReadableSpan) -> str:
    """Return the header of what is below a span, without its flags."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"


async def test_questions_at_the_same_time_are_each_in_their_own_trace(
    make_rag: Any, server: ScriptedServer, traced: Traced
) -> None:
    async def ask(number: int, way: str) -> int:
        with traced.tracer.start_as_current_span("application") as outer:
            rag, question = make_rag(Stage("moon"), Stage("moon sun")), f"{QUESTION} {number}"
            if way == "task":
                await rag.ainvoke(question)
            else:
                await asyncio.to_thread(rag.invoke, question)
            return outer.get_span_context().trace_id

    traces = await asyncio.gather(*(ask(i, "task" if i % 2 else "thread") for i in range(8)))
    for name in ("ragcache.search", CHAT):
        assert sorted(span.context.trace_id for span in traced.named(name)) == sorted(traces)
    outers = {span.context.trace_id: span.context.span_id for span in traced.named("application")}
    assert all(span.parent.span_id == outers[span.context.trace_id] for span in traced.named(CHAT))


async def test_spans_that_an_instrumentation_keeps_to_itself_are_parents_too(
    make_rag: Any, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = traced.tracer.start_span("RunnableSequence")  # OpenInference makes the span of a run the current one nowhere
    kept = ModuleType("openinference.instrumentation.langchain")
    kept.get_current_span = lambda: run  # type: ignore[attr-defined]  # as the module has it
    monkeypatch.setitem(sys.modules, kept.__name__, kept)
    await make_rag(Stage("moon"), Stage("moon sun")).ainvoke(QUESTION)
    run.end()
    assert set(traced.tree()["RunnableSequence"]) >= {"ragcache.search", CHAT}  # type: ignore[call-overload]  # a tree is of trees


def test_what_fails_is_an_error_without_its_words(llm: ChatRAGCache, server: ScriptedServer, traced: Traced) -> None:
    server.script(Refusal(400, "no such thing as a secret"))
    with pytest.raises(Exception, match="secret"):
        llm.invoke(QUESTION)
    (request,) = traced.named(CHAT)
    assert (request.attributes or {})["http.response.status_code"] == 400
    assert not request.status.is_ok
    assert "secret" not in traced.texts()


def test_an_answer_that_is_given_up_ends_its_span(llm: ChatRAGCache, server: ScriptedServer, traced: Traced) -> None:
    server.script(ENDLESS)
    chunks = llm.stream(QUESTION)
    next(iter(chunks))
    chunks.close()  # type: ignore[attr-defined]  # a generator
    (request,) = traced.await_spans(CHAT, 1)
    assert (request.attributes or {})["ragcache.is_cancelled"] is True


@each_way
async def test_without_an_sdk_nothing_is_recorded_and_no_header_sent(
    way: Any, make_rag: Any, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a span was started")

    monkeypatch.setattr("opentelemetry.trace.NoOpTracer.start_span", refused)
    monkeypatch.setattr("opentelemetry.trace.ProxyTracer.start_span", refused)
    await answered(way, make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations()))))
    assert [seen.traceparent for seen in generations()] == [None]


def test_it_is_not_imported(server: ScriptedServer) -> None:
    code = (
        "import sys; from ragcache_core import Engine\n"
        f"with Engine.connect({server.url!r}, api_key='test-key', tokenizer=False) as engine:\n"
        "    engine.generate('What goes around the earth?', max_tokens=4)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_requests_whose_statistics_nobody_asks_for_end_in_the_end(
    engine: Engine, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.tracing._NUM_OPEN", 3)
    monkeypatch.setattr(engine.integration.stats, "complete", lambda stats, _: stats)
    for _ in range(5):
        engine.generate(QUESTION, max_tokens=2)
    assert len(traced.named("text_completion scripted-model")) == 2
