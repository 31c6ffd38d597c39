"""Promises: the hits of queued requests, and which of them have not arrived yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Lookup(Generic[KeyT]):
    """A request's last look-up, after ``num_local_tokens`` that the GPU has."""

    num_local_tokens: int
    promised: dict[KeyT, None] = field(default_factory=dict)  # in the order of the look-up
    awaited: set[KeyT] = field(default_factory=set)  # of those: they have not arrived


class Promises(Generic[KeyT]):
    """Counts the blocks that are kept for looked-up requests until they are loaded.

    Without it a request that is longer than the host tier would promote its chunks from disk at the cost of one
    another, read everything and reuse nothing.
    """

    def __init__(self) -> None:
        self._lookups: dict[str, _Lookup[KeyT]] = {}
        self._counts: Counter[KeyT] = Counter()
        self._waiting: dict[_Lookup[KeyT], None] = {}  # those with awaited blocks
        self._current: _Lookup[KeyT] | None = None

    def __contains__(self, key: KeyT) -> bool:
        return key in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def is_looking_up(self) -> bool:
        """Whether a look-up is open, whose hits are promised."""
        return self._current is not None

    def begin(self, request_id: str, num_local_tokens: int) -> None:
        """Promise the following hits to a request, whose earlier promises are dropped."""
        self._current = self._lookups[request_id] = _Lookup(num_local_tokens)

    def end(self) -> None:
        """End the look-up."""
        self._current = None

    def add(self, keys: Sequence[KeyT], awaited: Collection[KeyT]) -> Sequence[KeyT]:
        """Promise blocks in the present look-up, and return those that are new to its request.

        Args:
            keys: of the blocks.
            awaited: those that have not arrived.
        """
        lookup = self._current
        assert lookup is not None
        if not lookup.promised.keys().isdisjoint(keys):
            keys = [key for key in keys if key not in lookup.promised]
        lookup.promised.update(dict.fromkeys(keys))
        self._counts.update(keys)
        if awaited:
            lookup.awaited.update(awaited)
            self._waiting[lookup] = None
        return keys

    def settle(self, keys: Collection[KeyT]) -> None:
        """Record that blocks have arrived, or will not."""
        for lookup in [*self._waiting]:
            lookup.awaited.difference_update(keys)
            if not lookup.awaited:
                del self._waiting[lookup]

    def is_looked_up(self, request_id: str) -> bool:
        """Return whether a request was looked up and has promises."""
        return request_id in self._lookups

    def is_awaited(self, request_id: str, num_local_tokens: int) -> bool:
        """Return whether some promised blocks have not arrived, so that a new look-up would not differ."""
        lookup = self._lookups.get(request_id)
        return lookup in self._waiting and lookup.num_local_tokens == num_local_tokens

    def drop(self, request_id: str) -> list[KeyT]:
        """Drop a request's promises; return the blocks that are promised to no request now."""
        if (lookup := self._lookups.pop(request_id, None)) is None:
            return []
        self._waiting.pop(lookup, None)
        counts = self._counts
        dropped = [key for key in lookup.promised if counts[key] == 1]
        counts.subtract([*lookup.promised])
        for key in dropped:
            del counts[key]
        return dropped

    def clear(self) -> None:
        """Drop everything."""
        self._lookups.clear()
        self._counts.clear()
        self._waiting.clear()
