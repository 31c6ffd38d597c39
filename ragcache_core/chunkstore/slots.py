"""Which slots are free, and where a batch fits in one piece."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class SlotMap:
    """Free and used slots, a byte each. A free one is blank if nothing is left in it of what it held."""

    def __init__(self, num_slots: int) -> None:
        self._used = bytearray(num_slots)
        self._blank = bytearray(num_slots)  # whatever was here before is not known
        self._next = 0  # where the search goes on: what was freed lately is overwritten last
        self.num_free = num_slots

    def occupy(self, slot: int) -> None:
        """Take a slot that is free."""
        assert not self._used[slot]
        self._used[slot] = 1
        self._blank[slot] = 0
        self.num_free -= 1

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back that are used."""
        for slot in slots:
            assert self._used[slot]
            self._used[slot] = 0
            self.num_free += 1

    def reserve(self, num_wanted: int) -> list[int]:
        """Return that many slots, ascending and taken, in as few runs as halving the length of a run finds."""
        assert num_wanted <= self.num_free
        slots: list[int] = []
        length = num_wanted
        while len(slots) < num_wanted:
            length = min(length, num_wanted - len(slots))
            start = self._find(length)
            if start < 0:
                length //= 2
                continue
            self._next = start + length
            slots += range(start, self._next)
            self._used[start : self._next] = b"\1" * length
            self._blank[start : self._next] = bytes(length)
            self.num_free -= length
        return sorted(slots)

    def left_over(self) -> list[int]:
        """Return the free slots that may still hold what they held, ascending."""
        is_taken = np.frombuffer(self._used, np.uint8) | np.frombuffer(self._blank, np.uint8)
        found: list[int] = np.flatnonzero(is_taken == 0).tolist()
        return found

    def mark_blank(self, slots: Iterable[int]) -> None:
        """Mark free slots as blank: nothing is left in them."""
        for slot in slots:
            assert not self._used[slot]
            self._blank[slot] = 1

    def _find(self, length: int) -> int:
        run = bytes(length)
        start = self._used.find(run, self._next)
        return start if start >= 0 else self._used.find(run)
