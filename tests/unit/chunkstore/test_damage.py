"""What is lost, cut or damaged is a miss, counted and logged once: never wrong bytes, never an error."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite
from tests.support.crash_points import run_damage

from .conftest import CHUNK_BYTES, IDENTITY, Opening, aligned, keys, payload, read, writes


def turn_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_turned_bit_is_a_miss_that_is_counted_and_logged_once(
    store: ChunkStore, opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_many(writes(keys(8)))
    for slot in (2, 5):
        turn_bit(store.path / "chunks.data", slot * store.slot_bytes + 77)
    with caplog.at_level(logging.WARNING):
        found = [read(store, key) for key in keys(8)]
    damaged = {b"key 2", b"key 5"}
    assert found == [None if key in damaged else payload(key) for key in keys(8)]
    assert store.stats.num_damaged == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"RC-DISK-DAMAGED: a block of {store.path} is damaged: a miss, and further ones are only counted"
    ]
    assert [len(store), store.num_free_slots] == [6, 10]
    assert store.write_many(writes(keys(8))) == [b"key 2", b"key 5"]
    store.close()
    store = opening()
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]


def test_a_damaged_chunk_that_could_not_be_dropped_does_not_come_back_before_a_sound_one(
    opening: Opening, tmp_path: Path
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
        turn_bit(store.path / "chunks.data", 2 * store.slot_bytes + 77)
        index = store._index
        full, index._connection = index._connection, sqlite3.connect(f"file:{tmp_path}/none?mode=memory", uri=True)
        index._connection.execute("PRAGMA query_only = ON")  # as on a disk that takes no writes for a moment
        assert read(store, b"key 2") is None
        index._connection.close()
        index._connection = full
        store.write_many(writes([b"key 2", b"key 20"]))  # two of them do not fit where the damaged one lay
    store = opening()
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]
    assert store.stats.num_damaged == 0


def test_the_right_bytes_of_another_chunk_are_a_miss(store: ChunkStore) -> None:
    store.write_many(writes(keys(2)))
    data = store.path / "chunks.data"
    first = data.read_bytes()[: store.slot_bytes]
    with data.open("r+b") as file:
        file.seek(store.slot_bytes)
        file.write(first)
    assert [read(store, key) for key in keys(2)] == [payload(b"key 0"), None]


def test_a_chunk_whose_key_was_damaged_is_a_miss_under_both(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(2)))
    with sqlite3.connect(store.path / "index.sqlite") as connection:
        connection.execute("UPDATE chunks SET key = ? WHERE slot = 1", (b"key 5",))
    connection.close()
    store = opening()
    assert b"key 5" in store
    assert [read(store, key) for key in (b"key 0", b"key 1", b"key 5")] == [payload(b"key 0"), None, None]
    assert store.stats.num_damaged == 1


def test_what_a_cut_file_lacks_is_a_miss_at_once_and_after_opening(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
        os.truncate(store.path / "chunks.data", 6 * store.slot_bytes + 100)
        targets = [aligned(CHUNK_BYTES) for _ in range(8)]
        assert store.read_many(list(zip(keys(7), targets, strict=False))) == [True] * 6 + [False]
        assert store.stats.num_damaged == 1
    store = opening()
    assert store.stats.num_missing == 1
    assert [read(store, key) for key in keys(8)] == [*map(payload, keys(6)), None, None]
    assert store.num_free_slots == 10


def test_a_data_file_that_is_gone_is_a_cache_that_is_empty(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    (store.path / "chunks.data").unlink()
    store = opening()
    assert [len(store), store.stats.num_missing, store.num_free_slots] == [0, 8, 16]
    assert store.write_many(writes(keys(8))) == keys(8)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda content: b"this is not a database" * 500,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a foreign header": lambda content: b"x" + content[1:],
    "of a later SQLite": lambda content: content[:19] + b"\x09" + content[20:],
    "zeros within": lambda content: content[:4096] + bytes(len(content) - 4096),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_index_is_a_cache_that_starts_empty(
    opening: Opening, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    path = store.path / "index.sqlite"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with caplog.at_level(logging.WARNING), opening() as store:
        assert len(store) == 0
        assert store.stats.num_resets == (kind != "empty")  # an empty file is what a new index begins as
        assert len(caplog.records) == (kind != "empty")
        assert all("starts empty" in record.getMessage() for record in caplog.records)
        store.write_many(writes(keys(8)))
    with opening() as store:
        assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]
        assert store.stats.num_resets == 0


def test_a_damaged_list_of_free_pages_does_not_refuse_writes_for_ever(opening: Opening) -> None:
    with opening(600, chunk_bytes=16) as store:
        store.write_many(writes(keys(600), 16))
        store.delete_many(keys(600))
    path = store.path / "index.sqlite"
    content = path.read_bytes()
    assert content[32:36] != bytes(4)  # the first free page
    path.write_bytes(content[:32] + b"\x7f\xff\xff\xff" + content[36:])
    store = opening(600, chunk_bytes=16)
    assert store.stats.num_resets == 1
    assert store.write_many(writes(keys(600), 16)) == keys(600)


def test_a_schema_that_is_no_text_is_a_cache_that_starts_empty(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(2)))
    path = store.path / "index.sqlite"
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE chunks", b"CREATE TAB\xeb\xff chunks"))
    store = opening()
    assert [len(store), store.stats.num_resets] == [0, 1]


def test_chunks_that_were_moved_under_another_identity_are_not_served(opening: Opening) -> None:
    with opening(chunk_bytes=4096) as other:
        other.write_many(writes(keys(2), 4096))
    with opening() as store:
        pass
    (other.path / "identity.json").replace(store.path / "identity.json")
    (other.path / "index.sqlite").replace(store.path / "index.sqlite")
    assert len(opening()) == 0


ROWS = {
    "slot beyond the file": "UPDATE chunks SET slot = 1000000 WHERE slot = 3",
    "negative slot": "UPDATE chunks SET slot = -3 WHERE slot = 3",
    "no key": "UPDATE chunks SET key = x'' WHERE slot = 3",
    "key of a megabyte": "UPDATE chunks SET key = zeroblob(1000000) WHERE slot = 3",
    "key twice": "UPDATE chunks SET key = (SELECT key FROM chunks WHERE slot = 2) WHERE slot = 3",
    "checksum of a text": "UPDATE chunks SET checksum = 'x' WHERE slot = 3",
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_cannot_be_right_is_dropped_and_its_slot_is_free(opening: Opening, kind: str) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    with sqlite3.connect(store.path / "index.sqlite") as connection:
        connection.execute(ROWS[kind])
    connection.close()
    store = opening()
    assert [len(store), store.num_free_slots, store.stats.num_missing] == [7, 9, 1]
    assert [e.key for e in store.entries()] == [key for key in keys(8) if key != b"key 3"]
    assert store.write_many(writes([b"key 3"])) == [b"key 3"]
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]


IMPOSSIBLE = ["parent = 7", "doc_id = x'ff'", "doc_id = CAST(x'ff' AS TEXT)", "position = 'x'", "cost = 'x'"]


OTHER_PLACES = ["parent = x'6b65792033'", "parent = NULL", "doc_id = 'b'", "doc_id = NULL", "position = 7"]


@pytest.mark.parametrize("change", [*IMPOSSIBLE, *OTHER_PLACES, "place_checksum = 7", "place_checksum = 'x'"])
def test_a_chunk_with_another_note_than_was_written_is_dropped_when_it_is_listed(opening: Opening, change: str) -> None:
    with opening() as store:
        note = ChunkNote(parent=b"key 0", doc_id="a", position=1)
        store.write_many([ChunkWrite(key, payload(key), note) for key in keys(4)])
    with sqlite3.connect(store.path / "index.sqlite") as connection:
        connection.execute(f"UPDATE chunks SET {change} WHERE slot = 2")
    connection.close()
    with opening() as store:
        assert [entry.key for entry in store.entries()] == [b"key 0", b"key 1", b"key 3"]
        assert [len(store), store.stats.num_damaged] == [3, 1]
    assert len(opening()) == 3


def test_an_input_error_is_a_miss_for_its_chunk_alone_and_forgets_nothing(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_many(writes(keys(4)))
    real = os.preadv
    bad = 2 * store.slot_bytes

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(len(b) for b in buffers):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    targets = [aligned(CHUNK_BYTES) for _ in range(4)]
    requests = list(zip(keys(4), targets, strict=True))
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "preadv", failing)
        assert store.read_many(requests) == [True, True, False, True]
        assert store.read_many(requests) == [True, True, False, True]
    assert store.stats.num_read_errors == 2
    assert len(caplog.records) == 1
    assert store.read_many(requests) == [True] * 4


@pytest.mark.slow
def test_random_damage_to_any_file_never_serves_a_wrong_byte_nor_keeps_the_store_from_opening(tmp_path: Path) -> None:
    result = run_damage(tmp_path, num_points=60, seed=5)
    assert result.num_points == 60
    assert result.num_missed > 0  # the damage does something
    assert (result.num_wrong, result.num_refused) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "1", "identity": {}}', b'{"format": 1}', b"\xff"])
def test_chunks_of_unknown_identity_are_not_served(opening: Opening, content: bytes) -> None:
    with opening() as store:
        store.write_many(writes(keys(2)))
    (store.path / "identity.json").write_bytes(content)
    with opening() as store:
        assert [len(store), store.stats.num_resets] == [0, 1]
        store.write_many(writes(keys(2)))
    assert len(opening()) == 2


def test_chunks_that_were_copied_into_the_folder_of_other_weights_are_not_served(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(2)))
    identity = {**IDENTITY, "weights": "0000"}
    with ChunkStore(store.path.parent, identity, chunk_bytes=CHUNK_BYTES, capacity_bytes=16 * CHUNK_BYTES) as other:
        pass
    for name in ("index.sqlite", "chunks.data"):
        (store.path / name).replace(other.path / name)
    with ChunkStore(store.path.parent, identity, chunk_bytes=CHUNK_BYTES, capacity_bytes=16 * CHUNK_BYTES) as other:
        assert [read(other, key) for key in keys(2)] == [None, None]
        assert other.stats.num_resets == 1
