"""OpenTelemetry spans of a query engine's search, speculations and request, in the trace of the current span."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.support.scripted_server import THREE_TIERS, Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, Stage, expected
from tests.support.traced import Traced, traced
from tests.unit.llamaindex_integration.ways import every_query, every_way

__all__ = ["traced"]
pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)


@every_query
async def test_a_search_its_speculations_and_the_request_are_in_the_callers_trace(
    ask: Any, make_engine: Any, generations: Any, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    server.script(ENDLESS)
    make = partial(
        make_engine,
        Stage("mars"),
        Stage("moon sun", once=lambda: len(generations()) == 1),
        Stage("moon sun", once=lambda: len(generations()) == 2),
    )
    with traced.tracer.start_as_current_span("application") as outer:
        text, _ = await ask(make, QUESTION)
    assert text == expected("moon", "sun")
    speculations = await asyncio.to_thread(traced.await_spans, "ragcache.speculation", 2)
    assert [(s.attributes or {})["ragcache.speculation.outcome"] for s in speculations] == ["cancelled", "confirmed"]
    (request,) = await asyncio.to_thread(traced.await_spans, "chat scripted-model", 1)
    assert {span.context.trace_id for span in traced.spans} == {outer.get_span_context().trace_id}
    (search,) = traced.named("ragcache.search")
    assert list(traced.tree(search)) == ["ragcache.search.stage", "ragcache.speculation"]
    assert len(traced.named("ragcache.search.stage")) == 3
    assert traced.tree(speculations[1]) == {"ragcache.queue": {}, "ragcache.prefill": {}}
    assert [link.context.span_id for link in request.links] == [speculations[1].context.span_id]
    assert (request.attributes or {})["gen_ai.usage.output_tokens"] > 0
    for said in (QUESTION, *(document.text for document in DOCUMENTS.values())):
        assert said not in traced.texts()


@every_way
async def test_every_way_to_ask_has_one_request_with_its_statistics(
    ask: Any, llm: Any, server: ScriptedServer, traced: Traced
) -> None:
    server.cache = THREE_TIERS
    with traced.tracer.start_as_current_span("application"):
        await ask(llm)
    assert traced.tree() == {"application": {"chat scripted-model": {"ragcache.queue": {}, "ragcache.prefill": {}}}}
