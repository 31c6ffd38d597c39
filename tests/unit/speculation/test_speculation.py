"""Algorithm 2 as a state machine: Theorem 5.1's cases, and what must hold whatever happens in whatever order."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.speculation import Action, Cancel, Confirm, Generate, SpeculativePipeline, Start

MAX_PREFILL_BS = 2
NO_ROOM = MAX_PREFILL_BS


def pipeline(**settings: int) -> SpeculativePipeline[str]:
    return SpeculativePipeline(**{"max_prefill_bs": MAX_PREFILL_BS, **settings})


# Theorem 5.1


def test_case_1_an_empty_pool_and_the_final_documents_generate_at_once() -> None:
    assert pipeline().on_stage("A", is_final=True, num_pending=0) == [Generate("A")]


def test_case_2_a_full_pool_and_documents_that_may_change_defer_the_start() -> None:
    search = pipeline()
    assert search.on_stage("A", is_final=False, num_pending=NO_ROOM) == []
    assert search.is_deferred
    assert search.on_load(NO_ROOM) == []
    assert search.on_load(NO_ROOM - 1) == [Start(0, "A")]
    assert not search.is_deferred


def test_case_3_a_full_pool_and_the_final_documents_generate_at_once() -> None:
    assert pipeline().on_stage("A", is_final=True, num_pending=100) == [Generate("A")]


def test_case_4_an_empty_pool_and_documents_that_may_change_start_a_speculation() -> None:
    assert pipeline().on_stage("A", is_final=False, num_pending=0) == [Start(0, "A")]


# Algorithm 2


def test_the_search_of_figure_11_cancels_once_and_confirms() -> None:
    search: SpeculativePipeline[tuple[int, ...]] = SpeculativePipeline(max_prefill_bs=1)
    stages = [(1, 3), (1, 2), (1, 2), (1, 2)]
    actions = [search.on_stage(docs, is_final=i == 3, num_pending=0) for i, docs in enumerate(stages)]
    assert actions == [[Start(0, (1, 3))], [Cancel(0), Start(1, (1, 2))], [], [Confirm(1)]]


# Failures


# Whatever happens in whatever order


@dataclass(frozen=True)
class Stage:
    candidates: str
    num_pending: int
    is_final: bool = False
    is_worthwhile: bool = True


@dataclass(frozen=True)
class Load:
    num_pending: int


@dataclass(frozen=True)
class Limit:
    """The engine allows another number of pending prefills from now on."""

    max_prefill_bs: int


@dataclass(frozen=True)
class Fail:
    """The living speculation fails, or the one before it does, late."""

    is_previous: bool = False


@dataclass(frozen=True)
class Close:
    pass


Event = Stage | Load | Limit | Fail | Close


@dataclass
class Engine:
    """What the actions do, judged by nothing but the events and the promises."""

    max_failures: int
    started: dict[int, str] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    failed: int = 0
    confirmed: list[int] = field(default_factory=list)
    generated: list[str] = field(default_factory=list)
    shown: str | None = None
    is_worthwhile: bool = False
    is_final: bool = False
    is_closed: bool = False

    @property
    def is_finished(self) -> bool:
        return self.is_final or self.is_closed

    def run(self, search: SpeculativePipeline[str], event: Event) -> None:
        num_started = len(self.started)
        room = True
        match event:
            case Stage(candidates, num_pending, is_final, is_worthwhile):
                is_sent = any(self.started[n] == candidates for n in self.live)
                self.is_worthwhile = is_worthwhile or is_sent
                self.shown, self.is_final, room = candidates, is_final, num_pending < search.max_prefill_bs
                actions = search.on_stage(
                    candidates, is_final=is_final, num_pending=num_pending, is_worthwhile=is_worthwhile
                )
            case Load(num_pending):
                room = num_pending < search.max_prefill_bs
                actions = search.on_load(num_pending)
            case Limit(max_prefill_bs):
                search.max_prefill_bs, room, actions = max_prefill_bs, False, []
            case Fail(is_previous):
                room = False
                number = len(self.started) - (2 if is_previous else 1)
                self.failed += number in self.live and not self.confirmed
                self.live.discard(number)
                actions = search.on_failed(number)
            case Close():
                self.is_closed = True
                actions = search.on_closed()
        for action in actions:
            self.act(action)
        assert room or len(self.started) == num_started, "started without room"
        assert len(self.live) <= 1
        assert len(self.confirmed) + len(self.generated) == self.is_final, "exactly one answer, once all is final"
        assert not (self.is_finished and search.is_deferred)
        assert all(self.started[n] == self.shown for n in self.live), "what lives is what was shown last"
        if self.is_final and not self.confirmed:
            assert self.generated == [self.shown]
        if self.is_finished:
            assert self.live <= set(self.confirmed), "all that was started is confirmed, cancelled or failed"
        elif room and self.is_worthwhile and self.failed < self.max_failures:
            assert self.live, "there was room, and the candidates stand"

    def act(self, action: Action[str]) -> None:
        match action:
            case Start(number, candidates):
                assert not self.live
                assert not self.is_finished
                assert number not in self.started
                assert candidates == self.shown
                assert self.is_worthwhile
                assert self.failed < self.max_failures
                self.started[number] = candidates
                self.live.add(number)
            case Cancel(number):
                self.live.remove(number)
            case Confirm(number):
                assert self.is_final
                assert number in self.live
                assert self.started[number] == self.shown
                self.confirmed.append(number)
            case Generate(candidates):
                assert self.is_final
                assert not self.live
                self.generated.append(candidates)


def play(events: list[Event], *, max_failures: int = 2) -> Engine:
    search = pipeline(max_failures=max_failures)
    engine = Engine(max_failures)
    for event in events:
        if isinstance(event, Stage) and engine.is_finished:
            continue
        engine.run(search, event)
    return engine


@pytest.mark.parametrize("max_failures", [1, 2, 3])
def test_every_interleaving_of_six_stages_keeps_every_promise(max_failures: int) -> None:
    """Exhaustive: each event in each state that any order of events leads to; states that differ in numbers are one."""
    num_stages = 6
    others: list[Event] = [Load(0), Load(NO_ROOM), Fail(), Fail(is_previous=True), Close()]
    others += [Limit(0), Limit(NO_ROOM), Limit(NO_ROOM + 1)]
    seen: set[tuple[object, ...]] = set()
    reached = [(pipeline(max_failures=max_failures), Engine(max_failures), 0)]
    confirmed = generated = 0
    while reached:
        search, engine, stage = reached.pop()
        yes_no = (False, True)
        stages = [Stage(*of) for of in product("ABC", (0, NO_ROOM), yes_no, yes_no)]
        can_go_on = not engine.is_finished and stage < num_stages
        for event in [*others, *(s for s in stages if can_go_on and (s.is_final or stage < num_stages - 1))]:
            next_search, next_engine = deepcopy(search), deepcopy(engine)
            next_engine.run(next_search, event)
            next_stage = stage + isinstance(event, Stage)
            state = (next_stage, *_state(next_search), *_state(next_engine))
            if state not in seen:
                seen.add(state)
                reached.append((next_search, next_engine, next_stage))
                confirmed += bool(next_engine.confirmed)
                generated += bool(next_engine.generated)
    assert {state[0] for state in seen} == set(range(num_stages + 1))
    assert confirmed
    assert generated


def _state(thing: SpeculativePipeline[str] | Engine) -> tuple[object, ...]:
    """Return all that decides what comes next: not the numbers of speculations, and of those only what lives."""
    match thing:
        case Engine():
            live = tuple(thing.started[n] for n in thing.live)
            ends = thing.is_closed, bool(thing.confirmed), bool(thing.generated)
            return thing.shown, thing.is_worthwhile, thing.failed, live, *ends
        case _:
            own = sorted((name, value) for name, value in vars(thing).items() if name != "_num_started")
            return tuple(value.candidates if isinstance(value, Start) else value for _, value in own)


EVENTS = st.one_of(
    st.builds(Stage, st.sampled_from("ABC"), st.integers(0, 3), st.just(False), st.booleans()),
    st.builds(Limit, st.integers(0, 3)),
    st.builds(Load, st.integers(0, 3)),
    st.builds(Fail, st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=18),
    end=st.sampled_from([Stage("A", 0, is_final=True), Stage("B", 9, is_final=True), Close()]),
    after=st.lists(st.one_of(st.builds(Load, st.integers(0, 3)), st.builds(Fail), st.just(Close())), max_size=4),
    max_failures=st.integers(0, 3),
)
def test_any_order_of_events_keeps_every_promise(
    events: list[Event], end: Event, after: list[Event], max_failures: int
) -> None:
    played = play([*events, end, *after], max_failures=max_failures)
    assert played.is_final == isinstance(end, Stage)
    assert len(played.confirmed) + len(played.generated) == played.is_final
