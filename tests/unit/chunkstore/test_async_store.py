"""A store behind threads: what is changed and read in which order, what fails, and what is waited for."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ragcache_core.chunkstore import AsyncStore, ChunkStore, ChunkWrite, Scratch, Transfer, async_store
from ragcache_core.chunkstore.async_store import ReadRate
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheCapacityError, CacheTierError, CacheWriteError
from tests.support.waiting import until

CHUNK_BYTES = 4096
IDENTITY = {"model": "demo"}


class Scene:
    """A store of four chunks behind threads, and what came of its changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = ChunkStore(folder, IDENTITY, chunk_bytes=CHUNK_BYTES, capacity_bytes=4 * CHUNK_BYTES)
        self.threads = AsyncStore(self.store, "The test's store", num_readers=2)
        self.ended: list[str] = []
        self.errors: list[Exception] = []

    def write(self, key: bytes, *, is_forced: bool = False, is_write: bool = False) -> None:
        self.threads.change(
            lambda: self.store.write_many([ChunkWrite(key, key.ljust(CHUNK_BYTES))]),
            partial(self.on_ended, key.decode()),
            is_forced=is_forced,
            is_write=is_write,
        )

    def on_ended(self, what: str, error: Exception | None) -> None:
        self.ended.append(what)
        if error is not None:
            self.errors.append(error)

    def read(self, key: bytes, target: bytearray) -> Transfer:
        transfer = Transfer()
        self.threads.read(transfer, partial(self.fetch, key, target, transfer))
        return transfer

    def fetch(self, key: bytes, target: bytearray, transfer: Transfer, scratch: Scratch) -> int:
        (row,) = scratch.rows(1, CHUNK_BYTES)
        is_found = self.store.read(key, row.data)

        def deliver() -> None:
            target[:] = row.tobytes()

        if is_found:
            transfer.move(deliver)
        transfer.finish()
        return CHUNK_BYTES * is_found

    def settle(self) -> None:
        assert self.threads.finish_changes(30)
        assert self.threads.finish_reads(30)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    opened = Scene(tmp_path / "kv")
    yield opened
    opened.threads.close()


def fail(code: int) -> Callable[..., None]:
    def raise_error(*args: object) -> None:
        raise OSError(code, "as the test wants it")

    return raise_error


def failing_delete(index: ChunkIndex, slots: object) -> None:
    raise CacheWriteError("as the test wants it")


def test_changes_keep_their_order_and_reads_bring_what_was_written(scene: Scene) -> None:
    for key in (b"a", b"b", b"c"):
        scene.write(key)
    scene.settle()
    assert (scene.ended, scene.errors) == (["a", "b", "c"], [])
    target = bytearray(CHUNK_BYTES)
    transfer = scene.read(b"b", target)
    scene.settle()
    assert transfer.is_finished
    assert bytes(target) == b"b".ljust(CHUNK_BYTES)


def test_a_store_that_is_only_full_stays_in_service(scene: Scene) -> None:
    for key in (b"a", b"b", b"c", b"d", b"e"):
        scene.write(key)
    scene.settle()
    (error,) = scene.errors
    assert isinstance(error, CacheCapacityError)
    assert scene.threads.why_down() is None


def test_a_full_disk_rests_is_tried_again_and_is_logged_once_each_way(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    scene.write(b"a", is_write=True)
    scene.settle()
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", fail(errno.ENOSPC))
        scene.write(b"b", is_write=True)
        scene.write(b"c", is_write=True)
        scene.settle()
        assert [str(error).count("as the test wants it") for error in scene.errors] == [1, 0], "it rests at first"
        target = bytearray(CHUNK_BYTES)
        scene.read(b"a", target)
        scene.settle()
        assert bytes(target) == b"a".ljust(CHUNK_BYTES), "what is there is read"
        assert until(lambda: not scene.threads.writes.is_resting)
        scene.write(b"b", is_write=True)
        scene.settle()
    assert until(lambda: not scene.threads.writes.is_resting)
    scene.write(b"b", is_write=True)
    scene.settle()
    assert b"b" in scene.store
    assert scene.threads.why_down() is None
    failed, works = caplog.messages
    assert "is out of service" not in failed
    assert "as the test wants it" in failed
    assert works == "RC-TIER-WORKS: Writing to The test's store works again"


def test_a_write_that_fails_as_the_files_are_gone_takes_the_store_down(scene: Scene) -> None:
    shutil.rmtree(scene.store.path)
    scene.write(b"a", is_write=True)
    scene.settle()
    assert "leave the directory to the engine" in str(scene.threads.why_down())


@pytest.mark.parametrize("change", ["evict", "rename"])
def test_what_a_full_disk_does_not_take_of_the_index_is_done_with_the_next_change(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        scene.write(key)
    scene.settle()
    with monkeypatch.context() as patched:
        patched.setattr(ChunkIndex, "delete", failing_delete)
        if change == "evict":
            assert scene.store.evict_many([b"a", b"b"]) == 2
            assert scene.store.num_free_slots == 2
        else:
            assert scene.store.rename([(b"c", "later")]) == 1
    scene.store.update_notes([(b"d", 1.0, 1.0)])
    scene.threads.close()
    with ChunkStore(scene.folder, IDENTITY, chunk_bytes=CHUNK_BYTES, capacity_bytes=4 * CHUNK_BYTES) as again:
        found = {entry.key: entry.doc_id for entry in again.entries()}
    assert found == (
        {b"c": None, b"d": None} if change == "evict" else {b"a": None, b"b": None, b"c": "later", b"d": None}
    )


def test_a_change_that_fails_takes_the_store_down_and_the_next_ones_but_those_that_are_forced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", fail(errno.EIO))
        scene.write(b"a")
        scene.settle()
    scene.write(b"b")
    scene.write(b"c", is_forced=True)
    scene.settle()
    assert scene.ended == ["a", "b", "c"]
    assert [str(error).count("as the test wants it") for error in scene.errors] == [1, 1]
    assert b"c" in scene.store
    assert b"b" not in scene.store
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("RC-TIER-OFF: The test's store is out of service until the next start: a change failed: ")


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_does_not_answer_is_down_and_what_it_brings_later_is_not_delivered(
    scene: Scene, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gate.set()
    scene.write(b"a")
    scene.settle()
    gate.clear()
    target = bytearray(CHUNK_BYTES)
    transfer = scene.read(b"a", target)
    scene.write(b"b")
    assert until(lambda: transfer.progressed_s is not None)
    assert scene.threads.why_down() is None
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S" if what == "read" else "_WRITE_TIMEOUT_S", 0.0)
    assert until(lambda: scene.threads.why_down() is not None)
    assert f"a {what} takes longer than 0 s" in str(scene.threads.why_down())
    assert transfer.abandon()
    gate.set()
    scene.settle()
    assert target == bytearray(CHUNK_BYTES)


def test_files_that_are_gone_are_noticed_while_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "_HEALTH_CHECK_INTERVAL_S", 0.01)
    scene = Scene(tmp_path / "kv")
    assert scene.threads.why_down() is None
    shutil.rmtree(tmp_path / "kv")
    assert until(lambda: scene.threads.why_down() is not None)
    assert "leave the directory to the engine" in str(scene.threads.why_down())
    scene.write(b"a")
    scene.settle()
    assert isinstance(scene.errors[0], CacheTierError)
    scene.threads.close()


def test_closing_makes_the_changes_drops_the_reads_and_can_be_done_twice(scene: Scene, gate: threading.Event) -> None:
    scene.write(b"a")
    target = bytearray(CHUNK_BYTES)
    reads = [scene.read(b"a", target) for _ in range(9)]
    closing = threading.Thread(target=scene.threads.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the write"
    gate.set()
    closing.join(10)
    assert scene.ended == ["a"]
    assert not all(read.is_finished for read in reads)
    scene.threads.close()
    assert not scene.store.read(b"a", target), "it is closed"


def test_giving_up_while_a_reader_delivers_is_all_or_nothing() -> None:
    """The first one wins; memory is never written after :meth:`Transfer.abandon` said yes."""
    for _ in range(200):
        memory = bytearray(64)
        transfer = Transfer()

        def fill(memory: bytearray = memory) -> None:
            for i in range(64):
                memory[i] = 1

        def deliver(transfer: Transfer = transfer, fill: Callable[[], None] = fill) -> None:
            transfer.move(fill)
            transfer.finish()

        thread = threading.Thread(target=deliver)
        thread.start()
        is_abandoned = transfer.abandon()
        seen = bytes(memory)
        thread.join()
        assert bytes(memory) == seen
        assert seen in (bytes(64), bytes([1] * 64))
        assert is_abandoned != transfer.is_finished


def test_the_rate_is_that_of_all_readers_together_over_the_time_in_which_any_reads() -> None:
    rate = ReadRate()
    assert rate.bytes_per_s(0.0) is None
    rate.begin(10.0)
    rate.begin(10.0)
    rate.end(11.0, 100)
    rate.end(11.0, 100)
    assert rate.bytes_per_s(11.0) == pytest.approx(200.0, rel=0.06)
    rate.begin(50.0)  # nothing was read meanwhile
    rate.end(51.0, 190)
    assert rate.bytes_per_s(51.0) == pytest.approx(190.0, rel=0.06)
