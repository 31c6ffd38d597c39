"""What cannot work is refused with the value, the limit and the cure."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore, ChunkWrite, list_namespaces
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, CacheLockedError, CacheVersionError

from .conftest import CHUNK_BYTES, IDENTITY, Opening, keys, payload, read, writes


@pytest.mark.parametrize("capacity_bytes", [0, -1, CHUNK_BYTES - 1, 1.5e9, True, None, "64GiB"])
def test_a_capacity_of_less_than_a_chunk_is_refused(opening: Opening, capacity_bytes: Any) -> None:
    with pytest.raises(CacheCapacityError, match="capacity_bytes is") as caught:
        opening(capacity_bytes=capacity_bytes)
    assert isinstance(caught.value, ValueError)
    assert opening(1).num_slots == 1  # and the lock was let go


def test_a_capacity_larger_than_the_disk_is_refused_and_names_what_could_go(opening: Opening, folder: Path) -> None:
    with opening() as store:
        store.write_many(writes(keys(16)))
    total = shutil.disk_usage(folder).total
    with pytest.raises(CacheCapacityError, match=r"free and this cache .* 'bfloat16'") as caught:
        with ChunkStore(folder, {**IDENTITY, "dtype": "bfloat16"}, chunk_bytes=64, capacity_bytes=1 << 20) as other:
            other.write_many([ChunkWrite(b"k", bytes(64))])
        opening(capacity_bytes=2 * total)
    assert f"{2 * total:,}" in str(caught.value)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    unwritable = Path("/proc/self/cache")
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        unwritable = tmp_path / "locked"
    with pytest.raises(CacheDirectoryError, match=f"{unwritable} cannot be used"):
        ChunkStore(unwritable, IDENTITY, chunk_bytes=10, capacity_bytes=4096)


@pytest.mark.parametrize("name", ["chunks.data", "index.sqlite", "writer.lock"])
def test_a_file_of_the_cache_that_is_not_one_is_refused(opening: Opening, name: str) -> None:
    with opening() as store:
        path = store.path / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(CacheDirectoryError, match="cannot be used"):
        opening()


def test_two_stores_on_one_directory_are_refused(store: ChunkStore, opening: Opening) -> None:
    store.write_many(writes(keys(1)))
    with pytest.raises(
        CacheLockedError, match=f"{store.path.parent} is the cache directory of another engine"
    ) as caught:
        opening()
    assert "give each engine a directory of its own" in str(caught.value)
    assert read(store, b"key 0") == payload(b"key 0")
    store.close()
    assert len(opening()) == 1


def test_a_cache_of_a_newer_version_is_refused_and_left_alone(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(3)))
    path = store.path / "identity.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": content["format"] + 1}))
    with pytest.raises(CacheVersionError, match="cache format 5, this RAGCache reads up to 4: upgrade RAGCache"):
        opening()
    assert [n.format for n in list_namespaces(store.path.parent)] == [5]
    path.write_text(json.dumps(content))
    assert len(opening()) == 3


@pytest.mark.parametrize("identity", [{"model": None}, {"model": 1.5}, {7: "x"}])
def test_an_identity_holds_texts_and_whole_numbers(folder: Path, identity: Any) -> None:
    with pytest.raises(ValueError, match="use texts and whole numbers"):
        ChunkStore(folder, identity, chunk_bytes=10, capacity_bytes=1 << 20)


@pytest.mark.parametrize("key", [b"", bytes(65), "text", None, 7])
def test_a_key_has_up_to_64_bytes(store: ChunkStore, key: Any) -> None:
    with pytest.raises(ValueError, match="use 1 to 64 bytes"):
        store.write_many([*writes(keys(2)), ChunkWrite(key, payload(b""))])
    assert len(store) == 0
    assert store.delete_many([key]) == 0
    assert read(store, key) is None


def test_keys_of_any_64_bytes_are_kept_apart(store: ChunkStore) -> None:
    odd = [b"\0", b"\0\0", bytes(64), b"\xff" * 64, b"'; DROP TABLE chunks"]
    store.write_many([ChunkWrite(key, payload(key)) for key in odd])
    assert [read(store, key) for key in odd] == [payload(key) for key in odd]


def test_an_update_that_is_not_finite_changes_nothing(store: ChunkStore) -> None:
    store.write_many(writes(keys(2)))
    with pytest.raises(ValueError, match="finite"):
        store.update_notes([(b"key 0", 5.0, 5.0), (b"key 1", float("nan"), 1.0)])
    assert [e.frequency for e in store.entries()] == [1.0, 1.0]
