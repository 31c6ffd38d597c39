"""Starts: a request is made in a thread while the engine is asked, and sent, or given up, as that decides."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from ragcache_core.client.speculation.client import StartedSpeculation
from ragcache_core.types import Document
from tests.unit.client.pipeline_scene import (
    STEP_S,
    ScriptedDoor,
    ScriptedSpeculator,
    Source,
    document,
    join_starts,
    run,
)

# What is made ahead


async def test_a_request_is_prepared_during_the_load_query_and_sent_after_it() -> None:
    speculator, source, door = ScriptedSpeculator(), Source("a", "a", "a", "a"), ScriptedDoor()
    door.answers_after_s = 2.5 * STEP_S
    seen: list[tuple[int, int]] = []
    for i in (1, 3):
        source.between[i] = lambda: seen.append((speculator.num_calls, len(speculator.sent)))
    report = (await run(source, door, speculator)).report
    assert seen == [(1, 0), (1, 1)]
    assert (report.is_confirmed, report.num_started, report.num_cancelled) == (True, 1, 0)


async def test_what_was_made_from_other_documents_is_never_sent() -> None:
    speculator, door = ScriptedSpeculator(), ScriptedDoor()
    door.answers_after_s = 4.5 * STEP_S
    report = (await run(Source(*"aabbbbbb"), door, speculator)).report
    join_starts()
    assert (speculator.num_calls, speculator.shown()) == (2, [("b",)])
    assert (report.is_confirmed, report.num_started, report.num_cancelled) == (True, 1, 0)


async def test_no_thread_waits_for_room() -> None:
    speculator, source, door = ScriptedSpeculator(), Source(*"aaaaaaa"), ScriptedDoor(num_pending=2)
    door.answers_after_s = 3.5 * STEP_S
    source.between[6] = join_starts
    report = (await run(source, door, speculator)).report
    assert (speculator.num_calls, speculator.sent) == (1, [])
    assert report.skipped_because == "the engine had no room: real requests that wait for their first token: 2"


@pytest.mark.parametrize("error", [None, RuntimeError("the index is gone")], ids=["final", "failed"])
async def test_a_search_that_ends_before_the_load_is_reported_sends_nothing(
    error: Exception | None,
) -> None:
    speculator, door = ScriptedSpeculator(), ScriptedDoor()
    door.answers_after_s = 100 * STEP_S
    with suppress(RuntimeError):
        await run(Source("a", "a", error=error), door, speculator)
    join_starts()
    assert (speculator.num_calls, speculator.sent) == (1, [])


async def test_a_request_that_cannot_be_built_is_reported_when_due_and_built_again() -> None:
    speculator, door = ScriptedSpeculator(error=KeyError("no such template")), ScriptedDoor()
    door.answers_after_s = 1.5 * STEP_S
    report = (await run(Source(*"aaaaaa"), door, speculator)).report
    assert speculator.num_calls == 2
    assert report.skipped_because == "the speculator raised KeyError: 'no such template'"


def test_a_start_that_is_abandoned_while_its_request_is_made_sends_nothing() -> None:
    speculator = ScriptedSpeculator(takes_s=STEP_S)
    started = StartedSpeculation(speculator, (document("a"),))
    started.send(number=0, stage=0)
    started.abandon()
    join_starts()
    assert (started.is_alive, speculator.sent) == (False, [])


async def test_the_making_of_a_request_is_not_search_that_was_not_hidden() -> None:
    speculator, source = ScriptedSpeculator(), Source("a", "a", "a")
    source.between[1] = lambda: setattr(speculator.sent[0], "making_s", STEP_S / 2)
    result = await run(source, ScriptedDoor(), speculator)
    [sent] = speculator.sent
    assert result.report.non_overlapped_search_s == pytest.approx(sent.sent_s - result.began_s - STEP_S / 2)


# What hangs


@pytest.fixture
def stuck() -> Iterator[Callable[[int], list[StartedSpeculation]]]:
    """Return what begins that many starts that hang until the test's end."""
    end, begun = threading.Event(), threading.Semaphore(0)
    join_starts()  # those of other tests

    class StuckSpeculator:
        def prepare(self, documents: Sequence[Document]) -> None:
            begun.release()
            end.wait()

    def begin(number: int) -> list[StartedSpeculation]:
        starts = [StartedSpeculation(StuckSpeculator(), (document("a"),)) for _ in range(number)]
        assert all(begun.acquire(timeout=10) for _ in starts)
        return starts

    yield begin
    end.set()
    join_starts()


async def test_starts_that_hang_do_not_hold_up_those_of_others(
    stuck: Callable[[int], list[StartedSpeculation]],
) -> None:
    stuck(31)
    assert (await run(Source("a", "a"), ScriptedDoor(), ScriptedSpeculator())).report.is_confirmed


async def test_no_more_threads_start_when_too_many_hang_and_the_search_goes_on(
    stuck: Callable[[int], list[StartedSpeculation]],
) -> None:
    stuck(32)
    speculator = ScriptedSpeculator()
    report = (await run(Source("a", "a"), ScriptedDoor(), speculator)).report
    assert speculator.num_calls == 0
    assert report.skipped_because is not None
    assert "32 other starts are on their way: see whether the speculator hangs" in report.skipped_because


async def test_only_a_start_that_began_lately_is_waited_for(stuck: Callable[[int], list[StartedSpeculation]]) -> None:
    [started] = stuck(1)
    began_s = time.perf_counter()
    await started.wait_until_sent(0.2)
    assert 0.1 < time.perf_counter() - began_s < 0.4
    began_s = time.perf_counter()
    await started.wait_until_sent(0.2)
    assert time.perf_counter() - began_s < 0.1
    assert not started.is_sent


def test_a_start_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
        import threading
        from ragcache_core.client.speculation.client import StartedSpeculation

        class Stuck:
            def prepare(self, documents):
                threading.Event().wait()

        StartedSpeculation(Stuck(), ())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)
