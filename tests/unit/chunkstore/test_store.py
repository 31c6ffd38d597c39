"""What is written is read, from whatever memory, and survives closing; what is deleted makes room."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkEntry, ChunkNote, ChunkStore, ChunkWrite, list_namespaces
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheDirectoryError, CacheTierError

from .conftest import CHUNK_BYTES, IDENTITY, Opening, aligned, keys, payload, read, writes


@pytest.mark.parametrize("function", ["open", "preadv", "pwritev"])
def test_where_the_file_system_has_no_direct_input_and_output_it_is_buffered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    real: Any = getattr(os, function)

    def refusing(*arguments: Any) -> Any:
        if function != "open" or arguments[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, function, refusing)
        store = ChunkStore(folder, IDENTITY, chunk_bytes=CHUNK_BYTES, capacity_bytes=1 << 20)
    with store:
        assert not store.is_direct
        store.write_many(writes(keys(2)))
        assert read(store, b"key 1") == payload(b"key 1")


def test_many_chunks_are_read_in_any_order_and_misses_are_among_them(store: ChunkStore) -> None:
    store.write_many(writes(keys(8)))
    wanted = [b"key 6", b"none", b"key 0", b"key 1", b"key 6", b"key 7"]
    targets = [aligned(CHUNK_BYTES) for _ in wanted]
    assert store.read_many(list(zip(wanted, targets, strict=True))) == [True, False, True, True, True, True]
    for key, target in zip(wanted, targets, strict=True):
        assert key == b"none" or target == payload(key)


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 4096, 4097, 40_000])
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_chunks_of_any_size_go_to_and_from_memory_anywhere(opening: Opening, chunk_bytes: int, offset: int) -> None:
    store = opening(chunk_bytes=chunk_bytes)
    chunks = []
    for key in keys(5):
        source = aligned(chunk_bytes, offset)
        source[:] = payload(key, chunk_bytes)
        chunks.append(ChunkWrite(key, source))
    store.write_many(chunks)
    targets = [aligned(chunk_bytes, offset) for _ in chunks]
    assert store.read_many([(c.key, t) for c, t in zip(chunks, targets, strict=True)]) == [True] * 5
    assert targets == [payload(key, chunk_bytes) for key in keys(5)]
    assert store.slot_bytes % 4096 == 0
    assert (store.path / "chunks.data").stat().st_size == 5 * store.slot_bytes


def test_entries_come_with_their_notes_parents_first(opening: Opening) -> None:
    noted = [
        ChunkWrite(b"leaf", payload(b"leaf"), ChunkNote(b"root", "Straße 7", 1, 2.5, 0.25)),
        ChunkWrite(b"root", payload(b"root"), ChunkNote(None, None, 0, 7.0, 1e-9)),
    ]
    with opening() as store:
        store.write_many(noted)
        assert [entry.key for entry in store.entries()] == [b"root", b"leaf"]
    assert list(opening().entries()) == [
        ChunkEntry(b"root", None, None, 0, 7.0, 1e-9),
        ChunkEntry(b"leaf", b"root", "Straße 7", 1, 2.5, 0.25),
    ]


def test_clear_forgets_everything_and_gives_the_space_back(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(16)))
        store.clear()
        assert [len(store), store.num_free_slots, read(store, b"key 0")] == [0, 16, None]
        assert (store.path / "chunks.data").stat().st_size == 0
        store.write_many(writes([b"new"]))
    store = opening()
    assert [entry.key for entry in store.entries()] == [b"new"]
    assert read(store, b"new") == payload(b"new")


def test_a_smaller_capacity_keeps_parents_and_the_highest_priorities(opening: Opening) -> None:
    chunks = [
        ChunkWrite(key, payload(key), ChunkNote(position=position, frequency=frequency, cost=2.0))
        for key, position, frequency in [
            *((b"deep %d" % i, 2, 9.0) for i in range(6)),
            *((b"low %d" % i, 1, 1.0) for i in range(4)),
            *((b"high %d" % i, 1, 3.0) for i in range(4)),
            *((b"root %d" % i, 0, 0.0) for i in range(2)),
        ]
    ]
    with opening() as store:
        store.write_many(chunks)
    kept = [b"root 0", b"root 1", b"high 0", b"high 1", b"high 2", b"high 3", b"low 0"]
    for _ in range(2):
        with opening(7) as store:
            assert {entry.key for entry in store.entries()} == set(kept)
            assert [read(store, key) for key in kept] == [payload(key) for key in kept]
            assert (store.path / "chunks.data").stat().st_size == 7 * store.slot_bytes
            assert store.num_free_slots == 0
    assert opening(16).num_free_slots == 9


def test_a_damaged_chunk_is_not_carried_into_a_smaller_file(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(16)))
        store.delete_many(keys(10))
        with (store.path / "chunks.data").open("r+b") as file:
            file.seek(12 * store.slot_bytes + 5)
            file.write(b"damage")
    store = opening(8)
    assert store.stats.num_missing == 1
    here = [key for key in keys(6, first=10) if read(store, key) == payload(key)]
    assert here == [key for key in keys(6, first=10) if key in store]
    assert len(here) == 5
    store.close()
    store = opening(8)
    assert [len(store), store.stats.num_missing] == [5, 0], "its row is gone as well"


@pytest.mark.parametrize("bad", [{12}, set(range(8, 16))], ids=["a sector", "the disk"])
def test_a_bad_sector_costs_one_chunk_when_a_store_shrinks_and_a_disk_that_cannot_be_read_costs_none(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    with opening() as store:
        store.write_many(writes(keys(16)))
        store.delete_many(keys(8))
    read_slots = SlotFile.read

    def failing(file: SlotFile, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        if bad.intersection(slots):
            raise OSError(errno.EIO, "Input/output error")
        read_slots(file, slots, views)

    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "read", failing)
        if len(bad) == 1:
            store = opening(8)
            assert [len(store), store.stats.num_missing, b"key 12" in store] == [7, 1, False]
            return
        with pytest.raises(CacheDirectoryError, match="Input/output error"):
            opening(8)
    assert len(opening(8)) == 8


def test_caches_of_other_identities_are_left_alone_and_listed(opening: Opening, store: ChunkStore) -> None:
    store.write_many(writes(keys(4)))
    folder = store.path.parent
    with ChunkStore(
        folder, {**IDENTITY, "dtype": "bfloat16"}, chunk_bytes=CHUNK_BYTES, capacity_bytes=1 << 20
    ) as other:
        assert len(other) == 0
        other.write_many([ChunkWrite(b"key 0", payload(b"other"))])
        assert read(other, b"key 0") == payload(b"other")
    with opening(chunk_bytes=4096) as smaller:  # the size of a chunk is part of what it is
        assert len(smaller) == 0
    assert read(store, b"key 0") == payload(b"key 0")
    listed = list_namespaces(folder)
    assert [n.identity["dtype"] for n in listed] == ["float32", "bfloat16", "float32"]
    assert listed[0].path == store.path
    assert listed[0].num_bytes >= 4 * CHUNK_BYTES
    assert json.loads((store.path / "identity.json").read_text())["identity"] == {
        **IDENTITY,
        "chunk_bytes": CHUNK_BYTES,
    }


def test_a_directory_that_is_not_there_has_no_namespaces(store: ChunkStore) -> None:
    assert list_namespaces(store.path / "nowhere") == []


def test_closing_twice_is_fine_and_reads_are_misses_from_then_on(store: ChunkStore) -> None:
    store.write_many(writes(keys(1)))
    store.close()
    store.close()
    assert read(store, b"key 0") is None
    for change in (
        lambda: store.write_many(writes(keys(1))),
        lambda: store.delete_many(keys(1)),
        lambda: store.update_notes([]),
        lambda: list(store.entries()),
        store.clear,
    ):
        with pytest.raises(CacheTierError, match="is closed: open it again"):
            change()
