"""Who asked for what, and what was computed in vain."""

from __future__ import annotations

from dataclasses import replace

from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.cache.request_state import RequestState
from ragcache_core.vllm_plugin.cache.speculations import QueuedSpeculations
from ragcache_core.wire import RequestMetadata


def state(speculation: str | None, request_id: str = "r") -> RequestState:
    metadata = RequestMetadata((PromptSegment(SegmentKind.QUESTION, 0, 10),), speculation)
    return RequestState(request_id, 10, 0.0, metadata, [])


def admitted(speculation: str | None, request_id: str, waited_s: float) -> RequestState:
    return replace(state(speculation, request_id), admitted_s=waited_s)


def test_all_requests_of_a_speculation_are_confirmed_at_once() -> None:
    it = QueuedSpeculations()
    first, second, third, other, real = [state(s) for s in ("s", "s", "s", "t", None)]
    for each in (first, second, third, other, real):
        it.on_new_request(each)
    it.on_computed(first, 7)
    it.on_finished(first)
    assert it
    confirmed = it.confirm("s", [real, second, other, third])
    assert (confirmed.alive, confirmed.ended) == ([second, third], [first])
    assert [each.is_speculative for each in (first, second, third, other)] == [False, False, False, True]
    it.on_finished(other)
    assert not it
    it.on_finished(second)
    again = it.confirm("s", [third])
    assert (again.alive, again.ended) == ([], [])
    assert it.to_dict() == {
        "num_speculative_requests": 4,
        "num_confirmed_speculations": 3,
        "num_speculative_tokens": 7,
        "num_wasted_tokens": 0,
    }


def test_a_confirmation_that_is_faster_than_its_request_is_remembered() -> None:
    it = QueuedSpeculations()
    it.confirm("s", [])
    late = state("s")
    it.on_new_request(late)
    assert late.is_confirmed
    assert not it
    it.on_finished(late)
    assert it.to_dict()["num_wasted_tokens"] == 0


def test_memory_is_bounded_and_what_it_lets_go_stays_wasted() -> None:
    it = QueuedSpeculations(max_remembered=2)
    for i in range(4):
        it.confirm(f"early-{i}", [])
        ended = state(f"ended-{i}")
        it.on_new_request(ended)
        it.on_computed(ended, 10)
        it.on_finished(ended)
    assert it.num_wasted_tokens == 40
    assert it.confirm("ended-0", []).ended == []
    assert it.num_wasted_tokens == 40
    assert len(it.confirm("ended-3", []).ended) == 1
    assert it.num_wasted_tokens == 30
    for _ in range(100):
        same = state("same")
        it.on_new_request(same)
        it.on_finished(same)
    assert len(it.confirm("same", []).ended) == 64
    forgotten = state("early-0")
    it.on_new_request(forgotten)
    assert forgotten.is_speculative


def test_a_tenants_confirmations_evict_no_other_tenants() -> None:
    it = QueuedSpeculations(max_remembered=2)
    it.confirm("early", [], "a")
    ended = replace(state("ended"), tenant="a")
    it.on_new_request(ended)
    it.on_finished(ended)
    first = replace(admitted("first", "r1", 1.0), tenant="a")
    it.on_admitted(first)
    for i in range(9):
        it.confirm(f"flood-{i}", [], "b")
        other = replace(state(f"other-{i}"), tenant="b")
        it.on_new_request(other)
        it.on_finished(other)
        it.on_admitted(replace(admitted(f"more-{i}", f"m{i}", 1.0), tenant="b"))
    late = replace(state("early"), tenant="a")
    it.on_new_request(late)
    assert late.is_confirmed
    assert it.confirm("ended", [], "b").ended == [], "another tenant's"
    assert it.confirm("ended", [], "a").ended == [ended]
    it.take_waited_s()
    it.on_admitted(replace(admitted("first", "r2", 5.0), tenant="a"))
    assert it.take_waited_s() == {}, "the first of them counts"


def test_a_speculation_reports_the_wait_of_the_first_admitted_request() -> None:
    it = QueuedSpeculations(max_remembered=2)
    first, second = admitted("s", "first", 2.0), admitted("s", "second", 5.0)
    it.on_admitted(first)
    it.on_admitted(second)
    it.on_admitted(admitted(None, "real", 5.0))
    it.confirm("early", [])
    it.on_admitted(admitted("early", "soon", 6.0))
    assert it.take_waited_s() == {"s": (2.0, None), "early": (6.0, None)}
    assert it.take_waited_s() == {}
    first.paused_s, second.paused_s = 0.5, 8.0
    it.on_admitted(second)
    it.on_admitted(first)
    assert it.take_waited_s() == {"s": (2.5, None)}, "it goes on after a pause"
    it.on_admitted(admitted("other", "other", 1.0))
    it.on_admitted(second)
    assert it.take_waited_s() == {"other": (1.0, None), "s": (13.0, None)}, "what was first is forgotten in the end"
