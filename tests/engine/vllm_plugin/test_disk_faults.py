"""What the disk tier does when the disk is damaged, full, slow or gone: misses, never wrong bytes, never an error."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
import time
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore, async_store
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheWriteError
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.disk import io as disk_io
from ragcache_core.vllm_plugin.disk import manager as disk
from tests.engine.vllm_plugin.disk_scene import CHUNK_BYTES, UNTOUCHED, Opening, chain, failing, payload
from tests.support.waiting import until


def buffer_chunks(monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> None:
    """Let that many chunks wait for the disk outside of host memory."""
    settings = {"num_buffered_bytes": num_chunks * CHUNK_BYTES}
    monkeypatch.setattr(disk_io.DiskIO.__init__, "__kwdefaults__", settings)


def hanging(monkeypatch: pytest.MonkeyPatch, what: str) -> tuple[threading.Event, threading.Event]:
    """Let the disk hang at a read or write; return what says that it does, and what lets it go on."""
    is_busy, go_on, real = threading.Event(), threading.Event(), getattr(SlotFile, what)

    def hang(self: SlotFile, *args: Any) -> None:
        is_busy.set()
        go_on.wait(10)
        real(self, *args)

    monkeypatch.setattr(SlotFile, what, hang)
    return is_busy, go_on


def test_a_damaged_chunk_is_a_miss_and_counted_and_the_others_are_served(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("D")
    data = bytearray(scene.data_file.read_bytes())
    position = data.index(payload(keys[2]))
    data[position + 100] ^= 0x10
    scene.data_file.write_bytes(data)
    assert scene.load(keys) == set(keys) - {keys[2]}
    assert scene.hits(keys) == keys[:2]
    assert scene.controller.counters.num_corrupt_blocks == 1
    scene.check()
    assert scene.controller.tiers[Tier.DISK].is_enabled
    assert scene.store("D") == keys, "it is computed and stored again"
    assert scene.load(keys) == set(keys)


def test_a_file_that_was_cut_costs_what_was_cut_off(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("D")
    data = scene.data_file.read_bytes()
    first_lost = min(i for i, key in enumerate(keys) if data.index(payload(key)) >= 3 * CHUNK_BYTES)
    with scene.data_file.open("r+b") as file:
        file.truncate(3 * CHUNK_BYTES)
    found = scene.load(keys)
    assert len(found) == 3
    assert scene.hits(keys) == keys[:first_lost]
    assert scene.controller.counters.num_corrupt_blocks == 3
    scene.check()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_still_read_and_is_written_again_when_it_can(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.2)
    scene = opening()
    stored = scene.store("B")
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", failing(code))
        lost = scene.store("C")
        assert (scene.hits(stored), scene.hits(lost)) == (stored, [])
        scene.store("D")  # while it rests
        assert scene.num_hits("D") == 0
    report = scene.controller.report()
    assert report["tiers"][-1]["is_enabled"] is True
    assert report["num_dropped_blocks"] == 8
    assert scene.load(stored) == set(stored)
    scene.check()
    assert until(lambda: scene.store("C") == scene.hits(lost))
    assert scene.load(lost) == set(lost)
    scene.check()
    assert [line.partition(":")[0] for line in plugin_log.messages if "Writing to" in line] == [
        "RC-TIER-FAILED",
        "RC-TIER-WORKS",
    ]
    scene.close()
    again = opening()
    assert (again.hits(stored), again.hits(lost)) == (stored, lost), "the next start has what was written"


def test_a_full_disk_that_does_not_take_deletions_either_is_used_again_with_all_of_its_slots(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    scene = opening(num_slots=6)
    scene.store("BB")
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", failing(errno.ENOSPC))
        patched.setattr(ChunkIndex, "delete", failing(CacheWriteError("as the test wants it")))
        scene.store("C")
        scene.check()
    assert until(lambda: scene.num_hits("D") == 6 or not scene.store("D"))
    keys = chain("D")
    assert scene.load(keys) == set(keys)
    scene.check()
    scene.close()
    assert opening(num_slots=6).num_hits("D") == 6


def test_a_directory_that_is_deleted_takes_the_tier_out_of_service_at_the_next_write(
    opening: Opening,
) -> None:
    scene = opening()
    stored = scene.store("B")
    shutil.rmtree(scene.directory)
    lost = scene.store("C")
    assert scene.hits(stored) == scene.hits(lost) == []
    assert scene.controller.report()["tiers"][-1]["is_enabled"] is False
    scene.close()
    again = opening()
    assert again.hits(stored) == []
    assert again.store("C") == again.hits(lost), "the next start makes a new one"


def test_a_directory_that_is_deleted_is_noticed_while_nothing_is_written_and_what_was_read_is_right(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "_HEALTH_CHECK_INTERVAL_S", 0.01)
    logged: list[str] = []
    monkeypatch.setattr(async_store.logger, "error", lambda text, *args: logged.append(text % args))
    has_read = threading.Event()
    look = ChunkStore.check_in_place
    monkeypatch.setattr(ChunkStore, "check_in_place", lambda store: look(store) if has_read.is_set() else None)
    scene = opening()
    stored = scene.store("B")
    scene.end_step()
    assert scene.controller.tiers[Tier.DISK].is_enabled
    shutil.rmtree(scene.directory)
    assert scene.load(stored) == set(stored), "the engine has its files open"
    has_read.set()
    assert until(lambda: scene.tier._io.why_down() is not None)
    scene.end_step()
    assert scene.controller.report()["tiers"][-1]["is_enabled"] is False
    assert scene.hits(stored) == []
    time.sleep(0.1)
    assert len(logged) == 1
    assert "leave the directory to the engine" in logged[0]
    scene.close()


def test_a_full_disk_with_chunks_of_no_use_keeps_no_engine_from_starting(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    keys = scene.store("D")
    scene.close()
    with sqlite3.connect(scene.data_file.with_name("index.sqlite")) as connection:
        connection.execute("DELETE FROM chunks WHERE position = 2")  # what stands on it is an orphan
    connection.close()
    monkeypatch.setattr(ChunkIndex, "delete", failing(CacheWriteError("as the test wants it")))
    scene = opening()
    assert scene.hits(keys) == keys[:2]
    assert scene.load(keys[:2]) == set(keys[:2])
    assert scene.controller.counters.num_lost_blocks == len(keys) - 3
    assert scene.controller.tiers[Tier.DISK].is_enabled
    scene.check()


def test_a_tier_out_of_service_keeps_nothing_of_the_faster_tiers(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host chunk stays while the disk has later ones of its document; a disk that is gone has none."""
    scene = opening()
    keys = scene.store("B")
    location = scene.tree.locate(keys[0])
    assert location is not None
    scene.tree.remove(location.node, 0b001, Tier.DISK)  # the first was lost
    scene.tree.add(location.node, 0b001, Tier.HOST)
    assert scene.tree.evict(Tier.HOST, 1) is None
    shutil.rmtree(scene.directory)
    scene.store("C")
    assert scene.tree.evict(Tier.HOST, 1) is not None
    assert scene.tree.tiers[Tier.DISK].num_units == 0


def test_a_read_error_is_a_miss(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    keys = scene.store("B")
    monkeypatch.setattr(SlotFile, "read", failing(errno.EIO))
    assert scene.load(keys) == set()
    scene.check()


def test_what_could_not_be_read_leaves_its_room_to_others(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening(num_slots=3)
    lost = scene.store("B")
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "read", failing(errno.EIO))
        assert scene.load(lost) == set()
    assert scene.controller.counters.num_corrupt_blocks == 3
    others = scene.store("C")
    assert scene.load(others) == set(others)
    assert scene.store("B") == scene.hits(lost), "it is computed and stored again"
    assert scene.controller.tiers[Tier.DISK].is_enabled
    assert len(scene.tier._io._store) == len(scene.tier._stored) == 3
    scene.check()


def test_a_read_that_hangs_is_abandoned_and_what_it_brings_later_is_not_written(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    keys = scene.store("B")
    is_reading, go_on, is_read, read = threading.Event(), threading.Event(), threading.Event(), SlotFile.read

    def hang(self: SlotFile, *args: Any) -> None:
        is_reading.set()
        go_on.wait(10)
        read(self, *args)
        is_read.set()

    monkeypatch.setattr(SlotFile, "read", hang)
    job = scene.submit_load(keys)
    assert is_reading.wait(10)
    time.sleep(0.1)  # the read is older than the time-out that comes next
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.05)
    assert not scene.result(job).loaded
    assert scene.hits(keys) == []
    assert not scene.controller.tiers[Tier.DISK].is_enabled
    assert scene.controller.counters.num_corrupt_blocks == 0, "slow is not damaged"
    assert scene.tree.tiers[Tier.DISK].in_use == {}
    go_on.set()
    assert is_read.wait(10)
    scene.settle()
    assert list(scene.tier.take_ended()) == []
    assert (scene.memory == UNTOUCHED).all()


def test_a_reset_cancels_a_hanging_read_before_host_memory_is_reused(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    keys = scene.store("B")
    is_reading, go_on = hanging(monkeypatch, "read")
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.05)
    job = scene.submit_load(keys)
    try:
        assert is_reading.wait(10)
        scene.tier.drain()
        monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 30.0)
        (ended,) = scene.tier.take_ended()  # the manager asks once, and then wants none left
        assert (ended.number, ended.loaded) == (job, [])
    finally:
        go_on.set()
    scene.settle()
    assert (scene.memory == UNTOUCHED).all()


def test_a_hanging_write_disables_the_tier_and_requests_continue(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    scene = opening()
    stored = scene.store("B")
    is_writing, go_on = hanging(monkeypatch, "write")
    try:
        scene.result(scene.submit_store(scene.announce("D")))  # host memory is free at once
        assert is_writing.wait(10)
        scene.end_step()
        assert scene.controller.tiers[Tier.DISK].is_enabled, "it is only slow so far"
        time.sleep(0.1)  # the write is older than the time-out that comes next
        monkeypatch.setattr(async_store, "_WRITE_TIMEOUT_S", 0.05)
        scene.end_step()
        assert not scene.controller.tiers[Tier.DISK].is_enabled
        assert scene.hits(stored) == []
        monkeypatch.setattr(disk, "_OUT_OF_SERVICE_TIMEOUT_S", 0.05)
        scene.tier.clear()
        assert "has not answered in 0.05 s, and is emptied when it does" in plugin_log.text
        monkeypatch.setattr(async_store, "CLOSE_TIMEOUT_S", 0.05)
        scene.tier.shutdown()
        assert f"RC-DISK-HANGS: {scene.data_file.parent} has not answered in 0.05 s" in plugin_log.text
    finally:
        go_on.set()
    scene.settle()
    monkeypatch.undo()
    scene.close()
    assert opening().hits(stored) == [], "it was emptied as soon as it answered"


def test_a_reset_does_not_wait_for_a_disk_that_hangs_while_it_is_emptied(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    stored = scene.store("B")
    go_on, truncate = threading.Event(), SlotFile.truncate
    monkeypatch.setattr(SlotFile, "truncate", lambda self, size: (go_on.wait(10), truncate(self, size))[1])
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.05)
    scene.tier.clear()
    assert not scene.tier._io.finish_writes(0.0), "it is still at it"
    assert scene.hits(stored) == []
    go_on.set()
    scene.settle()
    scene.close()
    assert opening().hits(stored) == []


def test_a_long_read_that_gets_on_is_waited_for(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_io, "NUM_READERS", 1)
    scene = opening()
    keys = scene.store("D")
    monkeypatch.setattr(ChunkStore, "chunks_per_batch", 1)
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 2.0)
    read = SlotFile.read
    # Six parts of half a second: more than the time-out together, and each far less.
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (time.sleep(0.5), read(self, *args))[1])
    since_s = time.monotonic()
    assert scene.load(keys) == set(keys)
    assert time.monotonic() - since_s > async_store.READ_TIMEOUT_S, "longer than one read may take"
    assert scene.controller.tiers[Tier.DISK].is_enabled


def test_a_slow_disk_drops_ends_of_documents_never_their_middle(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document with a hole would keep its beginning in host memory for ever: it is the base of what is on disk."""
    buffer_chunks(monkeypatch, 4)
    monkeypatch.setattr(disk_io, "_TIMEOUT_S", 0.05)
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("DBD")
    parts = [keys[:3], keys[3:8], keys[8:]]
    for part in parts[:2]:
        scene.result(scene.submit_store(part))  # host memory is free in time
    go_on.set()
    scene.settle()
    scene.result(scene.submit_store(parts[2]))
    scene.settle()
    assert list(scene.tier.take_ended()) == []
    on_disk = [key for key in keys if scene.tier.find(key, scene.context)]
    assert on_disk == keys[:4], "what fitted into the buffers, without a hole"
    assert scene.controller.counters.num_dropped_blocks == len(keys) - 4
    scene.check()
    for _ in range(3):
        scene.store("DBD")
    assert scene.hits(keys) == keys, "what was dropped is stored when it comes again"


def test_what_follows_what_is_dropped_is_dropped_though_it_was_taken_before(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer_chunks(monkeypatch, 4)
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("DBD")
    monkeypatch.setattr(disk_io, "_TIMEOUT_S", 0.05)
    scene.submit_store(keys[:9])
    monkeypatch.setattr(disk_io, "_TIMEOUT_S", 30.0)
    scene.submit_store(keys[9:])
    time.sleep(0.2)  # the first job's patience ends, while the second is patient
    go_on.set()
    scene.settle()
    assert len(list(scene.tier.take_ended())) == 2
    assert [key for key in keys if scene.tier.find(key, scene.context)] == keys[:4]
    assert scene.controller.counters.num_dropped_blocks == len(keys) - 4
    scene.check()
    scene.store("DBD")
    assert scene.hits(keys) == keys, "what was dropped is stored when it comes again"


def test_a_job_finds_no_room_while_others_hold_half_of_host_memory(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    buffer_chunks(monkeypatch, 1)
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("DDD")
    first = scene.submit_store(keys)
    try:
        for name in "CB":
            others = scene.announce(name)
            assert scene.result(scene.submit_store(others)).number > first, "it is answered at once"
    finally:
        go_on.set()
    scene.settle()
    scene.result(first)
    assert (scene.hits(keys), scene.num_hits("C"), scene.num_hits("B")) == (keys, 0, 0)
    assert scene.controller.counters.num_dropped_blocks == 5
    assert plugin_log.text.count("RC-DISK-SLOW") == 1
    scene.check()


def test_a_disk_that_hangs_with_jobs_open_lets_go_of_host_memory(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer_chunks(monkeypatch, 1)
    scene = opening()
    is_writing, go_on = hanging(monkeypatch, "write")
    jobs = [scene.submit_store(scene.announce(name)) for name in "BC"]
    try:
        assert is_writing.wait(10)
        assert list(scene.tier.take_ended()) == []
        time.sleep(0.1)  # the write is older than the time-out that comes next
        monkeypatch.setattr(async_store, "_WRITE_TIMEOUT_S", 0.05)
        scene.end_step()
        assert not scene.controller.tiers[Tier.DISK].is_enabled
        ended: list[int] = []
        assert until(lambda: ended.extend(each.number for each in scene.tier.take_ended()) or ended == jobs, 10.0)
    finally:
        go_on.set()
    scene.settle()


def test_a_reset_amid_a_store_lets_go_of_host_memory_at_once(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer_chunks(monkeypatch, 1)
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    job = scene.submit_store(scene.announce("D"))
    try:
        scene.tier.drain()
        (ended,) = scene.tier.take_ended()  # the manager asks once, and then wants none left
        assert ended.number == job
        monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.05)
        scene.tier.clear()
    finally:
        go_on.set()
    scene.settle()
    scene.close()
    assert opening().num_hits("D") == 0
