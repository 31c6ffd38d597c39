"""What is where, in memory: some 170 bytes a chunk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ragcache_core.chunkstore.slots import SlotMap


class Residents:
    """Slot and checksum of every chunk. ``find`` may run beside one change; changes may not run beside one another."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotMap(num_slots)
        self._slot_of: dict[bytes, int] = {}
        self._checksums = array("q")  # by slot

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return slot and checksum. Beside a change it may be the checksum of the slot's next chunk."""
        slot = self._slot_of.get(key)
        return None if slot is None else (slot, self._checksums[slot])

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot of a chunk."""
        return self._slot_of.get(key)

    def admit(self, key: bytes, slot: int, digest: int) -> None:
        """Take the slot, which is free, and let the chunk be found."""
        self.slots.occupy(slot)
        self.publish(key, slot, digest)

    def publish(self, key: bytes, slot: int, digest: int) -> None:
        """Let a chunk be found whose slot is taken already."""
        checksums = self._checksums
        if slot >= len(checksums):
            checksums.frombytes(bytes(8 * (slot + 1 + slot // 8 - len(checksums))))
        checksums[slot] = digest
        self._slot_of[key] = slot  # last: a reader must find the checksum there

    def forget(self, keys: Sequence[bytes]) -> None:
        """Let chunks be found no longer, and free their slots."""
        self.slots.release([self._slot_of.pop(key) for key in keys])

    def clear(self) -> None:
        """Forget every chunk."""
        self.forget(list(self._slot_of))
