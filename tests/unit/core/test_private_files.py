"""What holds documents, or KV made of them, is its owner's alone, whatever the umask and whatever was there before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite
from ragcache_core.cli import cli
from ragcache_core.client.launch.arguments import new_log_path
from ragcache_core.errors import CacheDirectoryError
from ragcache_core.private_files import make_folders, make_once, make_private_folder, open_private
from ragcache_core.profiles.files import write_json
from ragcache_core.retrieval import DocumentStore
from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id
from ragcache_core.types import Document


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    yield os.umask
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o7777 for path in sorted(folder.rglob("*"))}


def check(folder: Path, num_files: int) -> None:
    found = modes(folder)
    assert sum((folder / name).is_file() for name in found) >= num_files
    assert found == {name: 0o700 if (folder / name).is_dir() else 0o600 for name in found}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_cache_and_a_document_store_are_their_owners_alone(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    for _ in range(2):
        with (
            ChunkStore(tmp_path / "cache", {"model": "m"}, chunk_bytes=4096, capacity_bytes=8 * 4096) as cache,
            DocumentStore.open(tmp_path / "store")
            if (tmp_path / "store").exists()
            else DocumentStore.create(tmp_path / "store") as store,
        ):
            check(tmp_path, 0)
            cache.write_many([ChunkWrite(os.urandom(8), bytes(4096), ChunkNote())])
            store.add([Document(f"d{len(store)}", "Our office opens at nine.")])
            check(tmp_path, 10)  # with the log of the cache's index
        check(tmp_path, 9)
        for path in tmp_path.rglob("*"):  # as a version left them that asked the umask
            path.chmod(0o666 if path.is_file() else 0o777 if path.parent.name == "cache" else 0o700)


def test_a_store_of_another_user_is_a_store_error(tmp_path: Path) -> None:
    DocumentStore.create(tmp_path / "store").close()
    program = f"""
import os
from ragcache_core.errors import StoreError
from ragcache_core.retrieval import DocumentStore
os.setuid(12345)
for read_only in (False, True):
    try:
        DocumentStore.open({str(tmp_path / "store")!r}, read_only=read_only)
    except StoreError as error:
        print(type(error).__name__, "Permission denied" in str(error))
"""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["StoreError True"] * 2


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_a_folder_for_profiles_is_made_for_its_owner_alone(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    write_json({"a": 1}, tmp_path / "profiles" / "p.json")
    assert modes(tmp_path)["profiles"] == 0o700


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_user_in_a_shared_directory_is_not_used(tmp_path: Path, kind: str) -> None:
    anybodys, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    anybodys.mkdir()
    elsewhere.mkdir()
    anybodys.chmod(0o1777)
    if kind == "link":
        (anybodys / "cache").symlink_to(elsewhere)
    else:
        (anybodys / "cache").mkdir()
        try:
            os.chown(anybodys / "cache", os.geteuid() + 1, -1)
        except PermissionError:
            pytest.skip("only root can make a folder another user's")
    with pytest.raises(CacheDirectoryError, match="is another user's, in a folder that everybody may write to"):
        ChunkStore(anybodys / "cache", {"model": "m"}, chunk_bytes=4096, capacity_bytes=8 * 4096)
    make_private_folder(anybodys / "ours")
    make_private_folder(anybodys / "ours")
    assert list(elsewhere.iterdir()) == []


def test_whatever_the_command_line_writes_is_its_owners_alone(
    tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    notes, out = tmp_path / "notes", tmp_path / "out"
    notes.mkdir()
    (notes / "zor.md").write_text("Zor is a house by the river.")
    trace, result = out / "traces" / "mine.jsonl", out / "deep" / "result.json"
    make_folders(trace.parent)
    for line in (
        f"index {notes} --store {out}/deep/down/notes.store",
        f"store prune --store {out}/deep/down/notes.store",
        f"trace make --workload mmlu --requests 50 --output {trace}",
        f"trace make --workload mmlu --requests 50 --output {trace}.gz",
        f"simulate {trace} --output {result}",
        f"advise --log {trace} --output {out}/advice/advice.json --plot {out}/advice/advice.html",
    ):
        done = CliRunner().invoke(cli, line.split())
        assert done.exit_code == 0, done.output
    new_log_path(8000)
    check(out, 11)
    kept = list((tmp_path / "home").glob("*/ragcache"))
    assert {path.name for folder in kept for path in folder.iterdir()} >= {"log"}
    for folder in kept:
        check(folder, 0)


def test_a_folder_is_made_once_and_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "made"

    def fail(folder: Path) -> None:
        write(folder)
        raise RuntimeError("half of it")

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("whole")

    def slower(folder: Path) -> None:
        make_once(path, write)
        folder.mkdir()
        (folder / "file").write_text("of who came second")

    with pytest.raises(RuntimeError):
        make_once(path, fail)
    assert list(path.parent.iterdir()) == [], "nothing is left of it"
    assert make_once(path, slower) == path
    assert make_once(path, fail) == path
    assert (path / "file").read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_an_engines_host_memory_is_its_owners_alone(umask: Callable[[int], int], tmp_path: Path) -> None:
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=4096, folder=tmp_path)
    try:
        files.prepare()
        (memory,) = tmp_path.glob("vllm_offload_*")  # a link to it
        assert (memory.stat().st_mode & 0o777, files.sockets.stat().st_mode & 0o777) == (0o600, 0o700)
    finally:
        files.remove()
