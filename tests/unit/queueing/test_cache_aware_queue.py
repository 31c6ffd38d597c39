"""The queue of waiting requests: those first that the cache helps most, none overtaken too often."""

from __future__ import annotations

import random
from weakref import ref

import pytest

from ragcache_core.queueing import CacheAwareQueue, order_priority


class Waiting:
    """A request that waits, and how much of it is cached."""

    def __init__(self, name: str, num_cached_tokens: int = 0, num_computed_tokens: int = 100) -> None:
        self.name = name
        self.num_cached_tokens = num_cached_tokens
        self.num_computed_tokens = num_computed_tokens
        self.num_submitted = 0

    def priority(self) -> float:
        self.num_submitted += 1
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


def test_only_what_is_new_or_was_touched_is_asked_for_its_priority() -> None:
    items = [Waiting(f"{n}", n) for n in range(256)]
    queue = queue_of(*items)
    queue.pop()
    for item in items[:10]:
        queue.touch(item)
    queue.touch(Waiting("elsewhere"))
    queue.peek()
    assert sum(item.num_submitted for item in items) == 256 + 10


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


def computed_lengths(order: str, requests: dict[str, tuple[int, int]], capacity: int) -> int:
    """Return the computed length of requests that are served in ``order``, of (cached, new) lengths.

    Only what is cached at the start is reused. A request keeps its whole length in the cache, and what does not fit
    beside it of the others is lost.
    """
    cached = {name: length for name, (length, _) in requests.items()}
    total = 0
    for name in order:
        length = sum(requests[name])
        total += length - cached[name]
        cached[name] = length
        for other in cached:
            cached[other] = 0 if other != name and sum(cached.values()) > capacity else cached[other]
    return total


@pytest.mark.parametrize(
    ("requests", "capacity", "costs"),
    [
        ({"1": (2, 2), "2": (1, 2)}, 4, (5, 6)),  # Figure 10a: the larger cached length first
        ({"1": (2, 2), "2": (2, 1)}, 5, (5, 3)),  # Figure 10b: the shorter computation first
    ],
)
def test_the_queue_chooses_the_cheaper_order_of_figure_10(
    requests: dict[str, tuple[int, int]], capacity: int, costs: tuple[int, int]
) -> None:
    assert (computed_lengths("12", requests, capacity), computed_lengths("21", requests, capacity)) == costs
    chosen = drain(queue_of(*(Waiting(name, cached, new) for name, (cached, new) in requests.items())))
    assert computed_lengths(chosen, requests, capacity) == min(costs)


def test_two_documents_by_turns_hit_in_two_of_three_requests_with_room_for_one() -> None:
    """RAGCache §5.2: Q1, Q3, Q5, Q2, Q4, Q6, ... has at least 66 % hits, where the order of arrival has none."""
    requests = [Waiting(f"{number}") for number in range(1, 61)]
    queue, in_cache, order = queue_of(*requests, window=2), -1, []
    while queue:
        request = queue.pop()
        order.append((request.name, in_cache == int(request.name) % 2))
        in_cache = int(request.name) % 2
        for other in requests:
            other.num_cached_tokens = 100 if int(other.name) % 2 == in_cache else 0
            if other in queue:
                queue.touch(other)
    assert [name for name, _ in order[:6]] == ["1", "3", "5", "2", "4", "6"]
    assert sum(is_hit for _, is_hit in order) >= len(order) * 0.66
