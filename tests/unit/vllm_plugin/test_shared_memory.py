"""What dead engines left in shared memory goes, what living ones have there stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.runtime.shared_memory import (
    is_lasting,
    journal_folder,
    keep_region,
    new_engine_id,
    prepare_regions,
    remove_regions,
    sweep_shared_memory,
)

NAMESPACE = Path("/proc/self/ns/pid").stat().st_ino


def region(folder: Path, engine_id: str, suffix: str = ".mmap") -> Path:
    path = folder / f"vllm_offload_{engine_id}{suffix}"
    path.write_bytes(b"KV")
    path.chmod(0o600)  # as vLLM makes it
    return path


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its standard input is closed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as it:
        yield it


def test_regions_of_dead_owners_go_and_those_of_living_ones_stay(
    tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    theirs = region(tmp_path, new_engine_id(owner.pid))
    ours = region(tmp_path, new_engine_id(os.getpid()))
    assert sweep_shared_memory(folder=tmp_path) == []
    owner.communicate()
    assert sweep_shared_memory(folder=tmp_path) == [theirs]
    assert (theirs.exists(), ours.exists()) == (False, True)


def test_an_owner_that_ended_and_that_nobody_has_taken_note_of_is_dead(
    tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    theirs = region(tmp_path, new_engine_id(owner.pid))
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert sweep_shared_memory(folder=tmp_path) == [theirs]


@pytest.mark.parametrize("suffix", [".mmap", "_dp0.mmap", "_dp13.mmap", ".mmap.kept", ".journal"])
def test_every_file_of_a_dead_engine_goes(tmp_path: Path, owner: subprocess.Popen[bytes], suffix: str) -> None:
    if suffix == ".journal":
        path = journal_folder(new_engine_id(owner.pid), tmp_path)
        path.mkdir()
        (path / "index.sqlite").touch()
    else:
        path = region(tmp_path, new_engine_id(owner.pid), suffix)
    owner.communicate()
    assert sweep_shared_memory(folder=tmp_path) == [path]


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    _, namespace, pid, started, random = new_engine_id(os.getpid()).split("-")
    path = region(tmp_path, f"ragcache-{namespace}-{pid}-{int(started) - 1}-{random}")
    assert sweep_shared_memory(folder=tmp_path) == [path]


def test_our_own_regions_stay_even_where_the_owner_is_gone(tmp_path: Path) -> None:
    """An engine whose owner died a moment ago still starts, and ends by itself."""
    engine_id = f"ragcache-{NAMESPACE}-1073741823-5-0a"
    path = region(tmp_path, engine_id)
    assert sweep_shared_memory(engine_id, folder=tmp_path) == []
    assert sweep_shared_memory(folder=tmp_path) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "vllm_offload_0c7f.mmap",
        "vllm_offload_ragcache-.mmap",
        "vllm_offload_ragcache-12-.mmap",
        "vllm_offload_ragcache-x-1-ab.mmap",
        "vllm_offload_ragcache-99999999-1-ab",
        "vllm_offload_ragcache-7-1073741823-5-0a.mmap",  # of another namespace, whose processes nobody here sees
        "psm_1234",
    ],
)
def test_files_that_are_not_ours_stay(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    assert sweep_shared_memory(folder=tmp_path) == []
    assert path.exists()


def test_what_cannot_be_removed_is_left(tmp_path: Path) -> None:
    folder = tmp_path / f"vllm_offload_ragcache-{NAMESPACE}-1073741823-5-0a.mmap"
    folder.mkdir()
    assert sweep_shared_memory(folder=tmp_path) == []
    assert sweep_shared_memory(folder=tmp_path / "missing") == []


def test_an_engines_regions_are_removed_by_its_name_and_no_others(tmp_path: Path) -> None:
    one, two = new_engine_id(os.getpid()), new_engine_id(os.getpid())
    assert one != two
    kept = region(tmp_path, two)
    for suffix in (".mmap", "_dp1.mmap"):
        region(tmp_path, one, suffix)
    journal_folder(one, tmp_path).mkdir()
    remove_regions(one, tmp_path)
    remove_regions(one, tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_region_outlives_the_removal_of_its_name_until_the_engine_has_ended(tmp_path: Path) -> None:
    engine_id = new_engine_id(os.getpid())
    path = region(tmp_path, engine_id)
    with path.open("rb") as file:
        keep_region(engine_id, file.fileno(), tmp_path)
        keep_region(engine_id, None, tmp_path)
    path.unlink()  # as vLLM's worker does when it ends
    prepare_regions(engine_id, tmp_path)
    assert path.read_bytes() == b"KV"
    remove_regions(engine_id, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_start_that_was_cut_short_is_removed_before_the_next(tmp_path: Path) -> None:
    engine_id = new_engine_id(os.getpid())
    region(tmp_path, engine_id).write_bytes(b"")
    prepare_regions(engine_id, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_and_a_scheduler_with_a_region_each_do_not_start(tmp_path: Path) -> None:
    """One would take the other's KV for what is not there: zeros, which would go to the disk with a right checksum."""
    engine_id = new_engine_id(os.getpid())
    path = region(tmp_path, engine_id)
    keep_region(engine_id, None, tmp_path)
    path.unlink()
    other = region(tmp_path, engine_id)
    with other.open("rb") as file, pytest.raises(RuntimeError, match="start it again"):
        keep_region(engine_id, file.fileno(), tmp_path)
    other.unlink()
    with pytest.raises(RuntimeError, match="start the engine again"):
        keep_region(engine_id, None, tmp_path)


def test_a_region_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    engine_id = new_engine_id(os.getpid())
    region(tmp_path, engine_id).chmod(0o644)
    with pytest.raises(RuntimeError, match="is not this user's alone: remove it"):
        keep_region(engine_id, None, tmp_path)
    linked = new_engine_id(os.getpid())
    (tmp_path / f"vllm_offload_{linked}.mmap").symlink_to(region(tmp_path, engine_id, ".other"))
    with pytest.raises(RuntimeError, match="is not this user's alone: remove it"):
        keep_region(linked, None, tmp_path)


def test_only_ids_that_a_launch_gave_are_found_again_by_the_next_start() -> None:
    assert is_lasting(new_engine_id(os.getpid()))
    assert is_lasting(f"{new_engine_id(os.getpid())}_dp1")
    assert not is_lasting("ragcache-mine")
    assert not is_lasting("8f14e45f")
