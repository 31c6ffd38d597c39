"""Threads that are kept for the next call: one call each at a time, and none blocks the end."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

import pytest

from ragcache_core.runtime import daemon_threads
from ragcache_core.runtime.daemon_threads import DaemonThreadPool
from tests.support.waiting import until

TIMEOUT_S = 20


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[DaemonThreadPool]:
    kept = DaemonThreadPool(request.node.name)
    yield kept
    assert until(lambda: kept.num_busy == 0, TIMEOUT_S)


def made(threads: DaemonThreadPool) -> threading.Thread:
    """Return the thread that makes a call, when that has been made."""
    calls: list[threading.Thread] = []
    assert threads.run(lambda: calls.append(threading.current_thread()))
    assert until(lambda: calls and threads.num_busy == 0, TIMEOUT_S)
    return calls[0]


def test_calls_that_last_hold_up_no_other(threads: DaemonThreadPool) -> None:
    end = threading.Event()
    for _ in range(5):
        threads.run(lambda: end.wait(TIMEOUT_S) and None)
    assert threads.num_busy == 5
    called = threading.Event()
    threads.run(called.set)
    assert called.wait(TIMEOUT_S)
    end.set()


def test_a_call_has_the_context_of_who_asks_for_it_and_leaves_none_behind(threads: DaemonThreadPool) -> None:
    said: ContextVar[str] = ContextVar("said", default="nothing")
    heard: list[str] = []

    def hear() -> None:
        heard.append(said.get())
        said.set("left behind")

    token = said.set("question")
    threads.run(hear)
    assert until(lambda: threads.num_busy == 0, TIMEOUT_S)
    said.reset(token)
    threads.run(hear)
    assert until(lambda: len(heard) == 2, TIMEOUT_S)
    assert heard == ["question", "nothing"]


def test_a_thread_that_is_kept_keeps_nothing_alive_that_a_call_was_about(threads: DaemonThreadPool) -> None:
    class Thing:
        def touch(self) -> None:
            pass

    first, thing = made(threads), Thing()
    known = weakref.ref(thing)
    threads.run(thing.touch)
    del thing
    assert until(lambda: threads.num_busy == 0 and gc.collect() >= 0 and known() is None, TIMEOUT_S / 2)
    assert made(threads) is first, "it was kept all the while"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_raises_takes_its_thread_with_it_and_no_other_call(threads: DaemonThreadPool) -> None:
    first = made(threads)
    assert threads.run(lambda: 1 // 0 and None)
    first.join(TIMEOUT_S)
    assert threads.num_busy == 0
    assert made(threads) is not first


def test_calls_at_the_moment_at_which_threads_end_are_all_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "_KEPT_S", 1e-4)
    threads = DaemonThreadPool("at once")
    calls: list[int] = []
    for number in range(2000):
        assert threads.run(partial(calls.append, number))
    assert until(lambda: len(calls) == 2000 and threads.num_busy == 0, TIMEOUT_S)
    assert sorted(calls) == list(range(2000))


def test_a_system_without_threads_reports_it_and_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = DaemonThreadPool("none", most=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threads.run(lambda: None)
    assert threads.num_busy == 0
    assert made(threads).name == "none"


def test_a_fork_has_threads_of_its_own(threads: DaemonThreadPool) -> None:
    made(threads)
    child = multiprocessing.get_context("fork").Process(target=made, args=(threads,))
    child.start()
    child.join(TIMEOUT_S)
    assert child.exitcode == 0


def test_a_call_that_never_returns_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
import threading
from ragcache_core.runtime.daemon_threads import DaemonThreadPool
begun = threading.Event()
DaemonThreadPool("stuck").run(lambda: begun.set() or threading.Event().wait())
assert begun.wait(10)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
