"""Which slots are free, and where a batch fits in one piece."""

from __future__ import annotations

from collections.abc import Iterable


class SlotMap:
    """Free and used slots, a byte each."""

    def __init__(self, num_slots: int) -> None:
        self._used = bytearray(num_slots)
        self._next = 0  # where the search goes on: what was freed lately is overwritten last
        self.num_free = num_slots

    def occupy(self, slot: int) -> None:
        """Take a slot that is free."""
        assert not self._used[slot]
        self._used[slot] = 1
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
            self.num_free -= length
        return sorted(slots)

    def _find(self, length: int) -> int:
        run = bytes(length)
        start = self._used.find(run, self._next)
        return start if start >= 0 else self._used.find(run)
