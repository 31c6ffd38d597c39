"""What was acknowledged survives the death of the process at any instant; what could not be written was not begun."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore, ChunkWrite
from ragcache_core.errors import CacheLockedError, CacheWriteError
from tests.support.crash_points import run_killpoints

from .conftest import CHUNK_BYTES, IDENTITY, Opening, aligned, keys, payload, read, writes


@pytest.mark.slow
def test_killed_at_any_instant_a_store_loses_nothing_acknowledged_and_serves_nothing_wrong(tmp_path: Path) -> None:
    result = run_killpoints(tmp_path, num_points=40, seed=11)
    assert result.num_points == 40
    assert result.num_in_flight > 0
    assert (result.num_lost, result.num_wrong) == (0, 0)


HOLDING = """
import sys, time
from tests.unit.chunkstore import conftest as c
store = c.ChunkStore(sys.argv[1], c.IDENTITY, chunk_bytes=c.CHUNK_BYTES, capacity_bytes=16 * c.CHUNK_BYTES)
store.write_many(c.writes(c.keys(3)))
print("written", flush=True)
time.sleep(600)
"""


def test_the_lock_and_the_chunks_of_a_killed_process_are_there_for_the_next(folder: Path) -> None:
    settings: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "capacity_bytes": 16 * CHUNK_BYTES}
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"written\n"
            with pytest.raises(CacheLockedError, match="another engine"):
                ChunkStore(folder, IDENTITY, **settings)
        finally:
            holder.send_signal(signal.SIGKILL)
    with ChunkStore(folder, IDENTITY, **settings) as store:
        assert [read(store, key) for key in keys(3)] == [payload(key) for key in keys(3)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_payload_that_cannot_be_written_leaves_everything_as_it_was(
    store: ChunkStore, opening: Opening, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.write_many(writes(keys(4)))
    real = os.pwritev

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        real(descriptor, buffers[:1], offset)  # some of it arrives
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing)
        with pytest.raises(CacheWriteError, match=os.strerror(code)):
            store.write_many(writes(keys(8)))
        assert [read(store, key) for key in keys(8)] == [*map(payload, keys(4)), None, None, None, None]
        assert [len(store), store.num_free_slots] == [4, 12]
    assert store.write_many(writes(keys(8))) == keys(4, first=4)
    store.close()
    store = opening()
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]


def test_a_system_that_writes_a_part_at_a_time_is_queried_again(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    def partly(real: Any) -> Any:
        step = 4096 if direct else 1000

        def call(descriptor: int, buffers: list[memoryview], offset: int) -> Any:
            return real(descriptor, [buffers[0][:step]], offset)

        return call

    monkeypatch.setattr(os, "pwritev", partly(os.pwritev))
    monkeypatch.setattr(os, "preadv", partly(os.preadv))
    source = aligned(3 * CHUNK_BYTES)
    source[:] = b"".join(payload(key) for key in keys(3))
    parts = [source[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(3)]
    store.write_many([ChunkWrite(key, part) for key, part in zip(keys(3), parts, strict=True)])
    assert [read(store, key) for key in keys(3)] == [payload(key) for key in keys(3)]


def test_a_write_that_goes_nowhere_is_an_error(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(CacheWriteError, match="nothing more was written"):
        store.write_many(writes(keys(1)))
    assert len(store) == 0


FILLING = """
import os, resource, signal, sys
from tests.unit.chunkstore import conftest as c
from ragcache_core.errors import CacheWriteError

def refused(change):
    try:
        change()
    except CacheWriteError as error:
        assert "cannot be written" in str(error) and "see to the space" in str(error), error
        return True
    return False

def limit_files(num_bytes):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

def check(store, written):
    assert [key for key in c.keys(400) if key in store] == written
    assert all(c.read(store, key) == c.payload(key, 4096) for key in written)
    assert store.num_free_slots == 400 - len(written)

directory, direct = sys.argv[1], sys.argv[2] == "True"
store = c.ChunkStore(directory, c.IDENTITY, chunk_bytes=4096, capacity_bytes=400 * 4096, direct=direct)
written = store.write_many(c.writes(c.keys(8), 4096))
"""

FILLING_THE_DATA_FILE = (
    FILLING
    + """
limit_files(900_000)
num_refused = 0
for start in range(8, 400, 8):
    batch = c.keys(8, first=start)
    num_refused += refused(lambda: written.extend(store.write_many(c.writes(batch, 4096))))
    check(store, written)
assert num_refused and len(written) > 8
"""
)

FILLING_THE_LOG = (
    FILLING
    + """
limit_files(150_000)
assert any(refused(lambda: store.update_notes([(b"key 0", 2.0, i)])) for i in range(900))
noted = list(store.entries())
assert refused(lambda: store.write_many(c.writes(c.keys(16), 4096)))
assert refused(lambda: store.delete_many(written[:4]))
assert refused(lambda: store.update_notes([(b"key 0", 7.0, 7.0)]))
assert list(store.entries()) == noted
check(store, written)
try:
    store.clear()
except CacheWriteError as error:
    assert "could not be emptied" in str(error) and "delete the folder" in str(error), error
else:
    raise AssertionError("there was no room for it")
assert list(store.entries()) == []
check(store, written := [])
"""
)


@pytest.mark.parametrize("code", [FILLING_THE_DATA_FILE, FILLING_THE_LOG], ids=["data file", "log of the index"])
def test_without_space_changes_are_refused_and_reading_goes_on(
    opening: Opening, folder: Path, code: str, direct: bool
) -> None:
    code += "print(len(written), flush=True)\nos._exit(0)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(direct)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    store = opening(400, chunk_bytes=4096)
    num_emptied = 8 if code.startswith(FILLING_THE_LOG) else 0
    assert (store.stats.num_resets, store.stats.num_missing) == (0, num_emptied)
    assert len(store) == int(done.stdout)
    assert all(read(store, entry.key) == payload(entry.key, 4096) for entry in store.entries())
    missing = [key for key in keys(400) if key not in store]
    assert store.write_many(writes(missing, 4096)) == missing


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_store_whose_folder_is_gone_reports_it_and_serves_what_it_holds(store: ChunkStore, how: str) -> None:
    store.write_many(writes(keys(3)))
    store.check_in_place()
    if how == "moved":
        store.path.parent.rename(store.path.parent.with_name("elsewhere"))
    else:
        shutil.rmtree(store.path.parent)
    if how == "replaced":
        store.path.mkdir(parents=True)
        for name in ("chunks.data", "index.sqlite"):
            (store.path / name).touch()
    for change in (store.check_in_place, lambda: store.write_many(writes(keys(4)))):
        with pytest.raises(CacheWriteError, match=r"was deleted, moved or replaced .*: leave the directory"):
            change()
    assert [read(store, key) for key in keys(4)] == [*map(payload, keys(3)), None]


def test_rows_that_a_power_cut_brought_back_are_misses(opening: Opening) -> None:
    with opening() as store:
        store.write_many(writes(keys(8)))
        path = store.path / "index.sqlite"
    before = path.read_bytes()
    with opening() as store:
        store.delete_many(keys(8))
        store.write_many(writes(keys(8, first=50)))
    path.write_bytes(before)
    with opening() as store:
        assert len(store) == 8
        assert [read(store, key) for key in [*keys(8), *keys(8, first=50)]] == [None] * 16
        assert store.stats.num_damaged == 8
