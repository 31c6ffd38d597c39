"""The disk tier as vLLM's tiering uses it: a real store, real host memory, and everything that can go wrong below."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, CacheLockedError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin import disk, disk_io
from ragcache_core.vllm_plugin.controller import CacheController
from ragcache_core.vllm_plugin.disk import DiskTier
from ragcache_core.vllm_plugin.settings import PluginSettings

BLOCK = 4
BLOCKS = {"A": 1, "B": 3, "C": 2, "D": 6}
CHUNK_BYTES = 4096
NUM_ROWS = 32
UNTOUCHED = 0xEE


def chain(documents: str) -> list[OffloadKey]:
    """Return the chained keys of a prompt, a block for a unit."""
    keys: list[bytes] = []
    for i, name in enumerate(n for d in documents for n in [d] * BLOCKS[d]):
        keys.append(sha256(b"".join([*keys[-1:], f"{i} {name}".encode()])).digest())
    return [make_offload_key(key, 0) for key in keys]


def payload(key: OffloadKey) -> bytes:
    return Random(key).randbytes(CHUNK_BYTES)


class Scene:
    """A directory, and the tier that an engine has on it; a new one is a new start of the engine."""

    def __init__(self, directory: Path, num_slots: int = 24) -> None:
        self.directory = directory
        self.memory = np.full((NUM_ROWS, CHUNK_BYTES), UNTOUCHED, dtype=np.uint8)
        self.controller = CacheController(
            PluginSettings(policy="pgdsf"),
            tokens_per_block=BLOCK,
            shadow_blocks=8,
            prefill_cost=PrefillCostModel.default(),
        )
        self.tree = self.controller.tree
        spec: Any = SimpleNamespace(controller=self.controller, config=None)
        self.tier = DiskTier(spec, memoryview(self.memory), "DiskTier", str(directory), num_slots * CHUNK_BYTES)
        self.num_jobs = 0
        self.context = ReqContext("r")

    @property
    def data_file(self) -> Path:
        (path,) = self.directory.glob("*/chunks.data")
        return path

    def announce(self, documents: str) -> list[OffloadKey]:
        """Put a request's path into the tree, as one that runs does, and return its keys."""
        keys = chain(documents)
        name = f"{documents} {self.num_jobs}"
        segments, end = [], 0
        for doc in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, end, end + BLOCKS[doc] * BLOCK, doc))
            end += BLOCKS[doc] * BLOCK
        hashes = [key[:-4] for key in keys]
        self.controller.on_new_request(name, tuple(segments), hashes, end, 0.0)
        self.controller.on_admitted(name, hashes, {}, 0.0)
        self.controller.on_finished(name)
        return keys

    def submit_store(self, keys: list[OffloadKey]) -> int:
        rows = list(range(len(keys)))
        for row, key in zip(rows, keys, strict=True):
            self.memory[row] = np.frombuffer(payload(key), dtype=np.uint8)
        self.num_jobs += 1
        self.tier.submit_store(TransferJob(self.num_jobs, keys, np.array(rows, np.int32), False, self.context))
        return self.num_jobs

    def store(self, documents: str) -> list[OffloadKey]:
        """Write a request's chunks and wait until the disk has them, or has failed."""
        keys = self.announce(documents)
        job_id = self.submit_store(keys)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (job_id, True)
        return keys

    def submit_load(self, keys: list[OffloadKey], first_row: int = 8) -> int:
        self.memory[:] = UNTOUCHED
        self.num_jobs += 1
        rows = np.arange(first_row, first_row + len(keys), dtype=np.int32)
        self.tier.submit_load(TransferJob(self.num_jobs, keys, rows, True, self.context))
        return self.num_jobs

    def result(self, job_id: int, timeout_s: float = 10.0) -> JobResult:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job_id
                return result
            time.sleep(0.002)
        raise AssertionError(f"job {job_id} did not end in {timeout_s} s")

    def load(self, keys: list[OffloadKey]) -> set[OffloadKey]:
        """Read chunks and return those that came; their bytes are right, and the rows of the others untouched."""
        result = self.result(self.submit_load(keys))
        assert result.successful_keys is not None
        found = set(result.successful_keys)
        assert result.success == (found == set(keys))
        for row, key in enumerate(keys, 8):
            expected = payload(key) if key in found else bytes([UNTOUCHED]) * CHUNK_BYTES
            assert self.memory[row].tobytes() == expected
        assert (self.memory[8 + len(keys) :] == UNTOUCHED).all()
        return found

    def hits(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the leading keys that a look-up finds."""
        found = []
        for key in keys:
            if self.tier.lookup(key, self.context) is not LookupResult.HIT:
                break
            found.append(key)
        return found

    def num_hits(self, documents: str) -> int:
        return len(self.hits(chain(documents)))

    def check(self) -> None:
        check_invariants(self.tree, is_connected=False)
        assert self.tree.tiers[Tier.DISK].in_use == {}, "nothing is being written or read"
        assert self.tree.tiers[Tier.DISK].num_units == len(self.tier._stored)
        assert all(key in self.tier._io._store for key in self.tier._stored)

    def close(self) -> None:
        self.tier.shutdown()


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's identity needs an engine; test_tiers_on_the_engine.py has one."""
    monkeypatch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Start an engine's tier on this test's directory; what is left open is closed."""
    opened: list[Scene] = []

    def open_scene(num_slots: int = 24, name: str = "cache") -> Scene:
        opened.append(Scene(tmp_path / name, num_slots))
        return opened[-1]

    yield open_scene
    for scene in opened:
        scene.close()


Opening = Callable[..., Scene]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


# Storing and loading


def test_what_was_stored_is_loaded_byte_for_byte(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("AB")
    assert scene.hits(keys) == keys
    assert scene.load(keys) == set(keys)
    scene.check()
    assert scene.controller.report()["num_corrupt_chunks"] == 0


def test_chunks_are_not_there_before_they_are_on_the_disk(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("B")
    job_id = scene.submit_store(keys)
    assert scene.result(job_id).success, "host memory is free as soon as it was copied"
    assert scene.hits(keys) == []
    assert scene.tree.tiers[Tier.DISK].num_units == 3
    go_on.set()
    scene.tier.drain_jobs()
    assert list(scene.tier.get_finished_jobs()) == []
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


def test_a_look_up_and_a_drain_of_nothing_answer_at_once(opening: Opening) -> None:
    scene = opening()
    assert scene.num_hits("D") == 0
    scene.tier.drain_jobs()
    assert list(scene.tier.get_finished_jobs()) == []
    assert not scene.tier.has_pending_work()


def test_clearing_forgets_everything_for_good(opening: Opening) -> None:
    scene = opening()
    scene.store("AB")
    scene.tier.clear()
    assert scene.num_hits("AB") == 0
    scene.check()
    scene.store("C")
    scene.close()
    again = opening()
    assert (again.num_hits("AB"), again.num_hits("C")) == (0, 2)


def test_clearing_a_disk_that_fails_takes_the_tier_out_of_service(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    scene.store("B")
    monkeypatch.setattr(SlotFile, "truncate", failing(errno.EIO))
    scene.tier.clear()
    assert scene.num_hits("B") == 0
    assert not scene.controller.tiers[Tier.DISK].is_enabled


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
    location = again.tree.locate(keys[1][:-4])
    assert location is not None
    assert (location.node.doc_id, location.node.start, len(location.node.keys)) == ("B", 1, 3)
    assert location.node.frequency == 2
    assert location.node.avg_cost_s > 0
    assert again.controller.report()["num_lost_chunks"] == 0


def test_chunks_whose_prefix_is_gone_are_given_up_at_the_start(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("B")
    scene.tier._io._store.delete_many([keys[1][:-4]])
    scene.close()
    again = opening()
    assert again.hits(keys) == keys[:1]
    assert again.controller.counters.num_lost_chunks == 1
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


def test_two_engines_on_one_directory_are_refused(opening: Opening, tmp_path: Path) -> None:
    scene = opening()
    scene.store("B")
    with pytest.raises(CacheLockedError):
        Scene(tmp_path / "cache")
    assert scene.num_hits("B") == 3


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CacheDirectoryError):
        Scene(tmp_path / "file")
    with pytest.raises(CacheCapacityError):
        Scene(tmp_path / "cache", num_slots=0)


# A cap


def test_the_longest_prompt_stores_the_beginning_that_fits(opening: Opening) -> None:
    scene = opening(num_slots=4)
    keys = scene.store("D")
    assert scene.hits(keys) == keys[:4]
    assert scene.controller.counters.num_dropped_chunks == 2
    scene.check()


def test_full_it_gives_up_tails_of_what_is_worth_least(opening: Opening) -> None:
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
    scene.tier.submit_store(TransferJob(scene.num_jobs, others, np.array([0, 1]), False, scene.context))
    go_on.set()
    results: dict[int, JobResult] = {}
    assert wait_until(
        lambda: results.update({r.job_id: r for r in scene.tier.get_finished_jobs()}) or len(results) == 2
    )
    assert results[job_id].success
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
    tmp_path_factory: pytest.TempPathFactory, num_slots: int, steps: list[tuple[str, str]], seed: int
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


# What goes wrong


def failing(code: int) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, "as the test wants it")

    return fail


def test_a_damaged_chunk_is_a_miss_and_counted_and_the_others_are_served(opening: Opening) -> None:
    scene = opening()
    keys = scene.store("D")
    data = bytearray(scene.data_file.read_bytes())
    position = data.index(payload(keys[2]))
    data[position + 100] ^= 0x10
    scene.data_file.write_bytes(data)
    assert scene.load(keys) == set(keys) - {keys[2]}
    assert scene.hits(keys) == keys[:2]
    assert scene.controller.counters.num_corrupt_chunks == 1
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
    assert scene.controller.counters.num_corrupt_chunks == 3
    scene.check()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_cannot_be_written_takes_the_tier_out_of_service_not_the_engine(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    scene = opening()
    stored = scene.store("B")
    monkeypatch.setattr(SlotFile, "write", failing(code))
    lost = scene.store("C")
    assert scene.hits(stored) == scene.hits(lost) == []
    report = scene.controller.report()
    assert report["tiers"][-1]["is_enabled"] is False  # type: ignore[index]
    assert report["num_dropped_chunks"] == 2
    scene.store("D")
    assert scene.num_hits("D") == 0
    scene.tier.drain_jobs()
    scene.close()
    monkeypatch.undo()
    monkeypatch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
    assert opening().hits(stored) == stored, "the next start has what was written"


def test_a_tier_out_of_service_keeps_nothing_of_the_faster_tiers(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host chunk stays while the disk has later ones of its document; a disk that is gone has none."""
    scene = opening()
    keys = scene.store("B")
    location = scene.tree.locate(keys[0][:-4])
    assert location is not None
    scene.tree.remove(location.node, 0b001, Tier.DISK)  # the first was lost
    scene.tree.add(location.node, 0b001, Tier.HOST)
    assert scene.tree.evict(Tier.HOST, 1) is None
    monkeypatch.setattr(SlotFile, "write", failing(errno.ENOSPC))
    scene.store("C")
    assert scene.tree.evict(Tier.HOST, 1) is not None
    assert scene.tree.tiers[Tier.DISK].num_units == 0


def test_a_read_error_is_a_miss(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening()
    keys = scene.store("B")
    monkeypatch.setattr(SlotFile, "read", failing(errno.EIO))
    assert scene.load(keys) == set()
    scene.check()


def test_a_read_that_hangs_is_given_up_and_what_it_brings_later_is_not_written(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opening()
    keys = scene.store("B")
    monkeypatch.setattr(disk, "_READ_TIMEOUT_S", 0.1)
    go_on, is_read, read = threading.Event(), threading.Event(), SlotFile.read

    def hang(self: SlotFile, *args: Any) -> None:
        go_on.wait(10)
        read(self, *args)
        is_read.set()

    monkeypatch.setattr(SlotFile, "read", hang)
    result = scene.result(scene.submit_load(keys))
    assert not result.success
    assert not result.successful_keys
    assert scene.hits(keys) == []
    assert not scene.controller.tiers[Tier.DISK].is_enabled
    assert scene.controller.counters.num_corrupt_chunks == 0, "slow is not damaged"
    assert scene.tree.tiers[Tier.DISK].in_use == {}
    go_on.set()
    assert is_read.wait(10)
    scene.tier.drain_jobs()
    assert list(scene.tier.get_finished_jobs()) == []
    assert (scene.memory == UNTOUCHED).all()


def test_a_slow_disk_drops_ends_of_documents_never_their_middle(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document with a hole would keep its beginning in host memory for ever: it is the base of what is on disk."""
    monkeypatch.setattr(disk_io.DiskIO.__init__, "__kwdefaults__", {"num_buffered_bytes": 4 * CHUNK_BYTES})
    scene = opening()
    go_on, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    keys = scene.announce("DBD")
    parts = [keys[:3], keys[3:8], keys[8:]]
    for part in parts[:2]:
        assert scene.result(scene.submit_store(part)).success, "host memory is free at once"
    go_on.set()
    scene.tier.drain_jobs()
    assert scene.result(scene.submit_store(parts[2])).success
    scene.tier.drain_jobs()
    assert list(scene.tier.get_finished_jobs()) == []
    on_disk = [key for key in keys if scene.tier.lookup(key, scene.context) is LookupResult.HIT]
    assert on_disk == keys[:4], "what fitted into the buffers, without a hole"
    assert scene.controller.counters.num_dropped_chunks == len(keys) - 4
    scene.check()
    assert scene.store("DBD") == keys
    assert scene.hits(keys) == keys


def test_closing_twice_is_no_error_and_waits_for_what_is_on_its_way(opening: Opening) -> None:
    scene = opening()
    keys = scene.announce("D")
    scene.submit_store(keys)
    scene.tier.shutdown()
    scene.tier.shutdown()
    assert opening().hits(keys) == keys
