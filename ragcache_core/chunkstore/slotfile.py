"""The file of slots: neighbours in one system call, past the page cache where that works.

Slots begin at multiples of a page: ``O_DIRECT`` transfers straight to and from page-aligned memory::

    slot 0              slot 1              slot 2
    |chunk_bytes.....|pad|chunk_bytes.....|pad|...          slot_bytes = chunk_bytes, rounded up to 4096

Measured on ext4 on a virtual disk with 2 cores, buffered | direct, MB/s, file of 1 GiB:

    ============  =============  =============  =============
    chunk, batch  first write    rewrite        read, cold
    ============  =============  =============  =============
    64 KiB x 1     405 |  803    8465 | 1115     968 |  823
    64 KiB x 8     416 | 2522   10121 | 3892     889 | 2310
    512 KiB x 1    544 | 2447    8736 | 3901    1391 | 2315
    512 KiB x 8    574 | 2420    9746 | 4410    1038 | 2917
    2 MiB x 1      534 | 3189    9523 | 5419    1367 | 2899
    2 MiB x 8      576 | 3771   10328 | 6245     915 | 3207
    ============  =============  =============  =============

Buffered rewrites only reach memory. Direct I/O took 4 to 60 times less CPU time, and leaves the page cache to other
processes; chunks that are read often are in the host tier. Hence direct, unless the file system cannot.

A compressed chunk takes the leading pages of its slot, in a system call of its own. The other pages of the slot are a
hole in the file, which takes no space: the file system packs them. A slot that gets free becomes a hole as a whole.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from ragcache_core.private_files import open_private


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


PAGE_BYTES = 4096
_MAX_SLOTS_PER_CALL = 256  # with a pad each, half of what the system takes
_BOUNCE_BYTES = 4 << 20
_PUNCH_HOLE = 0x02 | 0x01  # Linux: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def page_aligned(num_bytes: int) -> int:
    """Return what bytes take on disk, in whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SlotFile:
    """Slots of ``slot_bytes`` in one file. Reads may run beside a write; the caller sees to it that slots do not."""

    def __init__(self, path: Path, chunk_bytes: int, *, direct: bool | None = None) -> None:
        """Open or make the file. ``direct``: use ``O_DIRECT``, do not, or (None) where the file system can.

        Raises:
            OSError
        """
        self.chunk_bytes = chunk_bytes
        self.slot_bytes = page_aligned(chunk_bytes)
        self._own = threading.local()
        self._pad = memoryview(mmap.mmap(-1, PAGE_BYTES))[: self.slot_bytes - chunk_bytes]
        flags = os.O_RDWR | os.O_CREAT
        self._descriptor = -1
        if direct is not False:
            try:
                self._descriptor = _open_direct(path, flags)
            except OSError:
                if direct:
                    raise
        self.is_direct = self._descriptor >= 0
        if not self.is_direct:
            self._descriptor = open_private(path, flags)

    @property
    def num_slots(self) -> int:
        """Whole slots in the file."""
        return os.fstat(self._descriptor).st_size // self.slot_bytes

    def write(self, slots: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Write payloads to slots. ``payloads``: at most ``chunk_bytes`` each.

        Raises:
            OSError: any part of those slots may have been written.
        """
        slots, payloads = self._move_short(slots, payloads, self._write_short)
        for first, run in runs(slots, payloads):
            for start, part, straight in self._parts(first, run):
                vectors = self._padded(part)
                if not straight:
                    bounce, views = self.aligned_buffers(len(part))
                    for view, payload in zip(views, part, strict=True):
                        view[:] = payload
                    vectors = [bounce]
                if not _move(os.pwritev, self._descriptor, vectors, start * self.slot_bytes):
                    raise OSError(errno.EIO, "nothing more was written")

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Fill targets with what is in the slots; beyond the end of the file they are left as they are.

        ``targets`` are as long as the payloads were.

        Raises:
            OSError
        """
        slots, targets = self._move_short(slots, targets, self._read_short)
        for first, run in runs(slots, targets):
            for start, part, straight in self._parts(first, run):
                if straight:
                    _move(os.preadv, self._descriptor, self._padded(part), start * self.slot_bytes)
                    continue
                bounce, views = self.aligned_buffers(len(part))
                _move(os.preadv, self._descriptor, [bounce], start * self.slot_bytes)
                for view, target in zip(views, part, strict=True):
                    target[:] = view

    def aligned_buffers(self, num_chunks: int) -> tuple[memoryview, list[memoryview]]:
        """Return page-aligned memory for that many slots, and a view of ``chunk_bytes`` into each."""
        memory = memoryview(mmap.mmap(-1, num_chunks * self.slot_bytes))
        starts = range(0, len(memory), self.slot_bytes)
        return memory, [memory[start : start + self.chunk_bytes] for start in starts]

    def erase(self, slots: Sequence[int], on_part: Callable[[], object] = lambda: None) -> None:
        """Let slots read as zeros, on the disk itself when this returns; their space is free where that can be.

        ``on_part`` is called whenever a part of them is done.

        Raises:
            OSError: any of them may still hold what it held.
        """
        end = os.fstat(self._descriptor).st_size
        blank = memoryview(bytes(self.chunk_bytes))
        inside = [slot for slot in slots if slot * self.slot_bytes < end]
        for first, run in runs(inside, [blank] * len(inside)):
            try:
                _punch(self._descriptor, first * self.slot_bytes, len(run) * self.slot_bytes)
            except OSError as error:
                if error.errno not in _NO_HOLES:
                    raise
                for start in range(0, len(run), _MAX_SLOTS_PER_CALL):
                    part = run[start : start + _MAX_SLOTS_PER_CALL]
                    self.write(range(first + start, first + start + len(part)), part)
                    on_part()
            on_part()
        os.fdatasync(self._descriptor)

    def truncate(self, num_slots: int) -> None:
        """Cut the file after that many slots, unless it is shorter.

        Raises:
            OSError
        """
        if self.num_slots >= num_slots:
            os.ftruncate(self._descriptor, num_slots * self.slot_bytes)

    def close(self) -> None:
        """Close the file. Nothing may be using it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def can_free(self) -> bool:
        """Return whether the file system takes space back from the middle of a file."""
        try:
            _punch(self._descriptor, os.fstat(self._descriptor).st_size, PAGE_BYTES)
        except OSError:
            return False
        return True

    def free(self, slots: Iterable[int]) -> None:
        """Give the space of slots back. What they held may stay on the disk; see :meth:`erase`.

        Raises:
            OSError: some may still take space.
        """
        ordered = sorted(slots)
        for first, run in runs(ordered, [self._pad] * len(ordered)):
            _punch(self._descriptor, first * self.slot_bytes, len(run) * self.slot_bytes)

    @property
    def used_bytes(self) -> int:
        """What the file takes on the disk."""
        return os.fstat(self._descriptor).st_blocks * 512

    def _move_short(
        self, slots: Sequence[int], buffers: Sequence[memoryview], move: Callable[[int, memoryview], None]
    ) -> tuple[Sequence[int], Sequence[memoryview]]:
        """Move each buffer that is shorter than a chunk, and return the others with their slots."""
        if all(len(buffer) == self.chunk_bytes for buffer in buffers):
            return slots, buffers
        others = []
        for slot, buffer in sorted(zip(slots, buffers, strict=True), key=lambda pair: pair[0]):
            if len(buffer) == self.chunk_bytes:
                others.append((slot, buffer))
            else:
                move(slot, buffer)
        return [slot for slot, _ in others], [buffer for _, buffer in others]

    def _write_short(self, slot: int, payload: memoryview) -> None:
        pages = self._own_pages(len(payload))
        pages[: len(payload)] = payload
        if not _move(os.pwritev, self._descriptor, [pages], slot * self.slot_bytes):
            raise OSError(errno.EIO, "nothing more was written")
        if self.num_slots <= slot:
            os.ftruncate(self._descriptor, (slot + 1) * self.slot_bytes)

    def _read_short(self, slot: int, target: memoryview) -> None:
        pages = self._own_pages(len(target))
        if _move(os.preadv, self._descriptor, [pages], slot * self.slot_bytes):
            target[:] = pages[: len(target)]

    def _own_pages(self, num_bytes: int) -> memoryview:
        """Return the pages that a payload takes, in memory that this thread keeps."""
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = memoryview(mmap.mmap(-1, self.slot_bytes))
        return memory[: page_aligned(num_bytes)]

    def _parts(self, first: int, run: list[memoryview]) -> Iterator[tuple[int, list[memoryview], bool]]:
        """Yield pieces of a run that one system call can take, and whether straight from the caller's memory."""
        straight = not self.is_direct or (not self._pad and all(_address(b) % PAGE_BYTES == 0 for b in run))
        most = _MAX_SLOTS_PER_CALL if straight else max(1, _BOUNCE_BYTES // self.slot_bytes)
        for start in range(0, len(run), most):
            yield first + start, run[start : start + most], straight

    def _padded(self, part: list[memoryview]) -> list[memoryview]:
        return [view for payload in part for view in (payload, self._pad)] if self._pad else part


def _open_direct(path: Path, flags: int) -> int:
    """Open past the page cache.

    Raises:
        OSError: the file system cannot. Some refuse a read or a write only, and none of an empty file: so a page is
            written beside it and read again.
    """
    probe = path.with_name(f"{path.name}.probe")
    try:
        descriptor = open_private(probe, flags | os.O_DIRECT | os.O_TRUNC)
        try:
            os.pwritev(descriptor, [mmap.mmap(-1, PAGE_BYTES)], 0)
            os.preadv(descriptor, [mmap.mmap(-1, PAGE_BYTES)], 0)
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk says nothing of it
            raise
    return open_private(path, flags | os.O_DIRECT)


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def runs(slots: Sequence[int], buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the first slot and the buffers of every run of neighbouring slots."""
    ordered = sorted(zip(slots, buffers, strict=True), key=lambda pair: pair[0])
    for _, group in groupby(enumerate(ordered), key=lambda item: item[1][0] - item[0]):
        run = [pair for _, pair in group]
        yield run[0][0], [buffer for _, buffer in run]


def _punch(descriptor: int, start: int, num_bytes: int) -> None:
    """Make a hole in a file, which reads as zeros; Python has no name for it."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(num_bytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def aligned_rows(num_rows: int, num_bytes: int) -> np.ndarray:
    """Return ``[num_rows, num_bytes]`` bytes that begin on a page, as ``O_DIRECT`` wants them."""
    memory = mmap.mmap(-1, num_rows * num_bytes)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_rows, num_bytes)


def _move(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, vectors: list[memoryview], offset: int
) -> bool:
    """Read or write all of ``vectors`` and return True, or False when the file ended before."""
    num_remaining = sum(len(vector) for vector in vectors)
    while num_moved := call(descriptor, vectors, offset):
        num_remaining -= num_moved
        if not num_remaining:
            return True
        offset += num_moved
        done = 0
        while num_moved >= len(vectors[done]):
            num_moved -= len(vectors[done])
            done += 1
        vectors = [vectors[done][num_moved:], *vectors[done + 1 :]]
    return False
