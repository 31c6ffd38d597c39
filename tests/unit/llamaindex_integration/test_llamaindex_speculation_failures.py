"""What goes wrong during a search whose answer is under way, and what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import QUESTION, Stage
from tests.support.waiting import until
from tests.unit.llamaindex_integration.ways import wait_until_idle

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)  # twice as long as anything here is waited for


async def test_leaving_while_the_answer_comes_leaves_nothing_behind(
    make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.rules = (lambda _: ENDLESS,)
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: bool(generations())))
    task = asyncio.ensure_future(engine.aquery(QUESTION))
    assert await asyncio.to_thread(until, lambda: bool(server.confirmed))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, server)
    assert len(generations()) == 1


@pytest.mark.parametrize("how", ["closed", "closed unread", "forgotten"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stream_that_is_not_read_to_its_end_ends_the_request(
    is_async: bool, how: str, make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.rules = (lambda _: ENDLESS,)
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: bool(generations())), streaming=True)
    response: Any = await engine.aquery(QUESTION) if is_async else await asyncio.to_thread(engine.query, QUESTION)
    assert server.num_running == 1
    if how == "closed":
        assert (await anext(response.response_gen) if is_async else next(response.response_gen)).strip() == "word"
    if how == "forgotten":
        del response
        gc.collect()
    elif is_async:
        await response.response_gen.aclose()
    else:
        response.response_gen.close()
    await asyncio.sleep(0)  # what was forgotten is closed by the loop
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
    assert len(generations()) == 1
