"""Only damage is thrown away: not what cannot be read at the moment, and no chunk for one that a full disk keeps."""

from __future__ import annotations

import shutil
import sqlite3
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite, list_namespaces
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.chunkstore.namespace import FORMAT
from ragcache_core.errors import CacheTierError, CacheWriteError
from tests.support.failing_reads import run_with_failing_reads

from .conftest import IDENTITY, Opening, keys, payload, read, writes


def full(index: ChunkIndex, slots: Iterable[int]) -> None:
    """Stand for a change on a disk that is full."""
    raise CacheWriteError("no space left")


@pytest.mark.parametrize("name", ["index.sqlite-wal", "identity.json"])
def test_what_cannot_be_read_at_the_moment_is_not_taken_for_damage(opening: Opening, name: str) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    path, kept = store.path / name, store.path / "kept"
    if path.exists():
        path.replace(kept)
    path.mkdir()  # which cannot be opened as a file, as without a free descriptor
    with pytest.raises(CacheTierError, match="cannot be (read|used)"):
        opening()
    path.rmdir()
    if kept.exists():
        kept.replace(path)
    store = opening()
    assert [len(store), store.stats.num_resets] == [8, 0]


@pytest.mark.parametrize(
    ("code", "is_damage"),
    [
        (sqlite3.SQLITE_CORRUPT, True),
        (sqlite3.SQLITE_NOTADB, True),
        (sqlite3.SQLITE_NOMEM, False),
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_CANTOPEN, False),
        (sqlite3.SQLITE_IOERR_READ, False),
        (sqlite3.SQLITE_READONLY, False),
        (sqlite3.SQLITE_BUSY, False),
    ],
)
@pytest.mark.parametrize("where", ["_prepare", "rows", "deepest"])
def test_only_what_sqlite_calls_damage_is_thrown_away(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, where: str, code: int, is_damage: bool
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))

    class Failing(sqlite3.Connection):
        """A connection one of whose queries fails: once, or as damage does, again."""

        def execute(self, query: str, *args: Any) -> sqlite3.Cursor:
            if len(failed) < num_failures and query.startswith(marks[where]):
                failed.append(query)
                error = sqlite3.OperationalError("as the test wants it")
                error.sqlite_errorcode = code
                raise error
            return super().execute(query, *args)

    failed: list[str] = []
    num_failures = 2 if is_damage else 1
    marks = {"_prepare": "PRAGMA quick_check", "rows": "SELECT slot, CASE", "deepest": "SELECT slot FROM"}
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Failing))
        if is_damage:
            with opening(4) as store:
                assert [len(store), store.stats.num_resets] == [0, 1]
        else:
            with pytest.raises(CacheTierError):
                opening(4)
    assert len(failed) == num_failures
    assert len(opening()) == (0 if is_damage else 8)


FAILING = """
import shutil, sys
from pathlib import Path
from ragcache_core.errors import CacheTierError
from tests.support.failing_reads import fail_reads, num_failed_reads
from tests.unit.chunkstore import conftest as c

def opened(directory):
    return c.ChunkStore(directory, c.IDENTITY, chunk_bytes=512, capacity_bytes=400 * 4096)

left, copy = map(Path, sys.argv[1:])
num_refused = 0
for lasts in (False, True):
    for suffix in ("index.sqlite", "index.sqlite-wal", "identity.json"):
        number = 0
        while True:
            number += 1
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(left, copy)
            fail_reads(suffix, number, lasts=lasts)
            try:
                with opened(copy) as store:
                    assert len(store) == 250, (suffix, number, lasts, len(store))
            except CacheTierError:
                num_refused += 1
            has_failed = num_failed_reads() > 0
            fail_reads(suffix, 0)
            with opened(copy) as store:
                found = sum(c.read(store, key) == c.payload(key, 512) for key in c.keys(400))
                assert (len(store), found, store.stats.num_resets) == (250, 250, 0), (suffix, number, lasts, found)
            if not has_failed:
                break
print(num_refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_a_read_that_fails_anywhere_while_a_store_is_opened_costs_nothing(tmp_path: Path, is_closed: bool) -> None:
    """SQLite's own check returns such errors as text, as it does damage."""
    store = ChunkStore(tmp_path / "left", IDENTITY, chunk_bytes=512, capacity_bytes=400 * 4096)
    for first in range(0, 400, 50):
        store.write_many(writes(keys(50, first), 512))
    store.delete_many(keys(150, 100))  # which leaves unused pages
    if not is_closed:
        shutil.copytree(tmp_path / "left", tmp_path / "killed")
    store.close()
    left = tmp_path / ("left" if is_closed else "killed")
    assert any(left.rglob("*-wal")) is not is_closed
    num_refused = run_with_failing_reads(FAILING, left, tmp_path / "copy", tmp_path=tmp_path)
    assert int(num_refused) > 10


def test_what_is_written_after_a_clear_that_failed_outlives_the_store(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
        with monkeypatch.context() as patched:
            patched.setattr(ChunkIndex, "delete", full)
            with pytest.raises(CacheWriteError):
                store.clear()
        again = [b"key 5", b"key 7", b"key 6", b"key 3"]
        assert store.write_many(writes(again)) == again
    store = opening()
    assert [read(store, key) for key in again] == [payload(key) for key in again]
    assert [len(store), store.stats.num_missing] == [4, 0]


def test_a_full_disk_keeps_neither_the_store_from_opening_nor_what_is_of_no_use_in_it(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    with sqlite3.connect(store.path / "index.sqlite") as connection:
        connection.execute("UPDATE chunks SET slot = -3 WHERE slot = 3")
        connection.execute("UPDATE chunks SET position = 'x' WHERE slot = 5")
    connection.close()
    with monkeypatch.context() as patched:
        patched.setattr(ChunkIndex, "delete", full)
        store = opening()
        assert [len(store), store.stats.num_missing] == [7, 1]
        assert [entry.key for entry in store.entries()] == [key for key in keys(8) if key not in (b"key 3", b"key 5")]
        assert store.discard_many([b"key 7", b"none", b"key 7"]) == 1
        assert [len(store), store.num_free_slots, read(store, b"key 7")] == [5, 11, None]
    store.write_many(writes([b"key 9"]))
    store.close()
    store = opening()
    assert sorted(entry.key for entry in store.entries()) == sorted([*keys(3), b"key 4", b"key 6", b"key 9"])
    assert [store.stats.num_missing, store.stats.num_damaged] == [0, 0]


def test_a_smaller_capacity_counts_no_row_that_a_full_disk_has_kept(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
    with sqlite3.connect(store.path / "index.sqlite") as connection:
        connection.execute("UPDATE chunks SET key = x'', position = 100 WHERE slot = 3")
    connection.close()
    delete, failures = ChunkIndex.delete, iter([CacheWriteError("no space left")])

    def full_once(index: ChunkIndex, slots: Iterable[int]) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        delete(index, slots)

    monkeypatch.setattr(ChunkIndex, "delete", full_once)
    store = opening(4)
    assert sorted(entry.key for entry in store.entries()) == [b"key 0", b"key 1", b"key 2", b"key 4"]


FORMAT_2 = Path(__file__).with_name("format_2.zip")
"""A directory that RAGCache wrote before records had a format: five chunks of 96 bytes, the last of them deleted."""


def test_a_directory_from_before_records_had_a_format_is_opened_with_all_its_chunks(tmp_path: Path) -> None:
    with zipfile.ZipFile(FORMAT_2) as archive:
        archive.extractall(tmp_path)
    names = [f"chunk {i}".encode() for i in range(5)]
    for is_first in (True, False):
        with ChunkStore(tmp_path, {"model": "demo"}, chunk_bytes=96, capacity_bytes=16 * 4096) as store:
            assert not store.stats.num_resets
            target = bytearray(96)
            for i, name in enumerate(names[:4]):
                assert store.read(name, target)
                assert target == bytes([i]) * 96
            assert store.read(names[4], target) != is_first
            entries = list(store.entries())[:4]
            assert [(e.key, e.parent, e.doc_id, e.frequency, e.stored_s) for e in entries] == [
                (name, names[i - 1] if i else None, "doc", 2.0 + i, 1e9) for i, name in enumerate(names[:4])
            ]
            store.write_many([ChunkWrite(names[4], bytes(96), ChunkNote(names[3], "doc", 4))])
    assert [namespace.format for namespace in list_namespaces(tmp_path)] == [FORMAT], "an older RAGCache lets it be"


@pytest.mark.parametrize("change", ["codec = 'zstd'", "length = 50", "format = 2"])
def test_a_record_of_a_later_format_is_a_miss_and_leaves_its_slot(tmp_path: Path, change: str) -> None:
    with ChunkStore(tmp_path, {"model": "demo"}, chunk_bytes=96, capacity_bytes=2 * 4096) as store:
        store.write_many([ChunkWrite(name, bytes(96)) for name in (b"one", b"other")])
        path = store.path / "index.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE chunks SET {change} WHERE key = ?", (b"one",))
    connection.close()
    with ChunkStore(tmp_path, {"model": "demo"}, chunk_bytes=96, capacity_bytes=2 * 4096) as store:
        assert (b"one" in store, b"other" in store) == (False, True)
        assert store.stats.num_missing == 1
        assert store.write_many([ChunkWrite(b"new", bytes(96))]) == [b"new"]
