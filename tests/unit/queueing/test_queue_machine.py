"""Random traffic through the queue, against a model that keeps the log of all pops and looks everything up in it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core.queueing import CacheAwareQueue

PRIORITIES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])


@dataclass(eq=False)
class Waiting:
    """A request; ``place`` is its arrival, negative once it was preempted."""

    place: int
    priority: float


@dataclass(eq=False)
class Pop:
    """One pop: who was waiting and had arrived before, and whether it still counts."""

    overtaken: list[Waiting]
    is_undone: bool = False


class QueueMachine(RuleBasedStateMachine):
    """Requests arrive, are tried, served, preempted and aborted, and what is cached changes all the time."""

    @initialize(window=st.integers(0, 4), are_equal=st.booleans())
    def start(self, window: int, are_equal: bool) -> None:
        self.window = window
        self.are_equal = are_equal
        self.queue: CacheAwareQueue[Waiting] = CacheAwareQueue(lambda item: item.priority, window=window)
        self.waiting: list[Waiting] = []
        self.tried: list[tuple[Waiting, Pop]] = []
        self.running: list[Waiting] = []
        self.log: list[Pop] = []
        self.peeked: Waiting | None = None
        self.num_arrived = self.num_preempted = 0

    def _num_overtaken(self, item: Waiting) -> int:
        return sum(item in pop.overtaken for pop in self.log if not pop.is_undone)

    def _expected(self) -> Waiting:
        if self.peeked is not None:
            return self.peeked
        in_order = sorted(self.waiting, key=lambda item: item.place)
        if in_order[0].place < 0:
            return in_order[0]
        for item in in_order:
            if self._num_overtaken(item) >= self.window:
                return item
        return max(in_order, key=lambda item: item.priority)  # the first of equals

    @rule(priority=PRIORITIES)
    def arrive(self, priority: float) -> None:
        item = Waiting(self.num_arrived, 1.0 if self.are_equal else priority)
        self.num_arrived += 1
        self.queue.add(item)
        self.waiting.append(item)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), priority=PRIORITIES)
    def the_cache_changes(self, data: st.DataObject, priority: float) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        if not self.are_equal:
            item.priority = priority
        self.queue.touch(item)

    @precondition(lambda self: self.waiting)
    @rule()
    def peek(self) -> None:
        expected = self._expected()
        assert self.queue.peek() is expected
        self.peeked = expected

    @rule()
    def begin_a_step(self) -> None:
        self.queue.reconsider()
        self.peeked = None

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        item = self._expected()
        assert self.queue.pop() is item
        self.waiting.remove(item)
        self.peeked = None
        pop = Pop([other for other in self.waiting if other.place < item.place])
        if self.are_equal or self.window == 0:
            assert not pop.overtaken
        self.log.append(pop)
        self.tried.append((item, pop))

    @precondition(lambda self: self.tried)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        item, pop = data.draw(st.sampled_from(self.tried))
        self.tried.remove((item, pop))
        pop.is_undone = True
        self.queue.give_back(item)
        self.waiting.append(item)
        self.peeked = None

    @rule()
    def serve(self) -> None:
        self.running += [item for item, _ in self.tried]
        self.tried.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.running.remove(item)
        self.num_preempted += 1
        item.place = -self.num_preempted
        self.queue.put_first(item)
        self.waiting.append(item)
        self.peeked = None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if items := [*self.waiting, *self.running]:
            item = data.draw(st.sampled_from(items))
            assert self.queue.remove(item) == (item in self.waiting)
            if item in self.waiting:
                self.waiting.remove(item)
            else:
                self.running.remove(item)
            if self.peeked is item:
                self.peeked = None

    @invariant()
    def the_queue_holds_what_the_model_holds(self) -> None:
        assert list(self.queue) == sorted(self.waiting, key=lambda item: item.place)
        assert len(self.queue) == len(self.waiting)
        assert all(item in self.queue for item in self.waiting)
        assert not any(item in self.queue for item in [*self.running, *(item for item, _ in self.tried)])

    @invariant()
    def no_request_is_overtaken_more_often_than_the_window_allows(self) -> None:
        counted = [pop for pop in self.log if not pop.is_undone]
        overtaken = {item for pop in counted for item in pop.overtaken}
        most = max((self._num_overtaken(item) for item in overtaken), default=0)
        assert self.queue.max_overtaken == most <= self.window
        assert self.queue.num_reordered == sum(bool(pop.overtaken) for pop in counted)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestQueue = QueueMachine.TestCase
