"""The disk tier's threads over a real store: what is copied, written and read, and what they report."""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ragcache_core.chunkstore import ChunkNote, ChunkStore, async_store
from ragcache_core.chunkstore.compression import Compression
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheCapacityError, CacheTierError
from ragcache_core.vllm_plugin.disk import io as disk_io
from ragcache_core.vllm_plugin.disk.io import DiskIO
from ragcache_core.vllm_plugin.disk.jobs import DiskStore, Outcome, PendingRun
from ragcache_core.vllm_plugin.lower.jobs import LoadTransfer
from tests.support.waiting import until

CHUNK_BYTES = 4096
NUM_ROWS = 300


def payload(key: bytes) -> np.ndarray:
    return np.frombuffer(Random(key).randbytes(CHUNK_BYTES), dtype=np.uint8)


class Scene:
    """Host memory, a store, and the threads between them."""

    def __init__(
        self,
        folder: Path,
        num_slots: int = NUM_ROWS,
        num_buffers: int = NUM_ROWS,
        chunk_bytes: int = CHUNK_BYTES,
        compression: Compression | None = None,
    ) -> None:
        self.memory = np.zeros((NUM_ROWS, chunk_bytes), dtype=np.uint8)
        self.store = ChunkStore(
            folder,
            {"model": "demo"},
            chunk_bytes=chunk_bytes,
            capacity_bytes=num_slots * chunk_bytes,
            compression=compression,
        )
        self.io = DiskIO(self.store, memoryview(self.memory), num_buffered_bytes=num_buffers * chunk_bytes)
        self.jobs: list[DiskStore] = []

    def write(self, keys: list[bytes], *, evicted: list[bytes] | None = None, parent: bytes | None = None) -> None:
        """Store chunks from the first rows of memory, each depending on the one before it."""
        for row, key in enumerate(keys):
            self.memory[row] = payload(key)
        run = PendingRun(keys, range(len(keys)), ChunkNote(parent, "doc"))
        self.jobs.append(self.io.store([run], evicted or []))

    @property
    def num_copied(self) -> int:
        """Jobs that no longer use host memory."""
        return sum(job.has_ended for job in self.jobs)

    def read(self, keys: list[bytes], rows: list[int]) -> LoadTransfer:
        return self.io.load(keys, rows)

    def settle(self) -> None:
        """Wait until everything that was asked for has been done."""
        assert self.io.finish_writes(30)
        assert self.io.finish_reads(30)

    def written(self) -> tuple[list[bytes], list[bytes], list[Exception]]:
        """Return the keys that were stored, those that were not, and why."""
        outcomes = list(self.io.take_written())
        stored = [key for outcome in outcomes if is_stored(outcome) for key in outcome.names]
        lost = [key for outcome in outcomes if not is_stored(outcome) for key in outcome.names]
        return stored, lost, [outcome.error for outcome in outcomes if outcome.error is not None]


def is_stored(outcome: Outcome) -> bool:
    return outcome.error is None and not outcome.is_dropped


Opening = Callable[..., Scene]


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    opened: list[Scene] = []

    def open_scene(**settings: Any) -> Scene:
        opened.append(Scene(tmp_path / f"cache{len(opened)}", **settings))
        return opened[-1]

    yield open_scene
    for scene in opened:
        scene.io.close()


def keys(num_keys: int, mark: str = "k") -> list[bytes]:
    return [f"{mark}{i}".encode() for i in range(num_keys)]


@contextmanager
def waiting(call: Callable[[], object]) -> Iterator[None]:
    """Hold that ``call`` waits when the context begins, and ends after it."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    yield
    thread.join(10)
    assert not thread.is_alive()


def test_what_is_written_is_read_back(opening: Opening) -> None:
    scene = opening()
    scene.write(keys(5))
    scene.settle()
    assert scene.num_copied == 1
    assert scene.written() == (keys(5), [], [])
    load = scene.read(keys(5), [10, 12, 14, 16, 18])
    scene.settle()
    assert load.has_ended
    assert load.found == [True] * 5
    for row, key in zip((10, 12, 14, 16, 18), keys(5), strict=True):
        assert (scene.memory[row] == payload(key)).all()
    assert not scene.memory[11].any()


def test_host_memory_is_free_before_the_disk_has_it(opening: Opening, gate: threading.Event) -> None:
    scene = opening()
    scene.write(keys(3))
    assert until(lambda: scene.num_copied)
    assert scene.written() == ([], [], [])
    scene.memory[:] = 0xAA  # it belongs to another chunk by now
    gate.set()
    scene.settle()
    load = scene.read(keys(3), [0, 1, 2])
    scene.settle()
    assert load.found == [True] * 3
    assert (scene.memory[1] == payload(b"k1")).all()


def test_a_job_larger_than_the_buffers_is_stored_in_full(opening: Opening, gate: threading.Event) -> None:
    scene = opening(num_buffers=3)
    scene.write(keys(200))
    assert until(lambda: not scene.io._num_free_buffers)
    time.sleep(0.05)  # for a copier that would not wait to go on
    assert not scene.num_copied, "host memory is held: the buffers take three chunks"
    gate.set()
    assert scene.io.finish_writes(30)
    assert scene.num_copied == 1
    assert scene.written() == (keys(200), [], [])
    load = scene.read(keys(200), list(range(200)))
    scene.settle()
    assert load.found == [True] * 200
    assert all((scene.memory[row] == payload(key)).all() for row, key in enumerate(keys(200)))


def test_no_more_than_the_buffers_is_allocated(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening(num_buffers=3)
    held: list[weakref.ref[Any]] = []
    most, aligned_rows, write = 0, disk_io.aligned_rows, SlotFile.write

    def allocate(num_rows: int, num_bytes: int) -> np.ndarray:
        rows = aligned_rows(num_rows, num_bytes)
        held.extend([weakref.ref(rows.base)] * num_rows)
        return rows

    def count(self: SlotFile, *args: Any) -> None:
        nonlocal most
        most = max(most, sum(1 for rows in held if rows() is not None))
        write(self, *args)

    monkeypatch.setattr(disk_io, "aligned_rows", allocate)
    monkeypatch.setattr(SlotFile, "write", count)
    scene.write(keys(100))
    scene.settle()
    assert scene.written() == (keys(100), [], [])
    assert 1 <= most <= 3


def test_a_slow_disk_that_gets_on_is_given_time_for_what_waits(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_io, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(disk_io, "_SLOWEST_BYTES_PER_S", CHUNK_BYTES)
    write = SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (time.sleep(0.1), write(self, *args))[1])  # a slow disk
    scene = opening(num_buffers=1)
    scene.write(keys(6))
    scene.settle()
    assert scene.written() == (keys(6), [], []), "twelve times the patience, and less than a chunk a second needs"


def test_draining_lets_go_of_host_memory_without_the_disk(
    opening: Opening, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    scene = opening(num_buffers=3)
    scene.write(keys(5))
    scene.write(keys(2, "n"))
    assert scene.io.finish_reads(0.0)
    assert scene.num_copied == 2
    assert scene.written() == ([], [b"k3", b"k4", *keys(2, "n")], [])
    gate.set()
    scene.settle()
    assert scene.written() == (keys(3), [], [])
    assert not caplog.records, "a reset says nothing of the disk"


def test_closing_lets_go_of_host_memory_though_the_disk_hangs(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "CLOSE_TIMEOUT_S", 0.05)
    scene = opening(num_buffers=3)
    scene.write(keys(5))
    scene.io.close()
    assert scene.num_copied == 1
    assert scene.written() == ([], [b"k3", b"k4"], [])


def test_what_gave_way_is_deleted_first(opening: Opening) -> None:
    scene = opening(num_slots=4)
    scene.write(keys(4))
    scene.write(keys(2, "new"), evicted=keys(4)[2:])
    scene.settle()
    assert scene.num_copied == 2
    assert scene.written() == (keys(4) + keys(2, "new"), [], [])
    load = scene.read(keys(4), [0, 1, 2, 3])
    scene.settle()
    assert load.found == [True, True, False, False]


def test_what_is_forgotten_leaves_its_slot_to_what_is_stored_later(opening: Opening) -> None:
    scene = opening(num_slots=4)
    scene.write(keys(4))
    scene.settle()
    scene.io.delete([b"k1", b"k3", b"nothing"])
    scene.write(keys(2, "new"))
    scene.settle()
    assert scene.written() == (keys(4) + keys(2, "new"), [], [])
    load = scene.read(keys(4), [0, 1, 2, 3])
    scene.settle()
    assert load.found == [True, False, True, False]


def test_a_write_error_half_way_reports_exactly_what_is_stored(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    write, num_writes = SlotFile.write, 0

    def fail_the_third(self: SlotFile, *args: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *args)

    monkeypatch.setattr(SlotFile, "write", fail_the_third)
    size = scene.store.chunks_per_batch
    asked = keys(size * 4)
    scene.write(asked)
    scene.settle()
    stored, lost, (error, *others) = scene.written()
    assert stored == asked[: 2 * size]
    assert lost == asked[2 * size :], "what stands on what was lost is not written"
    assert not any("No space left on device" in str(other) for other in others), "it is tried once"
    assert isinstance(error, CacheTierError)
    assert [key for key in asked if key in scene.store] == stored
    scene.write(keys(NUM_ROWS, "later"))
    scene.settle()
    stored, lost, _ = scene.written()
    assert (stored, lost) == ([], keys(NUM_ROWS, "later")), "the threads live on, and so do the buffers"


def test_a_full_store_is_an_error_that_is_reported(opening: Opening) -> None:
    scene = opening(num_slots=2)
    scene.write(keys(3))
    scene.settle()
    stored, lost, (error,) = scene.written()
    assert (stored, lost) == ([], keys(3))
    assert isinstance(error, CacheCapacityError)
    assert scene.num_copied == 1


def test_nothing_is_stored_behind_a_chunk_whose_write_failed_however_long_it_waits(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler takes outcomes in between two steps, which may take longer than writing rests."""
    monkeypatch.setattr(async_store, "REST_S", 0.05)
    scene = opening()
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", failing_write)
        scene.write([b"parent"])
        scene.settle()
    assert until(lambda: scene.io.can_write)
    scene.write([b"child"], parent=b"parent")
    scene.write([b"grandchild"], parent=b"child")
    scene.settle()
    assert scene.written()[:2] == ([], [b"parent", b"child", b"grandchild"])
    scene.write([b"parent", b"child"])
    scene.settle()
    assert scene.written() == ([b"parent", b"child"], [], [])


def failing_write(file: SlotFile, *args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_job_is_read_by_several_readers_and_a_cancelled_part_costs_nothing(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_io, "_READ_AT_ONCE_BYTES", 1)
    scene = opening()
    scene.write(keys(8))
    scene.settle()
    scene.memory[:] = 0xEE
    readers: set[str] = set()
    go_on, read = threading.Event(), SlotFile.read

    def hang_but_one(self: SlotFile, *args: Any) -> None:
        readers.add(threading.current_thread().name)
        if len(readers) < 4:
            go_on.wait(10)
        read(self, *args)

    monkeypatch.setattr(SlotFile, "read", hang_but_one)
    load = scene.read(keys(8), list(range(8)))
    assert until(lambda: any(part.is_finished for part in load.parts))
    load.abandon()
    go_on.set()
    scene.settle()
    assert len(readers) == 4
    assert load.found.count(True) == 2
    for row, (key, is_found) in enumerate(zip(keys(8), load.found, strict=True)):
        assert (scene.memory[row] == (payload(key) if is_found else 0xEE)).all()


def test_draining_waits_for_reads_and_writes(opening: Opening, gate: threading.Event) -> None:
    scene = opening()
    gate.set()
    scene.write(keys(1))
    scene.settle()
    gate.clear()
    scene.write(keys(1, "w"))
    scene.read(keys(1), [5])
    with waiting(scene.settle):
        gate.set()
    assert scene.written()[0] == keys(1) + keys(1, "w")


def test_draining_a_disk_that_hangs_ends_with_host_memory_copied(opening: Opening, gate: threading.Event) -> None:
    scene = opening()
    scene.write(keys(3))
    assert scene.io.finish_reads(0.0), "nothing is read"
    assert scene.num_copied == 1
    assert not scene.io.finish_writes(0.05)
    gate.set()
    scene.settle()
    assert scene.written() == (keys(3), [], [])


def test_host_memory_is_waited_for_however_long_a_copy_takes(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    is_copying, go_on, aligned_rows = threading.Event(), threading.Event(), disk_io.aligned_rows

    def hang(*args: int) -> np.ndarray:
        is_copying.set()
        go_on.wait(10)
        return aligned_rows(*args)

    monkeypatch.setattr(disk_io, "aligned_rows", hang)
    scene.write(keys(3))
    assert is_copying.wait(10)
    with waiting(lambda: scene.io.finish_reads(0.0)):
        go_on.set()
    assert scene.num_copied == 1


def test_a_reader_that_cannot_deliver_lives_on(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    scene.write(keys(2))
    scene.settle()
    lost = [scene.read(keys(2), [NUM_ROWS, NUM_ROWS]) for _ in range(2 * disk_io.NUM_READERS)]
    scene.settle()
    assert not any(part.is_finished for load in lost for part in load.parts)
    assert all(load.has_ended for load in lost), "no waiter is left"
    load = scene.read(keys(2), [8, 9])
    scene.settle()
    assert load.found == [True, True]


def test_large_chunks_are_read_few_at_a_time(tmp_path: Path) -> None:
    """Of an 8B model in blocks of 128 tokens a chunk is 16 MiB: 64 of them for each reader would be 4 GiB."""
    chunk_bytes, num_chunks = 6 << 20, 5
    memory = np.zeros((2 * num_chunks, chunk_bytes), dtype=np.uint8)
    memory[:num_chunks] = np.arange(1, num_chunks + 1)[:, None]
    store = ChunkStore(
        tmp_path, {"model": "demo"}, chunk_bytes=chunk_bytes, capacity_bytes=num_chunks * (chunk_bytes + 4096)
    )
    io = DiskIO(store, memoryview(memory))
    try:
        io.store([PendingRun(keys(num_chunks), range(num_chunks), ChunkNote())], [])
        assert io.finish_writes(30)
        load = io.load(keys(num_chunks), list(range(num_chunks, 2 * num_chunks)))
        assert io.finish_reads(30)
    finally:
        io.close()
    assert load.found == [True] * num_chunks
    assert (memory[num_chunks:] == memory[:num_chunks]).all()
    assert [len(part.names) for part in load.parts] == [2, 2, 1], "16 MiB at most"


def test_chunks_are_not_compressed_while_most_buffers_wait(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("blosc2")
    num_bytes = 1 << 16
    zstd = Compression("zstd", "The test's store")
    scene = opening(num_slots=64, num_buffers=4, chunk_bytes=num_bytes, compression=zstd)
    is_writing, go_on, write = threading.Event(), threading.Event(), ChunkStore.write_many

    def wait_and_write(store: ChunkStore, *args: Any, **settings: Any) -> list[bytes]:
        is_writing.set()
        go_on.wait(30)
        return write(store, *args, **settings)

    monkeypatch.setattr(ChunkStore, "write_many", wait_and_write)
    for number in range(4):  # of the four buffers, the first one waits for the disk, then three more
        scene.io.store([PendingRun([b"%d" % number], [number], ChunkNote())], [])
        assert is_writing.wait(30)
    assert until(lambda: scene.io._num_free_buffers == 0)
    go_on.set()
    scene.settle()
    scene.io.store([PendingRun([b"4"], [4], ChunkNote())], [])
    scene.settle()
    stored, lost, _ = scene.written()
    assert (len(stored), lost) == (5, [])
    assert scene.store.stats.used_bytes == num_bytes + 4 * 4096, "one of them while three others waited"
    load = scene.read([b"%d" % number for number in range(5)], list(range(10, 15)))
    scene.settle()
    assert load.found == [True] * 5
