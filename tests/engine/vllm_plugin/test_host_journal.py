"""The journal of host memory: an engine that is started again finds what is as it was, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.chunkstore import ChunkNote
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.errors import CacheTierError
from ragcache_core.runtime.shared_memory import EngineFiles, journal_folder, new_engine_id
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.offload.host_index import HostIndex, _Run
from tests.engine.vllm_plugin.storing_scene import Steps, host_scheduler, request
from tests.support.waiting import until

IDENTITY = {"weights": "one", "tokens_per_block": 32}
CHUNKS, BYTES = 8, 4096


def host_memory() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (CHUNKS, BYTES), dtype=np.uint8)


def key(i: int) -> bytes:
    return bytes([i]) * 32


def journal(folder: Path, rows: np.ndarray, identity: dict[str, str | int] = IDENTITY) -> HostIndex:
    return HostIndex.open("me", rows, identity, folder)


def record_all(folder: Path, rows: np.ndarray) -> None:
    made = journal(folder, rows)
    for i in range(CHUNKS):
        made.record([i], [key(i)], ChunkNote(key(i - 1) if i else None, f"d{i}", i, i + 1.0, 0.5))
    made.close()


def test_recorded_blocks_are_restored_parents_first(tmp_path: Path) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    again = journal(tmp_path, rows)
    assert [(chunk, e.key, e.parent, e.doc_id, e.frequency) for chunk, e in again.restored] == [
        (i, key(i), key(i - 1) if i else None, f"d{i}", i + 1.0) for i in range(CHUNKS)
    ]
    again.close()
    again.close()


def test_blocks_that_are_entered_as_one_run_are_found_as_if_they_were_entered_one_by_one(tmp_path: Path) -> None:
    rows = host_memory()
    made = journal(tmp_path, rows)
    made.record([1], [key(1)], ChunkNote(key(0), "d", 1, 2.0, 0.5))
    made.record(range(4), [key(i) for i in range(4)], ChunkNote(None, "d", 0, 3.0, 0.5))
    made.close()
    again = journal(tmp_path, rows)
    found = [(row, e.key, e.parent, e.doc_id, e.position, e.frequency) for row, e in again.restored]
    again.close()
    assert found == [(i, key(i), key(i - 1) if i else None, "d", i, 2.0 if i == 1 else 3.0) for i in range(4)]


def test_a_chunk_whose_bytes_changed_is_forgotten(tmp_path: Path) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    rows[3, 77] ^= 1
    again = journal(tmp_path, rows)
    assert [chunk for chunk, _ in again.restored] == [0, 1, 2, 4, 5, 6, 7]
    again.close()


def test_a_chunk_with_the_bytes_of_another_is_forgotten(tmp_path: Path) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    rows[[2, 5]] = rows[[5, 2]]
    again = journal(tmp_path, rows)
    assert [chunk for chunk, _ in again.restored] == [0, 1, 3, 4, 6, 7]
    again.close()


def test_an_evicted_chunk_is_deleted_and_its_slot_is_reused(tmp_path: Path) -> None:
    rows = host_memory()
    made = journal(tmp_path, rows)
    made.record([0], [key(0)], ChunkNote())
    made.remove([0])
    made.record([0], [key(9)], ChunkNote(doc_id="new"))
    made.record([0], [key(8)], ChunkNote(doc_id="recorded already"))
    made.close()
    again = journal(tmp_path, rows)
    assert [(chunk, e.key) for chunk, e in again.restored] == [(0, key(9))]
    again.close()


def test_blocks_are_recorded_soon_although_nothing_wakes_the_journal(tmp_path: Path) -> None:
    rows = host_memory()
    made = journal(tmp_path, rows)
    made.record([0], [key(0)], ChunkNote())
    made.record([1], [key(1)], ChunkNote())
    made.remove([1])
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s and (made._work or not list(made._index.rows())):
        time.sleep(0.01)  # a poll: another process or thread makes it true
    assert [slot for slot, *_ in made._index.rows()] == [0]
    made.close()


def test_bytes_read_while_their_chunk_was_evicted_are_not_recorded_under_its_key(tmp_path: Path) -> None:
    rows = host_memory()
    made = journal(tmp_path, rows)
    generation = int(made._generation[4])
    made.remove([4])  # between the reading of the bytes and the entry
    made._record([_Run([4], [key(4)], [generation], set(), ChunkNote())])
    made.close()
    again = journal(tmp_path, rows)
    assert again.restored == []
    again.close()


def test_a_journal_of_another_model_is_recreated(tmp_path: Path) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    other = journal(tmp_path, rows, {**IDENTITY, "weights": "two"})
    assert other.restored == []
    other.close()
    back = journal(tmp_path, rows)
    assert back.restored == []
    back.close()


@pytest.mark.parametrize("damage", [b"", b"garbage" * 1000])
def test_a_damaged_index_is_recreated(tmp_path: Path, damage: bytes) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    (tmp_path / "vllm_offload_me.journal" / "index.sqlite").write_bytes(damage)
    again = journal(tmp_path, rows)
    assert again.restored == []
    again.close()


def test_a_journal_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = journal(tmp_path, host_memory())
        made.record([0], [key(0)], ChunkNote())
        found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        made.close()
    finally:
        os.umask(before)
    files = dict.fromkeys(["index.sqlite", "index.sqlite-wal", "identity"], 0o600)
    assert found == {"vllm_offload_me.journal": 0o700, **files}


def test_a_smaller_host_memory_forgets_what_lay_beyond(tmp_path: Path) -> None:
    rows = host_memory()
    record_all(tmp_path, rows)
    again = journal(tmp_path, rows[:3])
    assert [chunk for chunk, _ in again.restored] == [0, 1, 2]
    again.close()


def test_a_journal_that_cannot_be_written_stops_journaling_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = journal(tmp_path, host_memory())

    def refuse(*_: object) -> None:
        raise CacheTierError("no space left")

    monkeypatch.setattr(ChunkIndex, "insert", refuse)
    made.record([0], [key(0)], ChunkNote())
    made._thread.join(timeout=30.0)
    assert not made._thread.is_alive()
    made.record([1], [key(1)], ChunkNote())
    made.remove([1])
    made.close()


@pytest.fixture
def files() -> Iterator[EngineFiles]:
    """What an engine that is started more than once has in shared memory."""
    held = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 20)
    yield held
    held.remove()


@pytest.mark.parametrize("has_disk", [False, True])
def test_an_engine_that_is_started_again_finds_its_host_memory_unless_it_has_a_disk(
    has_disk: bool, files: EngineFiles, tmp_path: Path, identity: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.offload.spec.kv_identity", lambda config: IDENTITY)
    tiers: dict[str, Any] = {"disk_bytes": "1MiB", "directory": tmp_path} if has_disk else {}
    with host_scheduler(400, "1MiB", files=files, **tiers) as scheduler:
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("r", list(range(10, 110)), 1))
        assert until(lambda: not steps.step()), "a disk takes its time"
        assert steps.num_stored == 6
    assert journal_folder(files.engine_id).exists() != has_disk
    with host_scheduler(400, "1MiB", files=files, **tiers) as scheduler:
        host, disk = (scheduler._controller.tree.tiers[tier].num_units for tier in (Tier.HOST, Tier.DISK))
        assert (host, disk) == ((0, 6) if has_disk else (6, 0))
