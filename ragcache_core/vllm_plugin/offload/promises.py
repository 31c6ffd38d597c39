"""Promises: the hits of queued requests, and which of them have not arrived yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Lookup(Generic[KeyT]):
    """A request's last look-up, after ``num_local_tokens`` that the GPU has."""

    num_local_tokens: int
    promised: dict[KeyT, None] = field(default_factory=dict)  # in the order of the look-up
    num_awaited: int = 0


class Promises(Generic[KeyT]):
    """Counts the blocks that are kept for looked-up requests until they are loaded.

    Without it a request that is longer than the host tier would promote its chunks from disk at the cost of one
    another, read everything and reuse nothing.
    """

    def __init__(self) -> None:
        self._lookups: dict[str, _Lookup[KeyT]] = {}
        self._counts: dict[KeyT, int] = {}
        self._awaited: dict[KeyT, list[_Lookup[KeyT]]] = {}
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

    def add(self, key: KeyT, *, is_ready: bool) -> bool:
        """Promise a block in the present look-up; return whether it is new to that request."""
        lookup = self._current
        assert lookup is not None
        if key in lookup.promised:
            return False
        lookup.promised[key] = None
        self._counts[key] = self._counts.get(key, 0) + 1
        if not is_ready:
            self._awaited.setdefault(key, []).append(lookup)
            lookup.num_awaited += 1
        return True

    def settle(self, keys: Iterable[KeyT]) -> None:
        """Record that blocks have arrived, or will not."""
        if self._awaited:
            for key in keys:
                for lookup in self._awaited.pop(key, ()):
                    lookup.num_awaited -= 1

    def is_looked_up(self, request_id: str) -> bool:
        """Return whether a request was looked up and has promises."""
        return request_id in self._lookups

    def is_awaited(self, request_id: str, num_local_tokens: int) -> bool:
        """Return whether some promised blocks have not arrived, so that a new look-up would not differ."""
        lookup = self._lookups.get(request_id)
        return lookup is not None and lookup.num_awaited > 0 and lookup.num_local_tokens == num_local_tokens

    def drop(self, request_id: str) -> list[KeyT]:
        """Drop a request's promises; return the blocks that are promised to no request now."""
        if (lookup := self._lookups.pop(request_id, None)) is None:
            return []
        if lookup.num_awaited:
            for key in lookup.promised:
                if lookup in (waiting := self._awaited.get(key, [])):
                    waiting.remove(lookup)
        counts = self._counts
        dropped: list[KeyT] = []
        for key in lookup.promised:
            num_left = counts[key] - 1
            if num_left:
                counts[key] = num_left
            else:
                del counts[key]
                dropped.append(key)
        return dropped

    def clear(self) -> None:
        """Drop everything."""
        self._lookups.clear()
        self._counts.clear()
        self._awaited.clear()
