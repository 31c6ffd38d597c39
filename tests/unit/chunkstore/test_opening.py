"""Only damage is thrown away: not what cannot be read at the moment, and no chunk for one that a full disk keeps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.errors import CacheTierError, CacheWriteError

from .conftest import Opening, keys, payload, read, writes


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
    marks = {"_prepare": "PRAGMA quick_check", "rows": "SELECT slot, key", "deepest": "SELECT slot FROM"}
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
