"""An open hash table from 32-bit anchor keys to records, vectorised over all windows of a prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FEWEST_SLOTS = 1 << 10
_MULTIPLIER = 2654435769  # Knuth's multiplicative hash: 2**32 / golden ratio
_REMOVED = 1
_FIRST_RECORD = 2


class AnchorTable:
    """Maps keys to the first record of a chain.

    A filter of four flags a slot rejects most keys that are not in the table. A slot holds ``record + 2``, 1 where the
    key has no record any more, and 0 where it is free.
    """

    def __init__(self) -> None:
        self._num_used = 0
        self._allocate(_FEWEST_SLOTS)

    def __bool__(self) -> bool:
        return self._num_used > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._keys.nbytes + self._heads.nbytes + self._filter.nbytes

    def look_up(self, keys: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return the record of each key; -1 if there is none."""
        heads = np.full(len(keys), -1, np.int32)
        left = np.flatnonzero(self._filter[keys >> np.uint32(30 - self._bits)])
        wanted, mask = keys[left], len(self._keys) - 1
        slots = self._slots_of(wanted)
        while left.size:
            found = self._heads[slots]
            is_same = self._keys[slots] == wanted
            heads[left[is_same]] = found[is_same] - _FIRST_RECORD
            goes_on = np.flatnonzero((found > 0) & ~is_same)
            left, wanted, slots = left[goes_on], wanted[goes_on], (slots[goes_on] + 1) & mask
        np.maximum(heads, -1, out=heads)
        return heads

    def put(self, key: int, record: int) -> int:
        """Set the record of a key; return the previous one, or -1."""
        if 2 * self._num_used >= len(self._keys):
            self._rebuild()
        slot = self._slot_of(key)
        before = int(self._heads[slot])
        self._num_used += before == 0
        self._keys[slot], self._heads[slot] = key, record + _FIRST_RECORD
        self._filter[key >> (30 - self._bits)] = True
        return max(before - _FIRST_RECORD, -1)

    def get(self, key: int) -> int:
        """Return the record of a key, or -1."""
        return max(int(self._heads[self._slot_of(key)]) - _FIRST_RECORD, -1)

    def replace(self, key: int, record: int) -> None:
        """Set the record of a stored key; -1 removes it."""
        self._heads[self._slot_of(key)] = max(record + _FIRST_RECORD, _REMOVED)

    def _allocate(self, num_slots: int) -> None:
        self._keys, self._heads = np.zeros(num_slots, np.uint32), np.zeros(num_slots, np.int32)
        self._filter = np.zeros(4 * num_slots, bool)
        self._bits = num_slots.bit_length() - 1

    def _slots_of(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        return ((keys * np.uint32(_MULTIPLIER)) >> np.uint32(32 - self._bits)).astype(np.int64)

    def _slot_of(self, key: int) -> int:
        slot, mask = ((key * _MULTIPLIER) & 0xFFFFFFFF) >> (32 - self._bits), len(self._keys) - 1
        while self._heads[slot] and self._keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _rebuild(self) -> None:
        """Move all records to a table that is at most half full."""
        kept = np.flatnonzero(self._heads >= _FIRST_RECORD)
        keys, heads = self._keys[kept], self._heads[kept]
        self._allocate(max(_FEWEST_SLOTS, 1 << (2 * len(keys)).bit_length()))
        self._num_used = len(keys)
        self._filter[keys >> np.uint32(30 - self._bits)] = True
        slots, mask = self._slots_of(keys), len(self._keys) - 1
        left = np.arange(len(keys))
        while left.size:  # all keys at once: each free slot takes the first of its keys
            free = left[self._heads[slots[left]] == 0]
            _, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            self._keys[slots[placed]], self._heads[slots[placed]] = keys[placed], heads[placed]
            left = np.setdiff1d(left, placed, assume_unique=True)
            slots[left] = (slots[left] + 1) & mask
