"""Which caches beside the own are deleted when a store is opened, and which never are."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore, list_namespaces
from ragcache_core.chunkstore.namespace import changing
from ragcache_core.chunkstore.old_namespaces import delete_unused
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError

from .conftest import CHUNK_BYTES, IDENTITY, keys, read, unlink_failing_after, writes

MARKER = "ragcache-namespace"

DAY_S = 86_400
MIB = 1 << 20


def opened(folder: Path, *, capacity_bytes: int = MIB, **identity: str) -> ChunkStore:
    return ChunkStore(
        folder, {**IDENTITY, **identity}, chunk_bytes=CHUNK_BYTES, capacity_bytes=capacity_bytes, match_keys=("model",)
    )


def closed(folder: Path, *, days: float = 0, **identity: str) -> Path:
    """Return the folder of a cache with eight chunks that was used that many days ago."""
    with opened(folder, **identity) as store:
        store.write_many(writes(keys(8)))
    then = time.time() - days * DAY_S
    for path in (*store.path.iterdir(), store.path):
        os.utime(path, (then, then))
    return store.path


@pytest.fixture
def give_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes the file system have that many bytes for caches, what they hold now included."""

    def give(num_bytes: int) -> None:
        def statvfs(path: Any) -> Any:
            used = sum(namespace.num_bytes for namespace in list_namespaces(folder))
            return SimpleNamespace(f_bavail=(num_bytes - used) // 512, f_frsize=512)

        monkeypatch.setattr(os, "statvfs", statvfs)

    return give


def test_a_cache_unused_for_a_month_is_deleted_whatever_its_model(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = closed(folder, days=31, weights="old", model="other")
    young = closed(folder, days=29, weights="young", model="other")
    with opened(folder) as store:
        assert {n.path for n in list_namespaces(folder)} == {young, store.path}
    assert f"RAGCache's files in {old} are deleted, it was not used for 31 days" in caplog.text
    assert "weights 'old'" in caplog.text


def test_older_identities_of_the_same_model_make_room_the_longest_unused_first(
    folder: Path, give_room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caches = [closed(folder, days=days, weights=f"from {days} days ago") for days in (1, 3, 2)]
    sizes = [n.num_bytes for n in list_namespaces(folder)]
    give_room(MIB + sum(sizes) - min(sizes))  # one has to go, or two
    with opened(folder):
        assert not caches[1].exists()
        assert caches[0].exists()
    assert f"its space is needed for capacity_bytes, {MIB:,}" in caplog.text


def test_caches_of_another_model_are_not_deleted_for_room(folder: Path, give_room: Callable[[int], None]) -> None:
    other = closed(folder, days=3, model="other")
    give_room(MIB)
    with pytest.raises(CacheCapacityError, match=f"{other} holds"):
        opened(folder)
    assert other.exists()


def test_a_cache_that_an_engine_has_open_is_never_deleted(folder: Path, give_room: Callable[[int], None]) -> None:
    closed(folder, days=40, weights="in use")
    with opened(folder, weights="in use") as store:
        then = time.time() - 40 * DAY_S
        for path in store.path.iterdir():
            os.utime(path, (then, then))
        os.utime(store.path, (then, then))
        give_room(MIB)
        with pytest.raises(CacheCapacityError):
            opened(folder)
        assert read(store, b"key 3") is not None


def test_an_identity_that_comes_back_within_a_month_finds_its_chunks(folder: Path) -> None:
    closed(folder, days=20)
    closed(folder, weights="tried")
    with opened(folder) as store:
        assert len(store) == 8


def test_what_a_newer_version_wrote_and_what_is_no_cache_stays(folder: Path) -> None:
    newer = closed(folder, days=99, weights="newer")
    (newer / "identity.json").write_text('{"format": 99, "identity": {}}')
    os.utime(newer / "identity.json", (0, 0))
    os.utime(newer, (0, 0))
    documents = folder / "documents"
    documents.mkdir()
    os.utime(documents, (0, 0))
    with opened(folder):
        assert newer.exists()
        assert documents.exists()


def test_one_that_cannot_be_deleted_is_reported_and_does_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = closed(folder, days=31, weights="old")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_failing_after(0, PermissionError(13, "Permission denied")))
        store = opened(folder)
    with store:
        assert f"{old}, an old cache, cannot be deleted" in caplog.text


def test_no_engine_opens_a_cache_while_another_deletes_some(folder: Path) -> None:
    closed(folder)
    found: list[int] = []

    def enter() -> None:
        with opened(folder) as store:
            found.append(len(store))

    with changing(folder):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.3)
        assert found == []
    thread.join(30)
    assert found == [8]


def test_purge_deletes_folders_that_are_not_open_and_a_dry_run_only_lists_them(
    folder: Path,
) -> None:
    old, young = closed(folder, days=8, weights="old"), closed(folder, days=1, weights="young")
    of_a_worker = closed(folder / "worker-1", days=9, weights="old")
    of_an_engine = closed(folder / "worker-1" / "engine-2", days=9, weights="old")
    with opened(folder) as store:
        trial = delete_unused(folder, unused_s=7 * DAY_S, dry_run=True)
        assert {each.path for each in trial.folders} == {str(old), str(of_a_worker), str(of_an_engine)}
        assert all(path.exists() for path in (old, young, of_a_worker, of_an_engine))
        done = delete_unused(folder, unused_s=7 * DAY_S)
        assert [each.path for each in done.folders] == [each.path for each in trial.folders]
        assert done.num_bytes == trial.num_bytes > 0
        assert [path.exists() for path in (old, young, of_a_worker, of_an_engine)] == [False, True, False, False]
        delete_unused(folder, unused_s=0)
        assert not young.exists()
        assert store.path.exists(), "an engine has it open"


def test_a_clock_set_back_makes_nothing_old_and_a_missing_folder_is_reported(folder: Path) -> None:
    future = closed(folder, days=-400)
    assert not delete_unused(folder, unused_s=1).folders
    assert future.exists()
    with pytest.raises(CacheDirectoryError, match="nowhere"):
        delete_unused(folder / "nowhere", unused_s=0)


def without(name: str, path: Path) -> Path:
    """Return a cache without one of its files, as old as it was; without a marker, it is from before there were any."""
    then = path.stat().st_mtime
    (path / name).unlink()
    os.utime(path, (then, then))
    return path


def foreign(path: Path, *names: str, days: float = 99) -> Path:
    """Return a folder of another program, with files of these names, that was changed that many days ago."""
    then = time.time() - days * DAY_S
    for name in names or ("notes.txt",):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("years of work")
        os.utime(path / name, (then, then))
    os.utime(path, (then, then))
    return path


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return what a dry run must leave as it is: names, sizes, times and modes of everything in a folder."""
    paths = [folder, *folder.rglob("*")]
    return {str(p): ((s := p.lstat()).st_size * (not p.is_dir()), s.st_mtime_ns, s.st_mode) for p in paths}


@pytest.mark.parametrize(
    "names",
    [
        ("notes.txt",),
        ("thesis/chapter1.tex",),
        ("chunks.data", "index.sqlite"),
        ("identity.json", "chunks.data"),
        ("ragcache-namespace", "notes.txt"),
    ],
    ids=lambda names: names[0],
)
def test_another_programs_folder_stays_whatever_its_name_and_age(folder: Path, names: tuple[str, ...]) -> None:
    theirs = foreign(folder / hashlib.md5(b"x").hexdigest(), *names)
    before = state_of(theirs)
    opened(folder).close()
    assert theirs not in {Path(each.path) for each in delete_unused(folder, unused_s=0, dry_run=True).folders}
    delete_unused(folder, unused_s=0)
    assert state_of(theirs) == before


def test_another_programs_file_in_a_cache_stays_and_the_cache_is_deleted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = closed(folder, days=40, weights="old")
    foreign(old, "notes.txt", "sub/chunks.data", days=40)
    foreign(old, days=40)
    elsewhere = foreign(folder.parent / "elsewhere", "chunks.data")
    (old / "identity.json").unlink()
    (old / "identity.json").symlink_to(elsewhere / "chunks.data")
    for path in (old, old / "sub"):
        os.utime(path, (0, 0))
    os.utime(old / "identity.json", (0, 0), follow_symlinks=False)
    with opened(folder):
        assert {str(path.relative_to(old)) for path in old.rglob("*")} == {
            *("notes.txt", "sub", "sub/chunks.data", "identity.json")
        }
    assert (elsewhere / "chunks.data").read_text() == "years of work"
    assert "has files that are not RAGCache's, which stay: identity.json, notes.txt, sub" in caplog.text
    assert old not in {namespace.path for namespace in list_namespaces(folder)}


def test_links_are_not_followed_out_of_the_directory(folder: Path) -> None:
    opened(folder).close()
    elsewhere = folder.parent / "elsewhere"
    theirs = closed(elsewhere, days=99, weights="old")
    (folder / "engine-1").symlink_to(elsewhere)
    (folder / "worker-1").mkdir()
    (folder / "worker-1" / "engine-2").symlink_to(elsewhere)
    (folder / theirs.name).symlink_to(theirs)
    delete_unused(folder, unused_s=0)
    opened(folder).close()
    assert theirs.exists()
    assert [(folder / name).is_symlink() for name in ("engine-1", "worker-1/engine-2", theirs.name)] == [True] * 3


def test_a_dry_run_changes_nothing_on_the_disk(folder: Path) -> None:
    old = closed(folder, days=20, weights="old")
    of_a_worker = closed(folder / "worker-1", days=20, weights="old")
    without_lock = without("writer.lock", closed(folder, days=20, weights="without a lock"))
    without(MARKER, closed(folder, days=20, weights="older"))
    foreign(folder / ("0" * 32))
    for place in (folder, folder / "worker-1"):
        (place / "directory.lock").unlink()
    with opened(folder.parent / "other"):
        before = state_of(folder)
        trial = delete_unused(folder, unused_s=7 * DAY_S, dry_run=True)
        assert state_of(folder) == before
    assert {str(old), str(of_a_worker), str(without_lock)} < {each.path for each in trial.folders}
    done = delete_unused(folder, unused_s=7 * DAY_S)
    assert [(each.path, each.num_bytes) for each in done.folders] == [(t.path, t.num_bytes) for t in trial.folders]


def test_gc_makes_no_lock_where_it_finds_no_cache(tmp_path: Path) -> None:
    foreign(tmp_path / "photos")
    foreign(tmp_path / "engine-1" / ("0" * 32))
    before = state_of(tmp_path)
    assert not delete_unused(tmp_path, unused_s=0).folders
    assert state_of(tmp_path) == before


def test_caches_from_before_there_were_markers_are_deleted_when_they_are_old_and_marked_when_they_are_not(
    folder: Path,
) -> None:
    young, old = closed(folder, days=20, weights="young"), closed(folder, days=31, weights="old")
    for path in (old, young):
        without(MARKER, path)
    opened(folder).close()
    assert [old.exists(), young.exists()] == [False, True]
    foreign(young, "notes.txt", days=20)
    (each,) = delete_unused(folder, unused_s=7 * DAY_S).folders
    assert Path(each.path) == young, "its marker says whose it is, and left its age"
    assert [path.name for path in young.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("num_deleted", range(7))
def test_a_deletion_that_was_interrupted_is_ended_by_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_deleted: int
) -> None:
    old = closed(folder, days=31, weights="old")
    if num_deleted % 2:
        without(MARKER, old)
    num_files = len(list(old.iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_failing_after(num_deleted, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt) if num_deleted < num_files else nullcontext():
            delete_unused(folder, unused_s=DAY_S)
    delete_unused(folder, unused_s=0)
    assert not old.exists() or not any(path.stat().st_size for path in old.iterdir())
