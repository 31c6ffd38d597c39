"""What a store does when it is opened: load the index, drop what cannot be there, fit into a smaller capacity."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ragcache_core.chunkstore.chunks import MAX_KEY_BYTES, checksum
from ragcache_core.chunkstore.compression import HINT, is_installed
from ragcache_core.chunkstore.encryption import EncryptedSlotFile
from ragcache_core.chunkstore.index import ChunkIndex, IndexDamagedError, read_through, remove_index
from ragcache_core.chunkstore.slotfile import SlotFile, SlotMap, page_aligned
from ragcache_core.errors import CacheDirectoryError
from ragcache_core.log import logger_of


class Place(NamedTuple):
    """Where a chunk is, the checksum of what is stored of it, and how many bytes that is."""

    slot: int
    digest: int
    length: int


class Residents:
    """The place of every chunk. ``find`` may run beside one change; changes may not run beside one another.

    Attributes:
        slots: which are free.
        used_bytes: pages that the chunks take.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotMap(num_slots)
        self.used_bytes = 0
        self._slot_of: dict[bytes, int] = {}
        self._checksums = array("q")  # by slot
        self._lengths = array("q")  # by slot

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, key: bytes) -> Place | None:
        """Return the place of a chunk. Beside a change it may be the checksum or length of the slot's next chunk."""
        slot = self._slot_of.get(key)
        return None if slot is None else Place(slot, self._checksums[slot], self._lengths[slot])

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot of a chunk."""
        return self._slot_of.get(key)

    def admit(self, key: bytes, slot: int, digest: int, length: int) -> None:
        """Take the slot, which is free, and let the chunk be found."""
        self.slots.occupy(slot)
        self.publish(key, slot, digest, length)

    def publish(self, key: bytes, slot: int, digest: int, length: int) -> None:
        """Let a chunk be found whose slot is taken already."""
        for column in (self._checksums, self._lengths):
            if slot >= len(column):
                column.frombytes(bytes(8 * (slot + 1 + slot // 8 - len(column))))
        self._checksums[slot], self._lengths[slot] = digest, length
        self.used_bytes += page_aligned(length)
        self._slot_of[key] = slot  # last: a reader must find the checksum there

    def forget(self, keys: Sequence[bytes]) -> list[int]:
        """Let chunks be found no longer, free their slots, and return these."""
        slots = [self._slot_of.pop(key) for key in keys]
        self.used_bytes -= sum(page_aligned(self._lengths[slot]) for slot in slots)
        self.slots.release(slots)
        return slots

    def clear(self) -> None:
        """Forget every chunk."""
        self.forget(list(self._slot_of))


logger = logger_of(__name__)

_INDEX_NAME = "index.sqlite"
_MOVE_BYTES = 16 << 20

_Slots = SlotFile | EncryptedSlotFile
_Row = tuple[int, bytes, int, int]
"""Slot, key, checksum, stored length."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The chunks of an index, and how many were dropped on the way."""

    residents: Residents
    num_missing: int
    num_over_capacity: int
    num_resets: int = 0
    """1 if the index was damaged as a whole."""


def open_index(folder: Path, file: _Slots, num_slots: int, capacity_bytes: int) -> tuple[ChunkIndex, Loaded]:
    """Return the index of a folder, and its chunks that are in the file, in the first ``num_slots`` slots.

    They take at most ``capacity_bytes``.

    Raises:
        CacheDirectoryError: chunks are compressed, and Blosc2 is not installed.
        IndexDamagedError: a new one is, too. CacheLockedError: another program has it open. CacheTierError: it cannot
            be read. CacheWriteError, OSError: it may not be written, or there is less capacity than before, and what
            is too much cannot be dropped or moved.
    """
    for _ in range(2):  # an error that passes is none the second time
        try:
            return _open_index(folder, file, num_slots, capacity_bytes)
        except IndexDamagedError as error:
            reason = str(error)
            read_through(folder / _INDEX_NAME)
    start_empty(folder, reason)
    index, loaded = _open_index(folder, file, num_slots, capacity_bytes)
    return index, replace(loaded, num_resets=1)


def start_empty(folder: Path, reason: str) -> bool:
    """Remove the index of a folder, and return whether there was one.

    Raises:
        OSError
    """
    path = folder / _INDEX_NAME
    is_there = path.exists()
    if is_there:
        logger.warning("RC-DISK-INDEX: the cache in %s starts empty, it is damaged: %s", folder, reason)
    remove_index(path)
    return is_there


def _open_index(folder: Path, file: _Slots, num_slots: int, capacity_bytes: int) -> tuple[ChunkIndex, Loaded]:
    index = ChunkIndex(folder / _INDEX_NAME, folder.name, file.chunk_bytes)
    try:
        return index, _load(index, file, num_slots, capacity_bytes)
    except BaseException:
        index.close()
        raise


def _load(index: ChunkIndex, file: _Slots, num_slots: int, capacity_bytes: int) -> Loaded:
    residents, strays, impossible = _read(index, file.num_slots, num_slots)
    if not is_installed() and index.num_compressed():
        raise CacheDirectoryError(
            f"{index.path.parent} has compressed blocks, and blosc2 is not installed: {HINT}, use another cache "
            "directory, or delete the folder"
        )
    index.discard(impossible)
    num_over_capacity = 0
    while num_over := _num_over(residents, strays, num_slots, capacity_bytes):
        num_over_capacity += num_over
        index.delete(index.deepest(num_over))
        residents, strays, _ = _read(index, file.num_slots, num_slots)
    num_unreadable = 0
    step = max(1, _MOVE_BYTES // file.slot_bytes)
    for start in range(0, len(strays), step):
        num_unreadable += _move_down(strays[start : start + step], index, file, residents)
    file.truncate(num_slots)
    return Loaded(residents, len(impossible) + num_unreadable, num_over_capacity)


def _num_over(residents: Residents, strays: Sequence[_Row], num_slots: int, capacity_bytes: int) -> int:
    """Return how many chunks have to leave at least, by the mean of what a chunk takes."""
    num_chunks = len(residents) + len(strays)
    used_bytes = residents.used_bytes + sum(page_aligned(length) for *_, length in strays)
    over_bytes = used_bytes - capacity_bytes
    num_over = -(-over_bytes * num_chunks // used_bytes) if over_bytes > 0 else 0
    return max(num_over, num_chunks - num_slots, 0)


def _read(index: ChunkIndex, file_slots: int, num_slots: int) -> tuple[Residents, list[_Row], list[int]]:
    """Return the chunks in the first slots, those beyond them, and the slots of rows that cannot be right."""
    residents = Residents(num_slots)
    strays: dict[bytes, _Row] = {}
    impossible: list[int] = []
    for slot, key, digest, length in index.rows():
        if (
            not 0 <= slot < file_slots
            or type(key) is not bytes
            or not 0 < len(key) <= MAX_KEY_BYTES
            or type(digest) is not int
            or type(length) is not int
            or key in residents
            or key in strays
        ):
            impossible.append(slot)
        elif slot < num_slots:
            residents.admit(key, slot, digest, length)
        else:
            strays[key] = (slot, key, digest, length)
    return residents, list(strays.values()), impossible


def _move_down(strays: Sequence[_Row], index: ChunkIndex, file: _Slots, residents: Residents) -> int:
    """Copy chunks into free slots, then say so in the index; return how many were not fit to be copied."""
    _, buffers = file.aligned_buffers(len(strays))
    views = [buffer[:length] for buffer, (*_, length) in zip(buffers, strays, strict=True)]
    _read_each(file, [slot for slot, *_ in strays], views)
    sound = [(row, view) for row, view in zip(strays, views, strict=True) if checksum(row[1], view) == row[2]]
    slots = residents.slots.reserve(len(sound))
    file.write(slots, [view for _, view in sound])
    moved = [(slot, row) for slot, (row, _) in zip(slots, sound, strict=True)]
    index.move((slot, old) for slot, (old, *_) in moved)
    for slot, (_, key, digest, length) in moved:
        residents.publish(key, slot, digest, length)
    copied = {old for _, (old, *_) in moved}
    index.discard(slot for slot, *_ in strays if slot not in copied)
    return len(strays) - len(sound)


def _read_each(file: _Slots, slots: Sequence[int], views: Sequence[memoryview]) -> None:
    """Read slots, or one by one if that fails: a bad sector loses one chunk, whose checksum does not match.

    Raises:
        OSError: none of several can be read; that is no bad sector.
    """
    try:
        file.read(slots, views)
        return
    except OSError:
        errors = []
    for slot, view in zip(slots, views, strict=True):
        try:
            file.read([slot], [view])
        except OSError as error:
            errors.append(error)
    if len(errors) == len(slots) > 1:
        raise errors[0]
