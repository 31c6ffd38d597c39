"""Speculation on the real engine: the same tokens, computed once, and nothing left of what was given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragcache_core import Document, PromptLayout, SegmentKind
from ragcache_core.client import Engine
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_integrations.langchain import ChatRAGCache
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.engine.search_scene import becomes_idle
from tests.support.asking_ahead import speculate, warm
from tests.support.waiting import until

LAYOUT = PromptLayout()
LONG: dict[str, Any] = {"max_tokens": 1500, "n": 4, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
LONG_ANSWER = {**LONG, "n": 1}
"""Seconds of work."""
ATTEMPTS = 12
"""A server beside a model on few cores tells nothing for a while now and then: then all is over before it is seen, and
the test begins again."""
TIMEOUT_S = 30.0


def documents(mark: str, num_sentences: int = 30) -> list[Document]:
    """Two documents that no other test has put in the cache."""
    return [
        Document(f"{name}-{mark}", f"{name} was founded by {mark}. {name} makes clocks. " * num_sentences)
        for name in ("Zorval", "Tenrik")
    ]


def figures(engine: Engine) -> dict[str, int]:
    """Return what the engine counts of speculation."""
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    report: dict[str, int] = engine.http_client().get(f"{engine.base_url}/ragcache/stats", headers=headers).json()
    return report


def test_a_request_that_joins_its_speculation_gives_the_tokens_of_one_that_does_not(engine: Engine) -> None:
    assert asyncio.run(engine.integration.speculation.acan_speculate())
    prompt = LAYOUT.render(engine.tokenizer, documents("Anna"), "Who founded Zorval?")
    before = figures(engine)
    speculation = speculate(engine, lambda: engine.generate(prompt, max_tokens=12))
    joined = engine.generate(prompt, max_tokens=12)
    alone = engine.generate(prompt, max_tokens=12)
    assert joined.text == alone.text
    assert joined.stats.num_cached_tokens < 64 < alone.stats.num_cached_tokens
    assert until(lambda: figures(engine)["num_confirmed_speculations"] > before["num_confirmed_speculations"])
    assert figures(engine)["num_speculative_requests"] == before["num_speculative_requests"] + 1
    assert until(lambda: speculation.started_s is not None)
    assert speculation.started_s is not None
    assert speculation.started_s >= speculation.sent_s


def seeded(engine: Engine, mark: str) -> Callable[[], str]:
    """Return what asks for a long prompt that no other test asks for, with a seed, at a temperature."""
    prompt = LAYOUT.render(engine.tokenizer, documents(mark, 50), "Who founded Zorval?")
    assert len(prompt.token_ids) > 1100
    return lambda: engine.generate(prompt, max_tokens=12, temperature=1.5, seed=7).text


def test_a_seeded_request_joins_a_speculation_whose_prompt_took_several_steps(engine: Engine) -> None:
    ask = seeded(engine, "Emil")
    before, num_restarts = figures(engine), engine.num_restarts()
    speculate(engine, ask)
    joined = ask()
    assert joined == ask(), "the tokens of a prompt that was cached, and so computed in one step"
    assert engine.num_restarts() == num_restarts
    assert until(lambda: figures(engine)["num_confirmed_speculations"] > before["num_confirmed_speculations"])


def test_seeded_prompts_that_share_a_step_have_the_answers_that_they_have_alone(engine: Engine) -> None:
    asks = [seeded(engine, mark) for mark in ("Fritz", "Greta", "Hanna", "Ida")]
    with ThreadPoolExecutor(len(asks)) as threads:  # together more than a step computes, so some are cut
        together = list(threads.map(lambda ask: ask(), asks))
    assert together == [ask() for ask in asks]


@pytest.mark.slow
@pytest.mark.alone
def test_a_speculation_without_room_waits_until_there_is(engine: Engine) -> None:
    for _ in range(ATTEMPTS):
        assert becomes_idle(engine)
        with closing(engine.stream("Tenrik", **LONG)) as real:
            next(real)
            has_shown = _takes_all_room(engine)
            speculation = speculate(engine, lambda: engine.generate("Zorval of Tenrik", max_tokens=4))
            waited_s = _while_waiting(engine, 1, real)
            has_shown = has_shown and waited_s > 0.0 and speculation.started_s is None
        is_begun = _begins(speculation)
        speculation.cancel()  # else its whole answer is kept for a while
        if has_shown:
            break
    assert has_shown, "it never waited beside an answer"
    assert is_begun
    assert speculation.started_s is not None
    assert speculation.started_s - speculation.sent_s >= waited_s
    assert becomes_idle(engine)


@pytest.mark.slow
@pytest.mark.alone
def test_a_speculation_that_is_preempted_pauses_until_there_is_room_again(engine: Engine) -> None:
    for _ in range(ATTEMPTS):
        assert becomes_idle(engine)
        speculation = speculate(engine, lambda: engine.generate("Zorval", **LONG_ANSWER))
        assert _begins(speculation)
        began_s = speculation.started_s or 0.0
        has_shown = not speculation.is_done
        with closing(engine.stream("Tenrik", **LONG)) as real:
            next(real)
            has_shown = has_shown and _takes_all_room(engine)
            paused_s = _while_waiting(engine, 1, real)
            has_shown = has_shown and paused_s > 0.0 and speculation.started_s == began_s
        is_resumed = has_shown and _begins(speculation, after_s=began_s)
        speculation.cancel()
        if has_shown:
            break
    assert has_shown, "it never paused beside an answer"
    assert is_resumed
    assert (speculation.started_s or 0.0) - began_s >= paused_s
    assert becomes_idle(engine)


def _begins(speculation: Speculation, after_s: float | None = None) -> bool:
    """Return whether the engine soon tells that it began, or began again."""
    return until(lambda: speculation.started_s != after_s, TIMEOUT_S)


def _takes_all_room(engine: Engine) -> bool:
    """Return whether a real answer leaves no room on a CPU; a GPU has some beside it, and the test nothing to show."""

    def is_full() -> bool:
        load = asyncio.run(engine.integration.speculation.apending_prefills())
        return load is not None and not load.has_room

    if torch.cuda.is_available() and not is_full():
        pytest.skip("a GPU has room beside an answer")
    return until(is_full)


def _while_waiting(engine: Engine, num_waiting: int, real: Iterator[object]) -> float:
    """Return for how many seconds at least that many requests waited, while some of a real answer came; 0 if unseen."""

    def is_waiting() -> bool:
        stats = engine.stats()
        return (stats.num_running, stats.num_waiting) == (LONG["n"], num_waiting)

    if not until(is_waiting):
        return 0.0
    since_s = time.perf_counter()
    for _ in range(10):
        next(real, None)
    return time.perf_counter() - since_s


@pytest.mark.slow
@pytest.mark.alone
def test_the_engine_reports_when_it_began_while_it_still_answers(engine: Engine) -> None:
    for _ in range(ATTEMPTS):
        speculation = speculate(engine, lambda: engine.generate("Zorval", **LONG_ANSWER))
        assert _begins(speculation)
        was_done = speculation.is_done
        speculation.cancel()
        assert becomes_idle(engine)
        if not was_done:
            break
    assert not was_done
    assert speculation.started_s is not None
    assert speculation.started_s >= speculation.sent_s


@pytest.mark.parametrize("library", ["langchain", "llamaindex"])
async def test_the_libraries_join_in_any_way_of_asking(engine: Engine, library: str) -> None:
    question = f"{documents(f'Boris of {library}')[0].text}\n\nWho founded Zorval?"
    if library == "langchain":
        llm: Any = ChatRAGCache(engine=engine, max_tokens=8, temperature=0)
    else:
        llm = RAGCacheLLM(engine=engine, max_tokens=8, temperature=0)
    before = figures(engine)["num_speculative_requests"]

    async def text() -> str:
        if library == "langchain":
            return "".join([str(chunk.content) async for chunk in llm.astream(question)])
        return "".join([chunk.delta or "" async for chunk in await llm.astream_complete(question)])

    def begin() -> object:
        return next(iter(llm.stream(question) if library == "langchain" else llm.stream_complete(question)))

    await asyncio.to_thread(speculate, engine, begin)
    joined = await text()
    assert not engine._speculations
    assert joined == await text()
    assert await asyncio.to_thread(until, lambda: figures(engine)["num_speculative_requests"] == before + 1)


def test_a_warmed_prefix_is_found_cached_by_the_request_that_begins_with_it(engine: Engine) -> None:
    shown = documents("Clara")
    prompt = LAYOUT.render(engine.tokenizer, shown, "Who founded Tenrik?")
    done: list[Speculation] = []
    last = [s for s in prompt.segments if s.kind is SegmentKind.DOCUMENT][-1]
    known = replace(
        prompt,
        token_ids=prompt.token_ids[: last.end],
        segments=tuple(s for s in prompt.segments if s.end <= last.end),
    )
    warm(engine, known).add_done_callback(done.append)
    assert until(lambda: done)
    assert not done[0].is_failed
    answer = engine.generate(prompt, max_tokens=4)
    assert answer.stats.documents[0].num_cached_tokens == answer.stats.documents[0].num_tokens
    assert answer.stats.num_cached_tokens > 0.9 * answer.stats.num_prompt_tokens


def test_a_cancelled_speculation_and_a_left_stream_leave_nothing_in_the_engine(engine: Engine) -> None:
    prompt = LAYOUT.render(engine.tokenizer, documents("Dora", 10), "Who?")
    given_up = speculate(engine, lambda: engine.generate(prompt, **LONG_ANSWER))
    assert until(lambda: given_up.response.has_bytes)
    given_up.cancel()
    assert becomes_idle(engine)
    left = speculate(engine, lambda: engine.generate(prompt, **LONG_ANSWER))
    stream = engine.stream(prompt, **LONG_ANSWER)
    next(stream)
    stream.close()
    assert until(lambda: left.is_done)  # at once, unless a starved server told of no token before the last
    assert becomes_idle(engine)
    load = asyncio.run(engine.integration.speculation.apending_prefills())
    assert load is not None
    assert load.num_pending_prefills == 0
