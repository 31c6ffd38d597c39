"""``engine.batch``: answers in the caller's order, requests in that of their prefixes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.client.generation import Prompt
from ragcache_core.errors import ConfigError, RequestRejectedError
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from tests.support.scripted_server import Refusal, Reply, ScriptedServer, Seen
from tests.support.waiting import until

DOCUMENTS = [Document(name, f"{name} is a river. " * 9) for name in ("mel", "oru", "tar")]


@pytest.fixture
def prompts() -> list[Prompt]:
    """Three questions about each document, in no order."""
    made = [PromptLayout().messages([document], f"Number {i}?") for document in DOCUMENTS for i in range(3)]
    random.Random(0).shuffle(made)
    return list(made)


async def test_answers_are_those_of_single_requests_in_the_callers_order(
    engine: Engine, server: ScriptedServer, prompts: list[Prompt]
) -> None:
    expected = [engine.generate(prompt, max_tokens=99).text for prompt in prompts]
    for answers in (
        engine.batch(prompts, max_tokens=99),  # a loop is running here
        await engine.abatch(prompts, max_tokens=99),
    ):
        assert [answer.text for answer in answers] == expected
    assert engine.batch([]) == []


def test_prompts_with_a_common_prefix_follow_each_other(
    engine: Engine, server: ScriptedServer, prompts: list[Prompt]
) -> None:
    mixed: list[Prompt] = [*prompts, "a text", PromptLayout().render(engine.tokenizer, DOCUMENTS[:1], "Who?")]
    assert len(engine.batch(mixed, max_concurrency=1)) == len(mixed)
    chats = [request.user_text for request in server.requests if "messages" in request.body]
    assert chats == sorted(chats)
    assert len(chats) == len(prompts)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_in_flight_than_allowed(
    engine: Engine, server: ScriptedServer, prompts: list[Prompt], limit: int
) -> None:
    most = 0

    def count(_request: Seen) -> Reply:
        nonlocal most
        most = max(most, server.num_running)
        return Reply("yes", wait_s=0.02)

    server.rules = (count,)
    engine.batch(prompts, max_concurrency=limit)
    assert 1 <= most <= limit


def test_an_exception_is_raised_and_ends_the_batch_or_takes_the_place_of_its_answer(
    engine: Engine, server: ScriptedServer, prompts: list[Prompt]
) -> None:
    text = str(prompts[4][1]["content"])  # type: ignore[index]
    server.rules = (lambda seen: Refusal(400, "not this one") if seen.user_text == text else None,)
    answers = engine.batch(prompts, return_exceptions=True)
    assert [i for i, answer in enumerate(answers) if isinstance(answer, RequestRejectedError)] == [4]
    server.clear()
    with pytest.raises(RequestRejectedError, match="not this one"):
        engine.batch(prompts, max_concurrency=1)
    assert len(server.requests) < len(prompts)
    wrong: list[Any] = [*prompts[:1], 7]
    assert isinstance(engine.batch(wrong, return_exceptions=True)[1], ConfigError)


async def test_a_cancelled_batch_ends_its_requests(
    engine: Engine, server: ScriptedServer, prompts: list[Prompt]
) -> None:
    server.rules = (lambda _: Reply("late", wait_s=60),)
    task = asyncio.create_task(engine.abatch(prompts, max_concurrency=2))
    assert await asyncio.to_thread(until, lambda: server.num_running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [("one text", {}, "prompts is"), (["a", 7], {}, "the prompt is 7"), (["a"], {"max_concurrency": 0}, "max_conc"),
     (["a"], {"max_concurrency": True}, "max_conc"), (["a"], {"n": 2}, "n is 2"), (["a"], {"top_kk": 2}, "top_kk")],
)  # fmt: skip
def test_what_is_no_batch_is_refused(
    engine: Engine, server: ScriptedServer, prompts: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        engine.batch(prompts, **options)
    assert server.requests == []
