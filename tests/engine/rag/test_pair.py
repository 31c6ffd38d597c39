"""Both frameworks search and answer at the same time on the real engine: the same tokens, earlier, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout
from tests.contracts.rag.frameworks import FRAMEWORKS, Answer, Framework, LlamaIndex
from tests.engine.search_scene import QUESTION, SlowSource, becomes_idle, documents
from tests.support.traced import Traced, traced
from tests.support.waiting import until

__all__ = ["traced"]
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
WAYS = [
    *(("langchain", way) for way in ("invoke", "ainvoke", "stream", "astream")),
    *(("llamaindex", way) for way in ("query", "aquery", "streamed_query", "streamed_aquery", "tool_acall")),
]


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Framework]:
    made = FRAMEWORKS[request.param](engine)
    if isinstance(made, LlamaIndex):
        get_dispatcher().add_event_handler(made.log)
    yield made
    if isinstance(made, LlamaIndex):
        get_dispatcher().event_handlers.remove(made.log)


def over(framework: Framework, *found: tuple[Document, ...], **settings: Any) -> Any:
    return framework.pair(framework.retriever(SlowSource(found)), framework.model(**{**SETTINGS, **settings}))


async def answer(framework: Framework, *found: tuple[Document, ...], way: str = "") -> Answer:
    return await framework.answer(over(framework, *found), way, QUESTION)


@pytest.mark.parametrize(("framework", "way"), WAYS, indirect=["framework"])
async def test_the_answer_is_under_way_before_the_search_has_ended(framework: Framework, way: str) -> None:
    engine, wrong, right = framework.engine, documents(2), documents(3)
    before = engine.stats()
    said = await answer(framework, wrong, right, right, way=way)
    report = said.stats["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 1, True)
    assert report["search_s"] > 1.0
    assert 0 <= report["overlapped_search_s"] < report["search_s"]
    assert await asyncio.to_thread(becomes_idle, engine)
    plain = await answer(framework, right, way=way)
    assert said.text == plain.text != ""
    assert said.stats["num_prompt_tokens"] == plain.stats["num_prompt_tokens"]
    assert plain.stats["pipeline"]["num_started"] == 0
    confirmed = before.num_confirmed_speculations + 1
    assert await asyncio.to_thread(until, lambda: engine.stats().num_confirmed_speculations == confirmed)
    assert engine.stats().num_speculative_requests == before.num_speculative_requests + 2


@pytest.mark.slow
@pytest.mark.alone
async def test_engine_work_during_the_search_is_reported_as_overlapped(framework: Framework) -> None:
    for _ in range(3):  # a busy engine may tell too late when it began
        found = documents(3)
        said = await answer(framework, found, found, found, way=list(framework.answers)[3])
        if (hidden_s := said.stats["pipeline"]["overlapped_search_s"]) > 0.5:
            return
    pytest.fail(f"{hidden_s:.3f} s of 1.2 s were hidden")


async def test_candidates_that_never_settle_change_nothing(framework: Framework) -> None:
    right = documents(3)
    said = await answer(framework, documents(2), documents(2), right)
    report = said.stats["pipeline"]
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 2, False)
    assert report["overlapped_search_s"] == 0
    assert said.text == (await answer(framework, right)).text
    assert await asyncio.to_thread(becomes_idle, framework.engine)


async def test_the_trace_has_the_engines_phases_below_what_was_asked_ahead(
    framework: Framework, traced: Traced
) -> None:
    wrong, right = documents(2), documents(3)
    with traced.tracer.start_as_current_span("application"):
        stats = (await answer(framework, wrong, right, right, way=list(framework.answers)[1])).stats
    cancelled, confirmed = await asyncio.to_thread(traced.await_spans, "ragcache.speculation", 2)
    outcomes = [(span.attributes or {})["ragcache.speculation.outcome"] for span in (cancelled, confirmed)]
    assert outcomes in (["cancelled", "confirmed"], ["unused", "confirmed"]), "it may have ended before"
    assert traced.tree(confirmed) == {"ragcache.queue": {}, "ragcache.prefill": {}}
    (queue,), (prefill,) = traced.named("ragcache.queue"), traced.named("ragcache.prefill")
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(stats["queue_s"] * 1e9, abs=1e3)
    assert (prefill.attributes or {})["ragcache.computed_tokens"] == stats["num_computed_tokens"]
    assert confirmed.start_time == queue.start_time <= queue.end_time == prefill.start_time < prefill.end_time
    assert prefill.end_time <= confirmed.end_time
    assert right[0].text not in traced.texts()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("how", ["bound", "learned"])
def test_an_ordinary_chain_finds_its_documents_prefilled(
    framework: Framework, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = framework.model(**SETTINGS)

    def ask(*found: tuple[Document, ...]) -> Answer:
        return framework.laid_out(framework.retriever(SlowSource(found)), model)(QUESTION)

    if how == "bound":
        framework.bind(PromptLayout())
    else:
        monkeypatch.setattr(framework.engine.integration.prompts, "_bound", None)
        ask(documents(3))
    framework.restart()
    right = documents(3)
    stats = ask(right, right).stats
    summary = framework.summary()
    assert summary.num_confirmed_speculations == 1
    assert summary.overlapped_search_s > 0.3
    assert stats["num_cached_tokens"] > 0.8 * stats["num_prompt_tokens"]


async def test_leaving_leaves_no_request(framework: Framework) -> None:
    right, endless = documents(2), {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    texts = framework.open_answer(over(framework, right, right, **endless), is_async=True)
    while not await anext(texts):
        pass
    await texts.aclose()
    assert await asyncio.to_thread(becomes_idle, framework.engine)

    pair = over(framework, right, right, right, **endless)
    task = asyncio.ensure_future(framework.answer(pair, list(framework.answers)[1]))
    await asyncio.sleep(0.3)  # in the middle of the search
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(becomes_idle, framework.engine)
