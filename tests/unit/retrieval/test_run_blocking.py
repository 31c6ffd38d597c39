"""A coroutine is run for a caller that blocks: under a running loop too, interruptible, and without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from ragcache_core.retrieval.threads import run_blocking

QUESTION: ContextVar[str] = ContextVar("QUESTION")


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


async def double(number: int) -> int:
    await asyncio.sleep(0)  # it really waits
    return 2 * number


def test_it_returns_the_result_with_and_without_a_running_loop() -> None:
    async def caller() -> int:
        return run_blocking(lambda: double(4))

    assert run_blocking(lambda: double(3)) == 6
    assert asyncio.run(caller()) == 8


def test_it_runs_in_a_named_thread_with_a_copy_of_the_callers_context() -> None:
    async def look() -> tuple[str, str]:
        asked = QUESTION.get()
        QUESTION.set("another")
        return asked, threading.current_thread().name

    QUESTION.set("Who keeps the lighthouse?")
    asked, thread = run_blocking(look)
    assert asked == QUESTION.get() == "Who keeps the lighthouse?"
    assert thread.startswith("ragcache-blocking")


def test_tasks_that_the_coroutine_leaves_are_ended() -> None:
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)  # until it is cancelled
        finally:
            ended.set()

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)  # it begins
        return task

    assert run_blocking(main).cancelled()
    assert ended.is_set()


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_clean_up() -> None:
    events: list[str] = []

    async def search() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)  # until it is interrupted
        except asyncio.CancelledError:
            events.append("cancelled")
            await asyncio.sleep(0.01)  # a clean-up that takes its time
            events.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        run_blocking(search)
    assert events == ["cancelled", "cleaned up"]
