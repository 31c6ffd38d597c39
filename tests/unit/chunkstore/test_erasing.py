"""Chunks that leave no byte: slots, rows and log are searched for them, also where it went wrong on the way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite, slotfile
from ragcache_core.chunkstore.encryption import Keys
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.errors import CacheWriteError

from .conftest import CHUNK_BYTES, Opening, keys, payload, read, writes


def files(store: ChunkStore) -> bytes:
    return b"".join(path.read_bytes() for path in store.path.rglob("*") if path.is_file())


def named(names: list[bytes]) -> list[ChunkWrite]:
    """Return chunks of documents whose names cannot be mistaken."""
    return [ChunkWrite(key, payload(key), ChunkNote(None, f"secret {key.decode()}!")) for key in names]


def is_left(store: ChunkStore, names: list[bytes]) -> list[bool]:
    """Return for each chunk whether its payload, its key or its document is in a file."""
    content = files(store)
    return [
        any(part in content for part in (payload(key)[:64], payload(key)[-64:], f"secret {key.decode()}!".encode()))
        for key in names
    ]


@pytest.mark.parametrize("makes_holes", [True, False], ids=["holes", "zeros"])
def test_nothing_is_left_of_erased_chunks_nor_of_what_was_deleted_before(
    store: ChunkStore, opening: Opening, monkeypatch: pytest.MonkeyPatch, makes_holes: bool
) -> None:
    if not makes_holes:

        def punch(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "this file system makes no holes")

        monkeypatch.setattr(slotfile, "_punch", punch)
    names = keys(12)
    store.write_many(named(names))
    store.update_notes([(key, 3.0, 1.0) for key in names])
    store.delete_many(names[:3])
    assert any(is_left(store, names[:3])), "a deleted chunk is only found no more"
    assert store.erase(names[3:6]) == 3
    assert is_left(store, names) == [False] * 6 + [True] * 6
    assert [read(store, key) for key in names] == [None] * 6 + [payload(key) for key in names[6:]]
    assert store.write_many(named(names[:10])) == names[:6]
    assert [read(store, key) for key in names] == [payload(key) for key in names]
    assert store.erase(names[:6]) == 6
    store.close()
    store = opening()
    assert is_left(store, names) == [False] * 6 + [True] * 6
    assert len(store) == 6


@pytest.mark.parametrize("fails", ["slots", "rows"])
def test_an_erasure_that_fails_reports_it_serves_nothing_and_can_be_done_again(
    store: ChunkStore, opening: Opening, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    store.write_many(named(keys(4)))
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) if fails == "slots" else CacheWriteError("no")

        patched.setattr(*((slotfile, "_punch", fail) if fails == "slots" else (ChunkIndex, "scrub", fail)))
        with pytest.raises(CacheWriteError):
            store.erase(keys(2))
    assert [read(store, key) for key in keys(4)] == [None, None, *map(payload, keys(2, first=2))]
    store.close()
    store = opening()
    assert [read(store, key) for key in keys(4)] == [None, None, *map(payload, keys(2, first=2))]
    store.erase(keys(2))
    assert is_left(store, keys(4)) == [False, False, True, True]


def test_on_a_disk_that_is_full_the_data_is_overwritten_although_the_index_cannot_be_written(
    store: ChunkStore, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_many(named(keys(4)))

    def fail(*_: object) -> None:
        raise CacheWriteError("there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(ChunkIndex, "delete", fail)
        with pytest.raises(CacheWriteError, match="no room"):
            store.erase(keys(2))
    data = (store.path / "chunks.data").read_bytes()
    assert [payload(key) in data for key in keys(4)] == [False, False, True, True]
    store.close()
    store = opening()
    assert [read(store, key) for key in keys(4)] == [None, None, *map(payload, keys(2, first=2))]


KILLED = """
import os, signal, sys
from ragcache_core.chunkstore import slotfile
from ragcache_core.chunkstore.index import ChunkIndex
from ragcache_core.chunkstore.encryption import Keys
from tests.unit.chunkstore import conftest as c
from tests.unit.chunkstore.test_erasing import named
store = c.ChunkStore(sys.argv[1], c.IDENTITY, chunk_bytes=c.CHUNK_BYTES, capacity_bytes=16 * c.CHUNK_BYTES)
store.write_many(named(c.keys(4)))
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "before the slots":
    slotfile._punch = die
elif sys.argv[2] == "before the log":
    ChunkIndex.scrub = die
else:
    ChunkIndex.delete = die
store.erase(c.keys(2))
"""


@pytest.mark.parametrize("when", ["before the slots", "before the rows", "before the log"])
def test_killed_amid_an_erasure_a_store_serves_whole_chunks_or_none_and_the_next_one_ends_it(
    folder: Path, opening: Opening, when: str
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), when], capture_output=True, check=False)
    assert done.returncode < 0, done.stderr
    store = opening()
    found = [read(store, key) for key in keys(4)]
    assert found[:2] == ([None, None] if when != "before the slots" else [payload(key) for key in keys(2)])
    assert found[2:] == [payload(key) for key in keys(2, first=2)]
    store.erase(keys(2))
    assert is_left(store, keys(4)) == [False, False, True, True]


def test_a_renamed_chunk_keeps_its_slot(store: ChunkStore, opening: Opening) -> None:
    store.write_many(writes(keys(3)))
    assert store.rename([(b"key 1", "another"), (b"never stored", "x"), (b"key 2", None)]) == 2
    store.close()
    found = {entry.key: entry for entry in opening().entries()}
    assert [(found[key].doc_id, found[key].parent) for key in keys(3)] == [
        ("doc", None),
        ("another", b"key 0"),
        (None, b"key 1"),
    ]


def test_what_an_earlier_run_deleted_goes_with_the_first_erasure(store: ChunkStore, opening: Opening) -> None:
    store.write_many(named(keys(4)))
    store.delete_many(keys(2))
    store.close()
    store = opening()
    assert store.erase([b"never stored"]) == 0
    assert is_left(store, keys(4)) == [False, False, True, True]


def test_nothing_is_left_of_encrypted_chunks_either(opening: Opening) -> None:
    store = opening(keys=Keys.parse("A" * 43 + "=", "a test"))
    store.write_many(named(keys(8)))
    names = keys(8)
    data = (store.path / "chunks.data").read_bytes()
    encrypted = {key: data[at : at + 64] for key, at in zip(names, range(0, len(data), CHUNK_BYTES), strict=True)}
    headers = (store.path / "chunks.headers").read_bytes()
    store.erase(names[:3])
    content = files(store)
    assert [encrypted[key] in content for key in names] == [False] * 3 + [True] * 5
    size = len(headers) // 8
    assert [headers[i * size : i * size + size] in content for i in range(8)] == [False] * 3 + [True] * 5
    assert [read(store, key) for key in names] == [None] * 3 + [payload(key) for key in names[3:]]
    store.write_many(named(names))
    assert [read(store, key) for key in names] == [payload(key) for key in names]


def test_a_cleared_store_holds_nothing(store: ChunkStore) -> None:
    store.write_many(named(keys(4)))
    store.clear()
    assert not any(is_left(store, keys(4)))
