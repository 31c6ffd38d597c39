"""What engines have in shared memory is there for the next start; what dead ones left there goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ragcache_core.runtime.shared_memory import (
    EngineFiles,
    journal_folder,
    new_engine_id,
    outlives_engine,
    region_place,
    remove_files,
    sweep_shared_memory,
)


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


@pytest.mark.parametrize("suffix", [".mmap", "_dp0.mmap", "_dp13.mmap", ".mmap.1", ".journal", "_dp1.journal", ""])
def test_every_file_of_a_dead_engine_goes(tmp_path: Path, owner: subprocess.Popen[bytes], suffix: str) -> None:
    if suffix in ("", ".journal", "_dp1.journal"):
        engine_id = new_engine_id(owner.pid)
        path = tmp_path / f"vllm_offload_{engine_id}{suffix}" if suffix else tmp_path / engine_id
        path.mkdir()
        (path / "index.sqlite").touch()
    else:
        path = region(tmp_path, new_engine_id(owner.pid), suffix)
    exchanged = tmp_path / f"{new_engine_id(owner.pid)}.vllm_dist_0c7f-tp:0-[0-1]-cpushm_1"
    exchanged.touch()
    owner.communicate()
    assert sorted(sweep_shared_memory(folder=tmp_path)) == sorted([path, exchanged])


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    _, namespace, pid, started, random = new_engine_id(os.getpid()).split("-")
    path = region(tmp_path, f"ragcache-{namespace}-{pid}-{int(started) - 1}-{random}")
    assert sweep_shared_memory(folder=tmp_path) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "vllm_offload_0c7f.mmap",
        "vllm_offload_ragcache-.mmap",
        "vllm_offload_ragcache-12-.mmap",
        "vllm_offload_ragcache-x-1-ab.mmap",
        "vllm_offload_ragcache-99999999-1-ab",
        "vllm_offload_ragcache-7-1073741823-5-0a.mmap",  # of another namespace, whose processes are not visible here
        "ragcache-7-1073741823-5-0a",
        "ragcache-mine",
        "psm_1234",
    ],
)
def test_files_that_are_not_ours_stay(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    assert sweep_shared_memory(folder=tmp_path) == []
    assert path.exists()


def test_an_engines_regions_are_removed_by_its_name_and_no_others(tmp_path: Path) -> None:
    one, two = new_engine_id(os.getpid()), new_engine_id(os.getpid())
    assert one != two
    kept = region(tmp_path, two)
    for suffix in (".mmap", "_dp1.mmap"):
        region(tmp_path, one, suffix)
    journal_folder(one, tmp_path).mkdir()
    (tmp_path / one).mkdir()
    remove_files(one, tmp_path)
    remove_files(one, tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[EngineFiles]:
    """What a launched engine of two replicas has in shared memory, before its first start."""
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 20, num_replicas=2, folder=tmp_path)
    yield files
    files.remove()


def links(files: EngineFiles) -> list[Path]:
    """Return where vLLM looks for the host memory of both replicas."""
    return [files.sockets.parent / f"vllm_offload_{files.engine_id}_dp{i}.mmap" for i in range(2)]


def test_host_memory_is_as_it_was_when_an_engine_is_started_again(held: EngineFiles, tmp_path: Path) -> None:
    held.prepare()
    for i, link in enumerate(links(held)):
        with link.open("r+b") as memory:
            memory.write(bytes([i]) * 4)
        assert outlives_engine(f"{held.engine_id}_dp{i}", tmp_path)
    links(held)[1].unlink()  # as who clears up after a user that has logged out
    held.prepare()
    for i, link in enumerate(links(held)):
        with link.open("rb") as memory:
            assert memory.read(4) == bytes([i]) * 4
        assert link.stat().st_size == 1 << 20
    assert not outlives_engine(held.engine_id, tmp_path)


def test_what_a_run_of_an_engine_left_is_removed_before_the_next(held: EngineFiles, tmp_path: Path) -> None:
    held.prepare()
    assert held.sockets.stat().st_mode & 0o777 == 0o700
    (held.sockets / "0c7f").touch()
    region(tmp_path, held.engine_id, "_dp7.mmap")  # of a replica that was not named
    held.prepare()
    assert sorted(tmp_path.iterdir()) == sorted([held.sockets, *links(held)])
    assert list(held.sockets.iterdir()) == []


def test_nothing_is_left_of_an_engine_that_ended(held: EngineFiles, tmp_path: Path) -> None:
    held.prepare()
    held.remove()
    held.remove()
    assert list(tmp_path.iterdir()) == []
    assert f"memfd:{held.engine_id}" not in open_files()


def test_a_fork_of_the_owner_does_not_keep_host_memory(held: EngineFiles) -> None:
    assert f"memfd:{held.engine_id}" in open_files()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, str(f"memfd:{held.engine_id}" in open_files()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) == b"False"
    os.close(reading)
    os.close(writing)


def open_files() -> str:
    """Return what this process has open, a line for each."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.append(str(link.readlink()))
    return "\n".join(names)


def test_a_region_is_distinguished_from_one_of_the_same_name_elsewhere(tmp_path: Path) -> None:
    engine_id = new_engine_id(os.getpid())
    assert region_place(engine_id, tmp_path) is None
    path = region(tmp_path, engine_id)
    place = region_place(engine_id, tmp_path)
    assert place is not None
    path.rename(tmp_path / "before")
    region(tmp_path, engine_id)
    assert region_place(engine_id, tmp_path) not in (place, None)
    path.unlink()
    (tmp_path / "before").rename(path)
    assert region_place(engine_id, tmp_path) == place
