"""Who asked for what, and what was computed in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.cache.request_state import RequestRecord, arrived_s
from ragcache_core.vllm_plugin.cache.speculations import QueuedSpeculations
from ragcache_core.wire import RequestMetadata


def record(speculation: str | None) -> RequestRecord:
    return RequestRecord(10, 0.0, RequestMetadata((PromptSegment(SegmentKind.QUESTION, 0, 10),), speculation), [])


def admitted(speculation: str | None, waited_s: float) -> RequestRecord:
    return replace(record(speculation), admitted_s=waited_s)


def test_a_request_is_real_unless_it_says_otherwise() -> None:
    it = QueuedSpeculations()
    real = record(None)
    it.on_new_request("r", real)
    it.on_finished("r", real)
    assert not it
    assert not real.is_speculative
    assert set(it.to_dict().values()) == {0}


def test_all_requests_of_a_speculation_are_confirmed_at_once() -> None:
    it = QueuedSpeculations()
    parts = {f"r{i}": record("s") for i in range(3)}
    for request_id, part in parts.items():
        it.on_new_request(request_id, part)
    it.on_computed(parts["r0"], 7)
    it.on_finished("r0", parts["r0"])
    assert it
    confirmed = it.confirm("s")
    assert (set(confirmed.alive), confirmed.ended) == ({"r1", "r2"}, [parts["r0"]])
    assert not it
    assert not any(part.is_speculative for part in parts.values())
    it.on_finished("r1", parts["r1"])
    again = it.confirm("s")
    assert (again.alive, again.ended) == ({}, [])
    assert it.to_dict() == {
        "num_speculative_requests": 3,
        "num_confirmed_speculations": 3,
        "num_speculative_tokens": 7,
        "num_wasted_tokens": 0,
    }


def test_a_confirmation_that_is_faster_than_its_request_is_remembered() -> None:
    it = QueuedSpeculations()
    it.confirm("s")
    late = record("s")
    it.on_new_request("r", late)
    assert late.is_confirmed
    assert not it
    it.on_finished("r", late)
    assert it.to_dict()["num_wasted_tokens"] == 0


def test_memory_is_bounded_and_what_it_lets_go_stays_wasted() -> None:
    it = QueuedSpeculations(max_remembered=2)
    for i in range(4):
        it.confirm(f"early-{i}")
        ended = record(f"ended-{i}")
        it.on_new_request(f"r{i}", ended)
        it.on_computed(ended, 10)
        it.on_finished(f"r{i}", ended)
    assert it.num_wasted_tokens == 40
    assert it.confirm("ended-0").ended == []
    assert it.num_wasted_tokens == 40
    assert len(it.confirm("ended-3").ended) == 1
    assert it.num_wasted_tokens == 30
    for i in range(100):
        same = record("same")
        it.on_new_request(f"same{i}", same)
        it.on_finished(f"same{i}", same)
    assert len(it.confirm("same").ended) == 64
    forgotten = record("early-0")
    it.on_new_request("r", forgotten)
    assert forgotten.is_speculative


def test_of_a_speculation_it_is_told_how_long_the_request_waited_that_was_admitted_first() -> None:
    it = QueuedSpeculations(max_remembered=2)
    first, second = admitted("s", 2.0), admitted("s", 5.0)
    it.on_admitted("first", first)
    it.on_admitted("second", second)
    it.on_admitted("real", admitted(None, 5.0))
    it.confirm("early")
    it.on_admitted("soon", admitted("early", 6.0))
    assert it.take_waited_s() == {"s": 2.0, "early": 6.0}
    assert it.take_waited_s() == {}
    first.paused_s, second.paused_s = 0.5, 8.0
    it.on_admitted("second", second)
    it.on_admitted("first", first)
    assert it.take_waited_s() == {"s": 2.5}, "it goes on after a pause"
    it.on_admitted("other", admitted("other", 1.0))
    it.on_admitted("second", second)
    assert it.take_waited_s() == {"other": 1.0, "s": 13.0}, "what was first is forgotten in the end"


@pytest.mark.parametrize(
    ("age_s", "last_step", "waited_s", "why"),
    [
        (0.003, (9.0, 9.5), 0.0, "the engine was idle when it came"),
        (0.3, (9.5, 9.999), 0.299, "it came during the step, which took that long to end"),
        (2.0, (9.5, 9.999), 0.499, "it was on its way before the step, too, during which it waited"),
        (2.0, (0.0, 0.0), 0.0, "there was no step yet"),
        (2.0, (9.9, 9.5), 0.0, "the step has not ended: the next one is scheduled meanwhile"),
        (-5.0, (9.5, 9.999), 0.0, "the server's clock is ahead"),
    ],
)
def test_a_request_that_came_during_a_step_waited_for_its_end(
    age_s: float, last_step: tuple[float, float], waited_s: float, why: str
) -> None:
    assert 10.0 - arrived_s(10.0, age_s, last_step) == pytest.approx(waited_s), why
