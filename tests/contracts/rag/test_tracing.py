"""OpenTelemetry spans of a search, its speculations and the request, in the trace of the current span."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tests.contracts.rag.frameworks import Framework
from tests.support.scripted_server import THREE_TIERS, Refusal, Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, Stage, expected
from tests.support.traced import Traced, traced

__all__ = ["traced"]
pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)
CHAT = "chat scripted-model"


def attributes(span: ReadableSpan) -> Any:
    return span.attributes or {}


def header(span: ReadableSpan) -> str:
    """Return the header of what is below a span, without its flags."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"


async def test_a_search_its_speculations_and_the_request_are_in_the_callers_trace(
    framework: Framework, answer: str, generations: Any, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    server.script(ENDLESS)
    pair = framework.over(
        Stage("mars"),
        Stage("moon sun", once=lambda: len(generations()) == 1),
        Stage("moon sun", once=lambda: len(generations()) == 2),
    )
    with traced.tracer.start_as_current_span("application") as outer:
        assert (await framework.answer(pair, answer)).text == expected("moon", "sun")
    wrong, right = await asyncio.to_thread(traced.await_spans, "ragcache.speculation", 2)
    assert [attributes(s)["ragcache.speculation.outcome"] for s in (wrong, right)] == ["cancelled", "confirmed"]
    (request,) = await asyncio.to_thread(traced.await_spans, CHAT, 1)
    assert {span.context.trace_id for span in traced.spans} == {outer.get_span_context().trace_id}
    (search,) = traced.named("ragcache.search")
    assert list(traced.tree(search)) == ["ragcache.search.stage", "ragcache.speculation"]
    assert traced.tree(right) == {"ragcache.queue": {}, "ragcache.prefill": {}}
    are_final = [attributes(span)["ragcache.search.is_final"] for span in traced.named("ragcache.search.stage")]
    assert are_final == [False, False, True]
    assert attributes(search)["gen_ai.operation.name"] == "retrieval"
    assert attributes(search)["ragcache.search.num_cancelled_speculations"] == 1
    assert [link.context.span_id for link in request.links] == [right.context.span_id]
    assert attributes(request)["gen_ai.usage.output_tokens"] > 0
    assert attributes(request)["gen_ai.response.id"].startswith("chatcmpl-")
    # The engine's server joins: what was sent ahead names its own span as the parent.
    assert [seen.traceparent[:-3] for seen in generations()] == [header(wrong), header(right)]
    for text in (QUESTION, *(document.text for document in DOCUMENTS.values())):
        assert text not in traced.texts()


async def test_a_request_has_the_engines_phases_below_it(
    framework: Framework, ask: str, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    server.rules = (lambda _: Reply("Paris", wait_s=0.004),)  # not sooner than it says
    with traced.tracer.start_as_current_span("application"):
        for _ in range(2):  # the second finds tokens in a tier
            await framework.ask(ask, framework.model(), QUESTION * 20)
    assert traced.tree() == {"application": {CHAT: {"ragcache.queue": {}, "ragcache.prefill": {}}}}
    request = traced.named(CHAT)[1]
    queue, prefill = traced.named("ragcache.queue")[1], traced.named("ragcache.prefill")[1]
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(1e6, abs=1e5), "the server says 1 ms"
    assert (prefill.end_time or 0) - (queue.start_time or 0) == pytest.approx(2e6, abs=1e5), "and 2 ms to the token"
    assert request.start_time <= queue.start_time <= queue.end_time == prefill.start_time <= request.end_time
    loaded = {e.attributes["ragcache.tier"]: e.attributes["ragcache.tokens"] for e in prefill.events}
    assert sum(loaded.values()) == attributes(request)["gen_ai.usage.cache_read.input_tokens"] > 0
    assert [event.name for event in request.events] == (["ragcache.first_token"] if "stream" in ask else [])
    assert (server.requests[-1].traceparent or "")[:-3] == header(request)


async def test_questions_at_the_same_time_are_each_in_their_own_trace(framework: Framework, traced: Traced) -> None:
    async def ask(number: int) -> int:
        with traced.tracer.start_as_current_span("application") as outer:
            pair = framework.over(Stage("moon"), Stage("moon sun"))
            await framework.answer(pair, list(framework.answers)[number % 2], f"{QUESTION} {number}")
            return outer.get_span_context().trace_id

    traces = await asyncio.gather(*(ask(i) for i in range(8)))
    for name in ("ragcache.search", CHAT):
        assert sorted(span.context.trace_id for span in traced.named(name)) == sorted(traces)


async def test_spans_that_an_instrumentation_keeps_to_itself_are_parents_too(
    framework: Framework, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = traced.tracer.start_span("Run")  # OpenInference makes the span of a run the current one nowhere
    kept = ModuleType("openinference.instrumentation.langchain")
    kept.get_current_span = lambda: run  # type: ignore[attr-defined]  # as the module has it
    monkeypatch.setitem(sys.modules, kept.__name__, kept)
    await framework.answer(framework.over(Stage("moon"), Stage("moon sun")))
    run.end()
    assert set(traced.tree()["Run"]) >= {"ragcache.search", CHAT}  # type: ignore[call-overload]  # a tree is of trees


async def test_a_failed_request_is_an_error_without_its_words_and_a_left_one_ends(
    framework: Framework, server: ScriptedServer, traced: Traced
) -> None:
    server.script(Refusal(400, "no such thing as a secret"))
    with pytest.raises(Exception, match="secret"):
        await framework.ask(next(iter(framework.asks)), framework.model(), QUESTION)
    (request,) = traced.named(CHAT)
    assert attributes(request)["http.response.status_code"] == 400
    assert not request.status.is_ok
    assert "secret" not in traced.texts()
    server.script(ENDLESS)
    stream = framework.open_stream(framework.model(), QUESTION, is_async=False)
    next(stream)
    stream.close()
    _, left = await asyncio.to_thread(traced.await_spans, CHAT, 2)
    assert attributes(left)["ragcache.is_cancelled"] is True


async def test_without_an_sdk_nothing_is_recorded_and_no_header_sent(
    framework: Framework, few: str, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a span was started")

    monkeypatch.setattr("opentelemetry.trace.NoOpTracer.start_span", refused)
    monkeypatch.setattr("opentelemetry.trace.ProxyTracer.start_span", refused)
    pair = framework.over(Stage("moon"), Stage("moon", once=lambda: bool(generations())))
    await framework.answer(pair, few)
    assert [seen.traceparent for seen in generations()] == [None]
