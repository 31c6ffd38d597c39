"""What is done in spare time: nothing of it while the owner has its time for itself, and all of it in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.vllm_plugin.offload import idle_copier as module
from ragcache_core.vllm_plugin.offload.idle_copier import CopyingInSpareTime, SpareTime
from tests.support.waiting import until


@pytest.fixture
def spare_time() -> Iterator[SpareTime]:
    made = SpareTime()
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ragcache-spare-time"]


def count(done: list[int], first: int, number: int, *, pause_s: float = 0.0) -> Iterator[None]:
    for i in range(first, first + number):
        done.append(i)
        time.sleep(pause_s)  # a piece that takes long enough to be met in its middle
        yield


def test_work_goes_on_where_it_was_left_and_stands_still_meanwhile(spare_time: SpareTime) -> None:
    done: list[int] = []
    spare_time.add(count(done, 0, 500, pause_s=0.0002))
    spare_time.add(count(done, 500, 500, pause_s=0.0002))
    seen = [0]
    while len(done) < 1000:
        spare_time.give()
        assert until(lambda: len(done) > seen[-1])
        spare_time.take()
        seen.append(len(done))
        time.sleep(0.002)  # ten pieces' time, in which none may be done
        assert len(done) == seen[-1]
    assert done == list(range(1000))
    assert len(seen) > 5


def test_the_owner_can_do_it_itself(spare_time: SpareTime) -> None:
    done: list[int] = []
    spare_time.add(count(done, 0, 300, pause_s=0.0002))
    spare_time.add(count(done, 300, 5))
    spare_time.give()
    assert until(lambda: done)
    spare_time.do_next()
    assert done == list(range(300))
    spare_time.do_next()
    assert done == list(range(305))


def test_nobody_waits_for_a_thread_where_there_is_nothing_to_do(spare_time: SpareTime) -> None:
    spare_time.give()
    spare_time.take()
    assert spare_time._thread is None


def fail() -> Iterator[None]:
    yield
    raise OSError("no")


def test_what_fails_is_told_to_the_owner_once_and_what_comes_after_it_is_done(spare_time: SpareTime) -> None:
    done: list[int] = []
    spare_time.add(fail())
    spare_time.add(count(done, 0, 3))
    spare_time.give()
    assert until(lambda: spare_time._failure is not None)
    with pytest.raises(OSError, match="no"):
        spare_time.take()
    spare_time.take()
    assert done == []
    spare_time.give()
    assert until(lambda: done == [0, 1, 2])


def test_closing_ends_the_thread_in_the_middle(spare_time: SpareTime) -> None:
    done: list[int] = []
    spare_time.add(count(done, 0, 100_000, pause_s=0.001))
    spare_time.give()
    assert until(lambda: done)
    spare_time.close()
    num_done = len(done)
    spare_time.give()
    time.sleep(0.01)  # ten pieces' time, in which none may be done
    assert len(done) == num_done


class Platform:
    """A platform's worker, which needs a token to be sampled where there is something to compute."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.done: list[int] = []

    def initialize_from_config(self, config: Any) -> None: ...

    def execute_model(self, output: Any) -> Any:
        before = len(self.done)
        time.sleep(0.003)  # it computes, long enough for pieces that were not stopped
        self.seen.append(("execute", len(self.done) - before))
        return "answer" if output == "empty" else None

    def sample_tokens(self, grammar: Any) -> Any:
        before = len(self.done)
        time.sleep(0.003)  # it computes, long enough for pieces that were not stopped
        self.seen.append(("sample", len(self.done) - before))
        return "answer"


class Worker(CopyingInSpareTime, Platform):
    pass


@pytest.mark.parametrize("step", ["full", "empty"])
def test_a_worker_copies_between_its_answer_and_the_next_step(
    step: str, spare_time: SpareTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SimpleNamespace(spare_time=spare_time)
    connector = SimpleNamespace(connector_worker=SimpleNamespace(worker=copies))
    monkeypatch.setattr(module, "connector_of_this_worker", lambda: connector)
    worker = Worker()
    worker.initialize_from_config(None)
    spare_time.add(count(worker.done, 0, 100_000, pause_s=0.0002))
    for _ in range(5):
        num_done = len(worker.done)
        if worker.execute_model(step) is None:
            assert worker.sample_tokens(None) == "answer"
        assert until(lambda before=num_done: len(worker.done) > before)
    spare_time.take()
    kinds = ["execute", "sample"] if step == "full" else ["execute"]
    assert worker.seen == [(kind, 0) for kind in kinds] * 5


@pytest.mark.parametrize("connector", [None, SimpleNamespace(), SimpleNamespace(connector_worker=None)])
def test_a_worker_without_such_copies_has_no_spare_time(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connector_of_this_worker", lambda: connector)
    worker = Worker()
    worker.initialize_from_config(None)
    assert worker.execute_model("full") is None
    assert worker.sample_tokens(None) == "answer"
    assert worker.execute_model("empty") == "answer"
