"""The disk tier as the manager of tiers uses it: a real store, real host memory, a cap, and new starts."""

from __future__ import annotations

import base64
import errno
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.cpu import shared_offload_region
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.chunkstore.encryption import KEY_ENV
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, CacheLockedError
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from ragcache_core.vllm_plugin.disk import io as disk_io
from ragcache_core.vllm_plugin.disk.manager import DiskTier
from ragcache_core.vllm_plugin.lower.jobs import TierJob
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from tests.engine.vllm_plugin.disk_scene import (
    CHUNK_BYTES,
    NUM_ROWS,
    Opening,
    Scene,
    chain,
    failing,
    offloading_spec,
    payload,
)
from tests.support.waiting import until

# Storing and loading


def test_what_was_stored_is_loaded_byte_for_byte(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("AB")
    assert scene.hits(keys) == keys
    assert scene.load(keys) == set(keys)
    scene.check()
    assert scene.controller.report()["num_corrupt_blocks"] == 0


def test_chunks_are_not_there_before_they_are_on_the_disk(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("B")
    job_id = scene.submit_store(keys)
    scene.result(job_id)  # host memory is free as soon as it was copied
    assert scene.hits(keys) == []
    assert scene.tree.tiers[Tier.DISK].num_units == 3
    go_on.set()
    scene.settle()
    assert list(scene.tier.take_ended()) == []
    assert scene.hits(keys) == keys
    scene.check()


def test_what_is_there_already_is_not_written_again(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    scene.store("B")
    written: list[int] = []
    write = SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, s, p: (written.append(len(p)), write(self, s, p))[1])
    scene.store("B")
    assert sum(written) == 0
    scene.store("BA")
    assert sum(written) == 1


def test_an_encrypted_disk_serves_the_same_bytes_also_after_a_restart_and_none_without_its_key(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, base64.b64encode(b"a" * 32).decode())
    scene = opening()
    keys = scene.store("AD")
    assert scene.load(keys) == set(keys)
    scene.close()
    on_disk = b"".join(path.read_bytes() for path in scene.directory.rglob("*") if path.is_file())
    assert not any(payload(key)[:16] in on_disk for key in keys)
    scene = opening()
    assert scene.load(keys) == set(keys)
    scene.close()
    monkeypatch.setenv(KEY_ENV, base64.b64encode(b"b" * 32).decode())
    with pytest.raises(CacheDirectoryError, match="is encrypted with the key"):
        opening()


def test_a_look_up_and_a_drain_of_nothing_answer_at_once(opening: Opening) -> None:
    scene = opening()
    assert scene.num_hits("D") == 0
    scene.settle()
    assert list(scene.tier.take_ended()) == []
    assert not scene.tier.has_pending_work


def test_clearing_forgets_everything_for_good_and_stores_nothing_under_the_old_identity(opening: Opening) -> None:
    """The weights may have changed under the engine; the identity is that of its start."""
    scene = opening()
    scene.store("AB")
    scene.tier.clear()
    assert scene.num_hits("AB") == 0
    scene.check()
    scene.store("C")
    assert scene.num_hits("C") == 0
    assert not scene.controller.tiers[Tier.DISK].is_enabled
    scene.close()
    again = opening()
    assert (again.num_hits("AB"), again.num_hits("C")) == (0, 0)
    assert again.store("C") == again.hits(chain("C"))


@pytest.mark.parametrize("part", [SlotFile, ChunkIndex])
def test_a_disk_that_cannot_be_emptied_gives_nothing_back_after_a_reset(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, part: type
) -> None:
    scene = opening()
    keys = scene.store("B")
    monkeypatch.setattr(part, "truncate" if part is SlotFile else "clear", failing(errno.EIO))
    scene.tier.clear()
    assert not scene.hits(keys)
    assert not scene.controller.tiers[Tier.DISK].is_enabled
    assert f"still has KV from before a reset: {scene.data_file.parent} could not be emptied" in plugin_log.text
    assert "delete the folder" in plugin_log.text
    scene.close()
    monkeypatch.undo()
    assert not opening().load(keys)


def test_a_read_that_takes_its_time_is_brought_before_a_reset(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    keys = scene.store("D")
    read = SlotFile.read
    # Long enough to be under way when the reset asks, and far less than it waits.
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (time.sleep(0.2), read(self, *args))[1])
    job = scene.submit_load(keys)
    scene.tier.drain()
    (ended,) = scene.tier.take_ended()
    assert (ended.number, ended.loaded) == (job, keys)


# Starting again


def test_a_new_start_finds_the_chunks_and_the_documents_numbers(opening: Opening) -> None:
    scene = opening()
    scene.announce("AB")
    keys = scene.store("AB")
    scene.close()
    again = opening()
    assert again.hits(keys) == keys
    assert again.load(keys) == set(keys)
    again.check()
    location = again.tree.locate(keys[1])
    assert location is not None
    assert (location.node.doc_id, location.node.start, len(location.node.keys)) == ("B", 1, 3)
    assert location.node.frequency == 2
    assert location.node.avg_cost_s > 0
    assert again.controller.report()["num_lost_blocks"] == 0


def test_a_new_start_finds_the_uses_since_a_document_was_stored(opening: Opening) -> None:
    scene = opening()
    key = scene.store("B")[0]
    stored = frequency(scene, key)
    for documents in product("ABCD", repeat=3):  # in enough places for uses to be noted again
        scene.announce("".join(documents))
    scene.end_step()
    scene.settle()
    assert frequency(scene, key) == stored + 16
    scene.close()
    assert frequency(opening(), key) == stored + 16


def frequency(scene: Scene, key: BlockKey) -> int:
    location = scene.tree.locate(key)
    assert location is not None
    return location.node.frequency


@pytest.mark.parametrize("damage", ["parent = NULL", "position = 0", "doc_id = 'another'"])
def test_a_chunk_recorded_at_another_place_is_dropped_at_the_start(opening: Opening, damage: str) -> None:
    """A tree with a chunk in two places would let go of one for the other."""
    scene = opening()
    keys = scene.store("D")
    scene.close()
    (index,) = scene.directory.glob("*/index.sqlite")
    with sqlite3.connect(index) as connection:
        connection.execute(f"UPDATE chunks SET {damage} WHERE key = ?", (keys[3],))
    connection.close()
    again = opening()
    assert again.hits(keys) == keys[:3]
    assert (again.controller.counters.num_corrupt_blocks, again.controller.counters.num_lost_blocks) == (1, 2)
    assert again.store("D") == keys, "it is computed and stored again"
    for documents in ("BC", "CB", "AD", "DA", "D"):
        again.store(documents)
    again.check()


def test_chunks_without_their_prefix_are_dropped_at_the_start(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("B")
    scene.tier._io._store.delete_many([keys[1]])
    scene.close()
    again = opening()
    assert again.hits(keys) == keys[:1]
    assert again.controller.counters.num_lost_blocks == 1
    assert len(again.tier._io._store) == 1


def test_a_smaller_tier_keeps_beginnings(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("D")
    scene.close()
    again = opening(num_slots=2)
    assert again.hits(keys) == keys[:2]
    again.check()
    again.store("B")
    again.check()


def test_what_an_earlier_engine_stored_gives_way_like_anything_else(opening: Opening) -> None:
    scene = opening(num_slots=6)
    scene.store("D")
    scene.close()
    again = opening(num_slots=6)
    again.store("B")
    assert (again.num_hits("D"), again.num_hits("B")) == (3, 3)
    assert again.controller.counters.num_dropped_blocks == 0
    again.check()


def test_two_engines_on_one_directory_are_refused(opening: Opening, tmp_path: Path) -> None:
    scene = opening()
    scene.store("B")
    with pytest.raises(CacheLockedError):
        Scene(tmp_path / "cache")
    assert scene.num_hits("B") == 3


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(identity: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CacheDirectoryError):
        Scene(tmp_path / "file")
    with pytest.raises(CacheCapacityError):
        Scene(tmp_path / "cache", num_slots=0)


def test_vllm_gets_its_host_memory_back_when_the_tiers_are_shut_down(
    identity: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    monkeypatch.setattr(
        shared_offload_region.logger, "warning", lambda message, *args, **kwargs: failures.append(message)
    )
    region = SharedOffloadRegion(f"test-{secrets.token_hex(4)}", 8, None, CHUNK_BYTES, CHUNK_BYTES)
    controller = Scene(tmp_path / "other").controller
    primary = HostTier(8, controller, region)
    view = primary.get_kv_memoryview()
    spec = offloading_spec(controller)
    tier = DiskTier(spec, view, str(tmp_path / "cache"), 8 * CHUNK_BYTES)
    del view
    TierManager(primary, [tier], CHUNK_BYTES).shutdown()
    assert failures == []
    assert not Path(region.mmap_path).exists()


@pytest.mark.parametrize("is_reset", [False, True])
def test_host_memory_that_waits_for_the_disk_is_kept_until_it_is_copied_or_reset(
    identity: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    """A store that finds no room meanwhile is passed over, without a wait."""
    monkeypatch.setattr(disk_io.DiskIO.__init__, "__kwdefaults__", {"num_buffered_bytes": CHUNK_BYTES})
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    scene = Scene(tmp_path / "other")
    region = SharedOffloadRegion(f"test-{secrets.token_hex(4)}", 8, None, CHUNK_BYTES, CHUNK_BYTES)
    primary = HostTier(8, scene.controller, region)
    spec = offloading_spec(scene.controller)
    tier = DiskTier(spec, primary.get_kv_memoryview(), str(tmp_path / "cache"), 8 * CHUNK_BYTES)
    manager = TierManager(primary, [tier], CHUNK_BYTES)
    manager.on_new_request(scene.context)
    keys, others = scene.announce("D"), scene.announce("B")
    try:
        assert manager.prepare_store(keys, scene.context) is not None
        manager.complete_store(keys, scene.context)
        manager.on_schedule_end(ScheduleEndContext((), ()))
        assert manager.has_pending_work()
        assert not manager.needs_steps, "no step brings the disk nearer"
        assert manager.prepare_store(others, scene.context) is None
        if is_reset:
            manager.reset_cache()
        else:
            go_on.set()
            assert until(lambda: manager.on_schedule_end(ScheduleEndContext((), ())) or not manager.has_pending_work())
        assert manager.prepare_store(others, scene.context) is not None
    finally:
        go_on.set()
        manager.shutdown()
        scene.close()
    with ChunkStore(
        tmp_path / "cache",
        {"model": "demo", "weights": "5f3a"},
        chunk_bytes=CHUNK_BYTES,
        capacity_bytes=8 * CHUNK_BYTES,
    ) as store:
        assert len(store) == (1 if is_reset else 6)


def test_what_is_read_from_the_disk_needs_steps_although_stores_wait_for_it(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("D")
    scene.submit_store(scene.announce("B"))
    assert scene.tier.newest_store == scene.num_jobs
    scene.submit_load(keys)
    assert scene.tier.newest_store is None
    scene.settle()
    assert [ended.loaded for ended in scene.tier.take_ended()] == [(), keys]
    assert scene.tier.newest_store is None


def test_an_engine_steps_for_a_slow_disk_for_a_while_and_again_for_what_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("ragcache_core.vllm_plugin.connector.tiered_connector.time.monotonic", lambda: clock[0])
    manager = SimpleNamespace(newest_store=None)
    engine = SimpleNamespace(tiers=manager, below=SimpleNamespace(has_pending_push_work=lambda: False))
    engine._waits_for, engine._waits_since_s = None, 0.0
    engine._prefetcher, engine._emits_events = None, False
    engine.controller = SimpleNamespace(forgetting=SimpleNamespace(sweep=lambda: None))
    asked = []
    for clock[0], manager.newest_store in ((100.0, 7), (101.9, 7), (102.1, 7), (200.0, 8), (203.0, None)):
        asked.append(RAGCacheConnector.has_pending_push_work(engine))
    assert asked == [True, True, False, True, False]


# A cap


def test_the_longest_prompt_stores_the_beginning_that_fits(opening: Opening) -> None:
    scene = opening(num_slots=4)
    keys = scene.store("D")
    assert scene.hits(keys) == keys[:4]
    assert scene.controller.counters.num_dropped_blocks == 2
    scene.check()


def test_a_full_tier_evicts_tails_of_the_lowest_priority(opening: Opening) -> None:
    scene = opening(num_slots=6)
    for _ in range(5):
        scene.announce("B")
    scene.store("B")
    scene.store("CA")
    assert (scene.num_hits("B"), scene.num_hits("CA")) == (3, 3)
    scene.store("A")
    assert (scene.num_hits("B"), scene.num_hits("CA"), scene.num_hits("A")) == (3, 2, 1)
    assert scene.tree.tiers[Tier.DISK].num_evicted_units == 1
    scene.check()


def test_a_chunk_that_is_being_read_is_not_evicted(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening(num_slots=3)
    keys = scene.store("B")
    go_on, read = threading.Event(), SlotFile.read
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (go_on.wait(10), read(self, *args))[1])
    job_id = scene.submit_load(keys)
    others = scene.announce("C")
    scene.num_jobs += 1
    scene.tier.store(TierJob(scene.num_jobs, scene.context, others, [0, 1]))
    go_on.set()
    loaded: dict[int, Sequence[BlockKey]] = {}
    assert until(lambda: loaded.update({e.number: e.loaded for e in scene.tier.take_ended()}) or len(loaded) == 2, 30.0)
    assert loaded[job_id] == keys
    assert scene.memory[8].tobytes() == payload(keys[0])
    assert scene.hits(others) == []
    scene.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.text("ABCD", min_size=1, max_size=3), st.sampled_from(("store", "load", "restart", "damage"))),
        max_size=14,
    ),
    seed=st.integers(0, 5),
)
def test_whatever_happens_no_wrong_byte_is_ever_served(
    identity: None, tmp_path_factory: pytest.TempPathFactory, num_slots: int, steps: list[tuple[str, str]], seed: int
) -> None:
    random = Random(seed)
    directory = tmp_path_factory.mktemp("disk")
    scene = Scene(directory, num_slots)
    try:
        for documents, step in steps:
            if step == "store":
                scene.store(documents)
            elif step == "load":
                if hits := scene.hits(chain(documents)[: NUM_ROWS - 8]):
                    found = scene.load(hits)
                    assert set(scene.hits(hits)) <= found
            else:
                scene.close()
                if step == "damage" and scene.data_file.stat().st_size >= CHUNK_BYTES:
                    damage(scene.data_file, random)
                scene = Scene(directory, num_slots)
            scene.check()
            assert len(scene.tier._io._store) <= num_slots
    finally:
        scene.close()


def damage(path: Path, random: Random) -> None:
    """Flip bits in a page, write zeros over one, or cut the end off; the first two keep the size."""
    data = bytearray(path.read_bytes())
    page = random.randrange(len(data) // CHUNK_BYTES) * CHUNK_BYTES
    match random.randrange(3):
        case 0:
            data[page + random.randrange(CHUNK_BYTES)] ^= 1 << random.randrange(8)
        case 1:
            data[page : page + CHUNK_BYTES] = bytes(CHUNK_BYTES)
        case 2:
            del data[page + random.randrange(CHUNK_BYTES) :]
    path.write_bytes(data)


def test_a_quota_of_the_disk_is_kept_by_giving_up_ones_own(opening: Opening) -> None:
    """Those without a tenant are a party like any other."""
    it = opening()
    shares = it.tree.tiers[Tier.DISK].shares
    shares.divide(24, {None: 1.0}, {None: 5})
    for documents in ("A", "BC", "D", "CB"):
        it.store(documents)
        assert shares.owned[None] <= 5, documents
        it.check()
    assert it.num_hits("CB") == 5
    it.close()
    assert opening().tree.tiers[Tier.DISK].num_units == 5, "the files are the same"


def test_documents_of_two_collections_keep_to_the_quota_of_each_on_the_disk(opening: Opening, tmp_path: Path) -> None:
    path = tmp_path / "collections.toml"
    path.write_text('[[collections]]\nname = "b"\nids = ["B"]\n[[collections]]\nname = "d"\nids = ["D"]\n')
    it = opening(tenants=path)
    shares = it.tree.tiers[Tier.DISK].shares
    shares.divide(24, {None: 1.0, "b": 1.0, "d": 1.0}, {"b": 4, "d": 5})
    for documents, is_whole in (("AB", True), ("CB", True), ("DB", False), ("BA", True), ("CD", False)):
        keys = it.store(documents)
        assert (it.num_hits(documents) == len(keys)) == is_whole, documents
        assert shares.owned.get("b", 0) <= 4
        assert shares.owned.get("d", 0) <= 5
        it.check()
