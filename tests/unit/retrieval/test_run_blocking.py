"""A coroutine is run for a caller that blocks: under a running loop too, interruptible, and without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest

from ragcache_core.retrieval.threads import in_thread, run_blocking
from ragcache_core.runtime.daemon_threads import DaemonThreadPool

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


@pytest.mark.parametrize("error", [ValueError("k is 0"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_what_the_coroutine_raises_is_raised(error: BaseException) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)  # raised in a later step of the loop
        raise error

    with pytest.raises(type(error)):
        run_blocking(fail)


def test_what_fails_before_there_is_a_coroutine_is_raised() -> None:
    def make() -> None:
        raise ValueError("no query")

    with pytest.raises(ValueError, match="no query"):
        run_blocking(make)  # type: ignore[arg-type]  (no coroutine)


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


async def test_a_call_that_is_given_up_before_its_thread_runs_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(DaemonThreadPool, "run", lambda _, call: late.append(call))
    task = asyncio.ensure_future(in_thread(lambda: "found"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (call,) = late
    call()
