"""The queue of waiting requests: those first that the cache helps most, nobody overtaken too often."""

from __future__ import annotations

import random
from collections import deque
from weakref import ref

import pytest

from ragcache_core.queueing import CacheAwareQueue, order_priority


class Waiting:
    """A request that waits, and how much of it is cached."""

    def __init__(self, name: str, num_cached_tokens: int = 0, num_computed_tokens: int = 100) -> None:
        self.name = name
        self.num_cached_tokens = num_cached_tokens
        self.num_computed_tokens = num_computed_tokens
        self.num_asked = 0

    def priority(self) -> float:
        self.num_asked += 1
        return order_priority(self.num_cached_tokens, self.num_computed_tokens)

    def __repr__(self) -> str:
        return self.name


def queue_of(*items: Waiting, window: int = 32) -> CacheAwareQueue[Waiting]:
    queue = CacheAwareQueue(Waiting.priority, window=window)
    for item in items:
        queue.add(item)
    return queue


def drain(queue: CacheAwareQueue[Waiting]) -> str:
    return "".join(queue.pop().name for _ in range(len(queue)))


def test_the_priority_is_what_is_cached_for_each_token_that_is_computed() -> None:
    assert order_priority(300, 100) == 3.0
    assert order_priority(0, 50) == 0.0
    assert order_priority(400, 0) == 400.0, "a prompt that is cached as a whole computes one token"


def test_what_the_cache_helps_most_goes_first() -> None:
    queue = queue_of(Waiting("a", 100, 300), Waiting("b", 300, 100), Waiting("c", 200, 100))
    assert drain(queue) == "bca"
    assert queue.num_reordered == 2, "b went before a, c before a"
    assert queue.max_overtaken == 2


@pytest.mark.parametrize("window", [0, 1, 32])
def test_equal_priorities_are_served_as_they_arrived(window: int) -> None:
    queue = queue_of(*(Waiting(name, 7) for name in "abcdef"), window=window)
    assert drain(queue) == "abcdef"
    assert queue.num_reordered == queue.max_overtaken == 0


def test_without_a_window_the_queue_is_first_come_first_served() -> None:
    items = [Waiting(name, n) for n, name in enumerate("abcd")]
    queue = queue_of(*items, window=0)
    assert drain(queue) == "abcd"
    assert queue.num_reordered == 0
    assert not any(item.num_asked for item in items), "nobody needs their priorities"


def test_a_request_without_cache_is_overtaken_as_often_as_the_window_allows() -> None:
    queue = queue_of(Waiting("cold"), window=3)
    served = []
    for number in range(6):
        queue.add(Waiting(f"hot {number}", 100))
        served.append(queue.pop().name)
    assert served == ["hot 0", "hot 1", "hot 2", "cold", "hot 3", "hot 4"]
    assert queue.max_overtaken == 3


def test_the_oldest_of_those_that_waited_long_enough_goes_first() -> None:
    queue = queue_of(Waiting("a", 1), Waiting("b", 2), Waiting("c", 3), Waiting("d", 4), Waiting("e", 5), window=2)
    assert drain(queue) == "edabc"


def test_what_was_peeked_is_popped_whatever_happens_in_between() -> None:
    cold, hot = Waiting("cold", 1), Waiting("hot", 2)
    queue = queue_of(cold, hot)
    assert queue.peek() is hot
    cold.num_cached_tokens = 90
    queue.touch(cold)
    queue.add(Waiting("hottest", 99))
    assert queue.peek() is hot
    assert drain(queue) == "hot" + "hottest" + "cold"


def test_a_new_step_chooses_anew() -> None:
    cold, hot = Waiting("cold", 1), Waiting("hot", 2)
    queue = queue_of(cold, hot)
    assert queue.peek() is hot
    cold.num_cached_tokens = 90
    queue.touch(cold)
    queue.reconsider()
    assert queue.peek() is cold


def test_a_preempted_request_goes_before_what_was_peeked() -> None:
    queue = queue_of(Waiting("a"), Waiting("b"))
    preempted = queue.pop()
    assert queue.peek().name == "b"
    queue.put_first(preempted)
    assert queue.peek() is preempted


def test_of_the_preempted_requests_the_last_one_comes_first() -> None:
    queue = queue_of(Waiting("a", 9), window=0)
    for name in "xyz":
        queue.put_first(Waiting(name))
    assert [item.name for item in queue] == ["z", "y", "x", "a"]
    assert drain(queue) == "zyxa"
    assert queue.max_overtaken == queue.num_reordered == 0, "a preempted request had its turn before"


def test_requests_that_the_scheduler_skips_keep_their_order() -> None:
    """As vLLM does: what it pops and cannot serve yet, it prepends in the end, the last one first."""
    queue = queue_of(Waiting("a", 1), Waiting("b", 2), Waiting("c", 3), Waiting("d", 4))
    arrived = list(queue)
    skipped: deque[Waiting] = deque()
    for _ in range(3):
        skipped.appendleft(queue.pop())
    for item in skipped:
        queue.give_back(item)
    assert list(queue) == arrived
    assert queue.num_reordered == queue.max_overtaken == 0
    assert drain(queue) == "dcba"


def test_preempted_requests_that_are_skipped_keep_their_order() -> None:
    queue = queue_of(Waiting("a", 1))
    for name in "xyz":
        queue.put_first(Waiting(name))
    skipped = [queue.pop(), queue.pop()]
    for item in reversed(skipped):
        queue.give_back(item)
    assert drain(queue) == "zyxa"


def test_a_request_that_was_never_served_overtook_nobody() -> None:
    queue = queue_of(Waiting("a"), window=1)
    loading = Waiting("loading", 100)
    queue.add(loading)
    for _ in range(5):
        assert queue.pop() is loading
        assert queue.peek().name == "a"
        queue.give_back(loading)
        assert queue.max_overtaken == 0
    assert queue.pop() is loading
    assert queue.num_reordered == queue.max_overtaken == 1


def test_one_that_could_not_be_served_in_its_turn_is_not_overtaken() -> None:
    queue = queue_of(Waiting("loading", 9), window=1)
    for number in range(4):
        loading = queue.pop()
        queue.add(Waiting(f"{number}"))
        assert queue.pop().name == f"{number}"
        queue.give_back(loading)
    assert queue.max_overtaken == 0


def test_one_that_is_given_back_has_been_overtaken_as_often_as_before() -> None:
    cold = Waiting("cold")
    queue = queue_of(cold, window=1)
    queue.add(Waiting("hot", 9))
    queue.pop()
    assert queue.pop() is cold
    queue.add(Waiting("hotter", 99))
    queue.give_back(cold)
    assert queue.peek() is cold


def test_one_whose_place_is_not_known_is_put_first() -> None:
    queue = queue_of(Waiting("a", 9), Waiting("b", 9))
    queue.give_back(Waiting("stranger"))
    assert [item.name for item in queue] == ["stranger", "a", "b"]


def test_a_request_can_leave_from_anywhere() -> None:
    items = [Waiting(name, n) for n, name in enumerate("abcde")]
    queue = queue_of(*items, window=1)
    queue.put_first(first := Waiting("x"))
    assert queue.remove(first)
    assert queue.peek() is items[4]
    assert queue.remove(items[4])
    assert queue.pop() is items[3]
    assert queue.remove(items[0]), "it was next, because it had been overtaken"
    assert not queue.remove(items[0])
    assert not queue.remove(items[3])
    assert items[0] not in queue
    assert items[1] in queue
    assert drain(queue) == "bc"


def test_a_window_that_is_never_reached_leaves_all_to_the_priorities() -> None:
    queue = queue_of(*(Waiting(f"{n}", n) for n in range(200)), window=10**12)
    assert [int(queue.pop().name) for _ in range(200)] == list(range(199, -1, -1))
    assert queue.max_overtaken == 199


def test_an_empty_queue_has_nothing_to_serve() -> None:
    queue = queue_of()
    assert len(queue) == 0
    with pytest.raises(IndexError, match="nothing waits"):
        queue.peek()
    with pytest.raises(IndexError, match="nothing waits"):
        queue.pop()


def test_a_negative_window_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"window is -1: it must be 0 .* or more"):
        queue_of(window=-1)


def test_only_what_is_new_or_was_touched_is_asked_for_its_priority() -> None:
    items = [Waiting(f"{n}", n) for n in range(256)]
    queue = queue_of(*items)
    queue.pop()
    for item in items[:10]:
        queue.touch(item)
    queue.touch(Waiting("elsewhere"))
    queue.peek()
    assert sum(item.num_asked for item in items) == 256 + 10


def test_what_was_served_is_not_kept_alive() -> None:
    queue = queue_of(Waiting("a"), Waiting("b", 9))
    served = [ref(queue.pop()), ref(queue.pop())]
    queue.add(Waiting("c"))
    assert [item() for item in served] == [None, None]


def test_nothing_piles_up_where_priorities_change_all_the_time() -> None:
    rng = random.Random(0)
    items = [Waiting(f"{n}") for n in range(8)]
    queue = queue_of(*items)
    for _ in range(5_000):
        item = rng.choice(items)
        item.num_cached_tokens = rng.randrange(1_000)
        queue.touch(item)
        best = max(items, key=lambda one: one.num_cached_tokens)
        queue.reconsider()
        assert queue.peek().num_cached_tokens == best.num_cached_tokens
    assert len(queue._heap) < 100
