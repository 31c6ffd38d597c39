"""The scheduling order of waiting requests: highest cached share first (RAGCache §5.2)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T", bound=Hashable)

_MIN_ENTRIES = 64
_NUMBER = attrgetter("number")


def order_priority(num_cached_tokens: int, num_computed_tokens: int) -> float:
    """Return a request's OrderPriority, cached length / computation length (RAGCache §5.2); the highest goes first.

    A request whose prompt is cached as a whole still computes one token: less than 1 counts as 1.
    """
    return num_cached_tokens / (num_computed_tokens if num_computed_tokens > 1 else 1)


class _Place(Generic[T]):
    """An item's place in the queue; it refers to the item only while that waits.

    ``number`` counts arrivals up from 0; items put in front have negative numbers. ``overtaken`` are the places that
    its last pop went before. ``version`` is that of its valid entry in the heap, if ``priority`` is known.
    """

    __slots__ = ("is_waiting", "item", "num_overtaken", "number", "overtaken", "priority", "version")

    def __init__(self, number: int) -> None:
        self.number = number
        self.item: T
        self.is_waiting = False
        self.num_overtaken = 0
        self.overtaken: list[_Place[T]] = []
        self.priority: float | None = None
        self.version = 0

    def entry(self) -> tuple[float, int, int, _Place[T]]:
        """Return its valid heap entry."""
        assert self.priority is not None
        return -self.priority, self.number, self.version, self


class CacheAwareQueue(Generic[T]):
    """Requests in cache-aware order; each is overtaken at most ``window`` times by later ones.

    An item is overtaken whenever one that arrived later is popped before it and not given back. The oldest of those
    that were overtaken ``window`` times goes next, whatever the priorities (RAGCache §5.2). With equal priorities, or
    a window of 0, the queue is first come, first served::

        put first, the last one first | overtaken `window` times, the oldest first | by priority, then arrival

    What goes while an item is out, popped and to be given back because it could not be served, does not overtake it:
    it had its turn.

    An item is popped in O(log n) plus the number that it overtakes; that makes at most ``window`` steps in the life
    of each item. Priorities are asked for only when one is chosen, of those that are new or were touched.

    Args:
        priority: how much the cache likes an item; the highest goes first.
        window: how often an item may be overtaken.

    Items are told apart by ``==`` and hash, and must allow weak references: the place of one that was popped is
    remembered as long as it lives. Not thread-safe.

    Attributes:
        num_reordered: pops that overtook another item, since the start.
    """

    def __init__(self, priority: Callable[[T], float], *, window: int = 32) -> None:
        if window < 0:
            raise ValueError(f"window is {window}: it must be 0 (first come, first served) or more")
        self._priority = priority
        self._window = window
        self._num_arrived = 0
        self._num_put_first = 0
        self._waiting: list[_Place[T]] = []
        self._due: list[_Place[T]] = []
        self._heap: list[tuple[float, int, int, _Place[T]]] = []
        self._places: dict[T, _Place[T]] = {}
        self._changed: set[_Place[T]] = set()
        self._popped: WeakKeyDictionary[T, _Place[T]] = WeakKeyDictionary()
        self._next: _Place[T] | None = None
        self._num_places: Counter[int] = Counter()  # by how often they were overtaken, from 1
        self.num_reordered = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        """Yield the items put first, the last one first, then the others by arrival."""
        return (place.item for place in self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    @property
    def max_overtaken(self) -> int:
        """Maximum number of times that an item was overtaken since the start."""
        return max((times for times, num_places in self._num_places.items() if num_places > 0), default=0)

    # Coming and going

    def add(self, item: T) -> None:
        """Append a new item."""
        self._popped.pop(item, None)
        self._enter(item, _Place(self._num_arrived))
        self._num_arrived += 1

    def put_first(self, item: T) -> None:
        """Put a preempted item before all others; the last one put first leaves first."""
        self._popped.pop(item, None)
        self._num_put_first += 1
        self._enter(item, _Place(-self._num_put_first))
        self._next = None

    def give_back(self, item: T) -> None:
        """Undo the item's :meth:`pop`, as it could not be served. An item without known place is put first."""
        place = self._popped.pop(item, None)
        if place is None:
            self.put_first(item)
            return
        self.num_reordered -= bool(place.overtaken)
        for other in place.overtaken:
            if self._is_due(other):
                self._take_out(self._due, other)
        self._count(place.overtaken, -1)
        place.overtaken = []
        self._enter(item, place)
        self._next = None

    def peek(self) -> T:
        """Return the next item, the same until the queue changes.

        Raises:
            IndexError: nothing waits.
        """
        if self._next is None:
            self._next = self._choose()
        return self._next.item

    def pop(self) -> T:
        """Remove and return the item of :meth:`peek`.

        Raises:
            IndexError: nothing waits.
        """
        item = self.peek()
        place = self._places[item]
        at = self._leave(place)
        place.overtaken = self._waiting[:at]
        self.num_reordered += at > 0
        self._count(place.overtaken, 1)
        if due := [other for other in place.overtaken if other.num_overtaken == self._window]:
            self._due = sorted(self._due + due, key=_NUMBER)
        self._popped[item] = place
        return item

    def remove(self, item: T) -> bool:
        """Remove an item, and return whether it was waiting."""
        self._popped.pop(item, None)
        place = self._places.get(item)
        if place is None:
            return False
        self._leave(place)
        return True

    def touch(self, *items: T) -> None:
        """Mark the priority of items as possibly changed; ignore items that do not wait."""
        for item in items:
            if (place := self._places.get(item)) is not None:
                self._changed.add(place)

    def reconsider(self) -> None:
        """Let the next :meth:`peek` choose again, as another step begins."""
        self._next = None

    # Inside

    def _enter(self, item: T, place: _Place[T]) -> None:
        assert item not in self._places, f"{item} is in the queue already"
        place.item = item
        place.is_waiting = True
        self._places[item] = place
        insort(self._waiting, place, key=_NUMBER)
        self._changed.add(place)
        if self._is_due(place):
            insort(self._due, place, key=_NUMBER)

    def _leave(self, place: _Place[T]) -> int:
        """Remove a place, and return the number of places before it."""
        if self._is_due(place):
            self._take_out(self._due, place)
        place.is_waiting = False
        place.priority = None
        self._changed.discard(place)
        del self._places[place.item]
        del place.item
        if self._next is place:
            self._next = None
        return self._take_out(self._waiting, place)

    def _count(self, overtaken: list[_Place[T]], change: int) -> None:
        for times, num_places in Counter([place.num_overtaken for place in overtaken]).items():
            self._num_places[times] -= num_places
            self._num_places[times + change] += num_places
        for place in overtaken:
            place.num_overtaken += change

    def _take_out(self, places: list[_Place[T]], place: _Place[T]) -> int:
        at = bisect_left(places, place.number, key=_NUMBER)
        assert places[at] is place
        del places[at]
        return at

    def _is_due(self, place: _Place[T]) -> bool:
        return place.is_waiting and place.num_overtaken >= self._window and place.number >= 0

    def _choose(self) -> _Place[T]:
        if not self._waiting:
            raise IndexError("nothing waits in the queue")
        if self._waiting[0].number < 0:
            return self._waiting[0]
        if self._due:
            return self._due[0]
        self._rescore()
        while not self._is_valid(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3]

    def _rescore(self) -> None:
        moved = []
        for place in self._changed:
            priority = self._priority(place.item)
            if priority != place.priority:
                place.priority = priority
                place.version += 1
                moved.append(place)
        self._changed.clear()
        if len(self._heap) + len(moved) > _MIN_ENTRIES + 2 * len(self._waiting) or 4 * len(moved) > len(self._waiting):
            self._heap = [place.entry() for place in self._waiting]
            heapify(self._heap)
        else:
            for place in moved:
                heappush(self._heap, place.entry())

    def _is_valid(self, entry: tuple[float, int, int, _Place[T]]) -> bool:
        _, _, version, place = entry
        return place.priority is not None and version == place.version
