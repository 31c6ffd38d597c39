"""What the engine says of a request and of its cache, through an Engine and over real HTTP; and when it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from ragcache_core.client import Engine, Generation
from ragcache_core.client.generation import join_chunks
from ragcache_core.errors import EngineError
from ragcache_core.stats import RequestStats
from tests.support.scripted_server import BYTES_PER_TOKEN, THREE_TIERS, ScriptedServer

MESSAGES = [{"role": "user", "content": "Which river ends in the lake of Tar, and who has ever been to its other end?"}]
TEXT = "The river Mel is long. It ends in the lake of Tar, and no one has ever been to its other end so far."


def generate(engine: Engine, prompt: Any) -> Generation:
    return engine.generate(prompt)


def stream(engine: Engine, prompt: Any) -> Generation:
    return join_chunks(list(engine.stream(prompt)))


def agenerate(engine: Engine, prompt: Any) -> Generation:
    return asyncio.run(engine.agenerate(prompt))


def astream(engine: Engine, prompt: Any) -> Generation:
    async def read() -> Generation:
        async with aclosing(engine.astream(prompt)) as chunks:
            return join_chunks([chunk async for chunk in chunks])

    return asyncio.run(read())


Ask = Callable[[Engine, Any], Generation]
every_way = pytest.mark.parametrize("ask", [generate, stream, agenerate, astream])
both = pytest.mark.parametrize("ask", [generate, agenerate])


@every_way
@pytest.mark.parametrize(("prompt", "kind"), [(MESSAGES, "chatcmpl-"), (TEXT, "cmpl-")])
def test_an_answer_reports_which_tier_its_tokens_came_from(
    engine: Engine, server: ScriptedServer, ask: Ask, prompt: Any, kind: str
) -> None:
    ask(engine, prompt)
    stats = ask(engine, prompt).stats
    assert stats.num_cached_tokens > 0
    by_tier = (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens)
    quarter = stats.num_cached_tokens // 4
    assert by_tier == (stats.num_cached_tokens - 2 * quarter, quarter, quarter)
    assert stats.num_loaded_bytes == 2 * quarter * BYTES_PER_TOKEN
    assert stats.num_stored_bytes == stats.num_computed_tokens * BYTES_PER_TOKEN
    assert stats.queue_s == 0.001
    assert server.cache_questions == ["stats", f"requests/{kind}1", f"requests/{kind}2"]


def test_a_time_that_was_not_measured_is_the_engines_own(engine: Engine) -> None:
    engine.generate(MESSAGES)
    unmeasured = RequestStats(9, 0, 2, None, 0.5)
    assert engine.integration.stats.complete(unmeasured, "chatcmpl-1").ttft_s == 0.002


@every_way
def test_plain_vllm_is_called_once_and_then_left_alone(engine: Engine, server: ScriptedServer, ask: Ask) -> None:
    server.cache = None
    for _ in range(3):
        stats = ask(engine, MESSAGES).stats
        assert (stats.num_gpu_tokens, stats.num_loaded_bytes, stats.queue_s) == (None, None, None)
    engine.stats()
    assert server.cache_questions == ["stats"]


@both
def test_a_server_that_gets_the_routes_later_is_queried_again(
    engine: Engine, server: ScriptedServer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.stats.cache_stats._UNSUPPORTED_PAUSE_S", 0.0)
    server.cache_status = 404
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is None
    server.cache_status = 200
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is not None
    assert engine.stats().policy is not None


@both
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_cannot_say_now_is_asked_at_the_next_answer(
    engine: Engine, server: ScriptedServer, ask: Ask, status: int
) -> None:
    server.cache_status = status
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is None
    server.cache_status = 200
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is not None
    server.cache_status = status
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is None
    assert server.cache_questions == ["stats", "stats", "requests/chatcmpl-2", "requests/chatcmpl-3"]


@both
def test_a_request_that_the_engine_forgot_has_no_figures(engine: Engine, server: ScriptedServer, ask: Ask) -> None:
    server._figures = NoMemory()
    stats = ask(engine, MESSAGES).stats
    assert (stats.num_gpu_tokens, stats.num_prompt_tokens > 0) == (None, True)
    assert len(server.cache_questions) == 2


class NoMemory(dict[str, Any]):
    """Figures of requests that are forgotten at once."""

    def __setitem__(self, key: str, value: Any) -> None: ...


@both
def test_a_slow_answer_about_the_cache_delays_one_answer_and_no_other(
    engine: Engine, server: ScriptedServer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.stats.cache_stats._TIMEOUT_S", 0.2)
    server.cache_wait_s = 30.0
    began_s = time.monotonic()
    assert ask(engine, MESSAGES).text
    assert 0.2 <= time.monotonic() - began_s < 10
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is None
    assert server.cache_questions == ["stats"]
    server.cache_wait_s = 0.0
    engine._cache_stats._paused_until_s = 0.0
    assert ask(engine, MESSAGES).stats.num_gpu_tokens is not None


@both
@pytest.mark.parametrize("closed", [True, False])
def test_an_answer_that_is_there_outlives_its_server_and_its_engine(
    engine: Engine, server: ScriptedServer, ask: Ask, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, MESSAGES)
    if closed:
        engine.close()
    else:
        monkeypatch.setattr(engine._api, "root", "http://127.0.0.1:1")
    stats = RequestStats(9, 0, 2, 0.1, 0.5)
    assert engine.integration.stats.complete(stats, "chatcmpl-1") == stats
    assert asyncio.run(engine.integration.stats.acomplete(stats, "chatcmpl-1")) == stats


@pytest.mark.parametrize(
    "figures",
    [{"num_gpu_tokens": -1}, {"num_gpu_tokens": "many"}, {"queue_s": "nan"}, {"num_disk_tokens": 1.5}],
)
def test_figures_that_make_no_sense_are_no_figures(
    engine: Engine, server: ScriptedServer, figures: dict[str, object]
) -> None:
    engine.generate(MESSAGES)
    server._figures["chatcmpl-1"] = {"num_host_tokens": 3, **figures}
    stats = RequestStats(9, 0, 2, None, 0.5)
    assert engine.integration.stats.complete(stats, "chatcmpl-1") == stats


def test_figures_that_an_engine_leaves_out_or_adds_are_no_hindrance(engine: Engine, server: ScriptedServer) -> None:
    engine.generate(MESSAGES)
    server._figures["chatcmpl-1"] = {"num_host_tokens": 3, "num_moon_tokens": 4}
    stats = engine.integration.stats.complete(RequestStats(9, 3, 2, None, 0.5), "chatcmpl-1")
    assert (stats.num_host_tokens, stats.num_disk_tokens) == (3, None)


def test_documents_that_an_engine_does_not_name_are_those_of_the_request(
    engine: Engine, server: ScriptedServer
) -> None:
    """The engine names no document of a request with a salt, and does not say which of several it did not find."""
    engine.generate(MESSAGES)
    spans = [{"id": None, "start": 0, "end": 4}, {"id": None, "start": 4, "end": 9}]
    server._figures["chatcmpl-1"] = {"num_gpu_tokens": 6, "documents": spans}
    for sent, named in ((("a", "b"), ["a", "b"]), (("a", "b", "c"), []), ((), [])):
        stats = engine.integration.stats.complete(RequestStats(9, 6, 2, None, 0.5), "chatcmpl-1", sent)
        assert [each.doc_id for each in stats.documents] == named


def test_an_answer_without_an_id_asks_nothing(engine: Engine, server: ScriptedServer) -> None:
    stats = RequestStats(9, 0, 2, None, 0.5)
    assert engine.integration.stats.complete(stats, None) == stats
    assert server.cache_questions == []


def test_an_id_cannot_lead_to_another_route(engine: Engine, server: ScriptedServer) -> None:
    engine.integration.stats.complete(RequestStats(9, 0, 2, None, 0.5), "../../../metrics?x")
    assert server.cache_questions == ["stats", "requests/..%2F..%2F..%2Fmetrics%3Fx"]


def test_many_answers_at_once_all_have_their_figures(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: (agenerate if i % 2 else generate)(engine, MESSAGES), range(16)))
    assert all(answer.stats.num_gpu_tokens is not None for answer in answers)


async def test_cancelling_a_task_ends_its_question_about_the_cache(engine: Engine, server: ScriptedServer) -> None:
    server.cache_wait_s = 1.5
    chunks: AsyncIterator[Any] = engine.astream(MESSAGES)

    async def read() -> None:
        async for _ in chunks:
            pass

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while not server.cache_questions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# The whole engine


def sync_stats(engine: Engine) -> Any:
    return engine.stats()


def async_stats(engine: Engine) -> Any:
    return asyncio.run(engine.astats())


read_both = pytest.mark.parametrize("read", [sync_stats, async_stats])


@read_both
def test_a_reading_has_the_tiers_and_the_hottest_documents(
    engine: Engine, server: ScriptedServer, read: Callable[[Engine], Any]
) -> None:
    engine.generate(MESSAGES)
    stats = read(engine)
    assert stats.num_prompt_tokens == server.counters["prompt"] > 0
    assert (stats.policy, stats.num_ignored_metadata) == ("mixture", 1)
    assert (stats.num_corrupt_blocks, stats.num_lost_blocks, stats.num_dropped_blocks) == (2, 3, 4)
    assert [t.name for t in stats.tiers] == ["gpu", "host", "disk"]
    assert [t.is_enabled for t in stats.tiers] == [True, True, False]
    assert stats.tiers[1].used_bytes == 6 << 30
    assert [d.doc_id for d in stats.hottest_documents] == ["mel.txt", "zor.md"]
    assert stats.hottest_documents[0].tiers == ("gpu", "host")


@read_both
def test_a_reading_reports_what_the_queue_and_speculation_did(
    engine: Engine, server: ScriptedServer, read: Callable[[Engine], Any]
) -> None:
    said = {
        "num_reordered_requests": 5,
        "max_overtaken": 32,
        "num_requests": 24,
        "num_reordered_prompts": 6,
        "num_followup_turns": 4,
        "num_speculative_requests": 9,
        "num_confirmed_speculations": 7,
        "num_speculative_tokens": 900,
        "num_wasted_tokens": 80,
    }
    earlier = read(engine)
    assert earlier.num_speculative_requests == 0, "an engine of an earlier version says nothing of it"
    assert earlier.reordered_share == 0
    server.cache = {**(server.cache or {}), **said}
    stats = read(engine)
    assert {name: getattr(stats, name) for name in said} == said
    assert {**said, "reordered_share": 0.25}.items() <= stats.to_dict().items()


@read_both
def test_a_reading_of_plain_vllm_has_no_tiers(
    engine: Engine, server: ScriptedServer, read: Callable[[Engine], Any]
) -> None:
    server.cache = None
    assert (read(engine).policy, read(engine).tiers) == (None, ())
    assert server.cache_questions == ["stats"]


@read_both
def test_an_engine_that_fails_to_say_is_an_error_of_a_reading(
    engine: Engine, server: ScriptedServer, read: Callable[[Engine], Any]
) -> None:
    server.cache_status = 500
    with pytest.raises(EngineError, match="answered 500"):
        read(engine)


@read_both
@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ({"tiers": [{"name": "gpu"}]}, "tiers.0.capacity_bytes"),
        ({"hottest_documents": 3}, "hottest_documents"),
        ({"policy": None}, "policy"),
    ],
)
def test_an_engine_of_another_version_is_reported_with_a_hint(
    engine: Engine, server: ScriptedServer, read: Callable[[Engine], Any], broken: dict[str, object], where: str
) -> None:
    server.cache = {**THREE_TIERS, **broken}
    with pytest.raises(EngineError, match=f"cannot be read at '{where}.*install the same version of ragcache"):
        read(engine)
