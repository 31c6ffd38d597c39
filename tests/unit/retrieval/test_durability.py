"""A change is wholly there or not at all: killed at any step, out of space at any step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

from .conftest import make_documents

STEPS = ("fsync", "replace", "unlink")
"""What a change does to the disk, in ``os``."""

CHANGES: dict[str, Callable[[DocumentStore], object]] = {
    "first add": lambda store: store.add(make_documents(8)),
    "add": lambda store: store.add(make_documents(8, first=500)),
    "add that trains": lambda store: store.add(make_documents(250, first=500)),
    "put": lambda store: store.put([*make_documents(3), *make_documents(3, first=500)]),
    "delete": lambda store: store.delete(["doc-1", "doc-11"]),
    "delete that merges": lambda store: store.delete([f"doc-{i}" for i in range(20)]),
    "delete all": lambda store: store.delete(store.ids()),
}


def contents(folder: Path) -> list[tuple[str, str]]:
    """Return the documents of a store, and check that its index agrees with them."""
    with DocumentStore.open(folder, read_only=True) as store:
        documents = store.get(store.ids())
        index = store.faiss_index
        assert (index.ntotal if index is not None else 0) == len(documents)
        if documents:
            update = store.search(documents[-1].text, len(documents))
            assert update.documents[0].text == documents[-1].text
            assert {d.doc_id for d in update.documents} == {d.doc_id for d in documents}
        return [(d.doc_id, d.text) for d in documents]


def make_store(folder: Path, change: str) -> None:
    with DocumentStore.create(folder, nprobe=1000) as store:
        if change != "first add":
            store.add(make_documents(25))
            store.add(make_documents(5, first=25))


KILLING = """
import json, os, shutil, signal, sys
from pathlib import Path
from tests.unit.retrieval import test_durability as t

def run_until_killed(folder, change, step, after):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    store = t.DocumentStore.open(folder)
    seen = 0
    for name in t.STEPS:
        def wrapped(*args, real=getattr(os, name), **kwargs):
            nonlocal seen
            seen += 1
            if seen == step and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args, **kwargs)
            if seen == step and after:
                os.kill(os.getpid(), signal.SIGKILL)
        setattr(os, name, wrapped)
    try:
        t.CHANGES[change](store)
        store.close()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(42)

folder, change = Path(sys.argv[1]), sys.argv[2]
t.make_store(folder / "before", change)
states = []
for after in (False, True):
    for step in range(1, 100):
        copy = folder / f"{step}-{after}"
        shutil.copytree(folder / "before", copy)
        code = run_until_killed(copy, change, step, after)
        states.append((code, t.contents(copy)))
        with t.DocumentStore.open(copy) as store:  # and it can go on from there
            store.add([t.Document("later", "something added later")])
        assert len(t.contents(copy)) == len(states[-1][1]) + 1
        named = json.loads((copy / "manifest.json").read_text())["store"]
        assert len(list(copy.glob("documents-*"))) == len(named["segments"])
        if code != -signal.SIGKILL:
            break
print(json.dumps(states))
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_killed_at_any_step_is_there_or_not(tmp_path: Path, change: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLING, str(tmp_path), change],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    states = [(code, [tuple(d) for d in documents]) for code, documents in json.loads(done.stdout)]
    before = contents(tmp_path / "before")
    completed = [documents for code, documents in states if code == 42]
    assert len(completed) == 2, done.stderr
    assert completed[0] == completed[1] != before
    killed = [documents for code, documents in states if code != 42]
    assert len(killed) >= 8
    assert all(documents in (before, completed[0]) for documents in killed)
    assert before in killed
    assert completed[0] in killed


def failing_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> Callable[[], int]:
    """Make the ``step``-th write fail; return how many there were."""
    seen = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == step:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: seen


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, errors.StoreFullError), (errno.EIO, errors.StoreError)])
def test_a_change_that_cannot_be_saved_changes_nothing(
    folder: Path, change: str, number: int, error: type[Exception]
) -> None:
    make_store(folder, change)
    before = contents(folder)
    files = sorted(path.name for path in folder.iterdir())
    refused = 0
    with DocumentStore.open(folder) as store:
        for step in range(1, 100):
            generation = store.stats().generation
            with pytest.MonkeyPatch.context() as patched:
                count = failing_at(patched, step, number)
                raised = None
                try:
                    CHANGES[change](store)
                except errors.StoreError as caught:
                    raised = caught
            if raised is None:
                assert count() <= step  # only the last flush, after the commit, may fail unnoticed
                break
            refused += 1
            assert type(raised) is error
            assert store.stats().generation == generation
            assert [d.doc_id for d in store.get(store.ids())] == [doc_id for doc_id, _ in before]
            assert sorted(path.name for path in folder.iterdir()) == files, "half-written files are swept up"
        after = [(d.doc_id, d.text) for d in store.get(store.ids())]
    assert refused >= 3
    assert after != before
    assert contents(folder) == after


FILLING = """
import resource, sys
from pathlib import Path
from tests.unit.retrieval import test_durability as t

folder = Path(sys.argv[1])
before = t.contents(folder)
for num_bytes in map(int, sys.argv[2:]):
    with t.DocumentStore.open(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        try:
            store.add([t.Document(f"big-{i}", f"word{i} " * 2000) for i in range(30)])
        except t.errors.StoreFullError as error:
            assert "nothing was lost" in str(error), error
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found = store.search(store.get(["doc-7"])[0].text, 1).documents[0].doc_id
    now = t.contents(folder)
    print(num_bytes, len(now), found, "as before" if now == before else "")
"""


def test_a_file_that_cannot_grow_is_a_full_store_and_nothing_is_lost(folder: Path) -> None:
    make_store(folder, "add")
    done = subprocess.run(
        [sys.executable, "-c", FILLING, str(folder), "0", "5000", "200000", "10000000"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.splitlines() == [
        "0 30 doc-7 as before",
        "5000 30 doc-7 as before",
        "200000 30 doc-7 as before",
        "10000000 60 doc-7 ",
    ], done.stderr


def test_a_store_that_cannot_be_made_leaves_no_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, 1, errno.ENOSPC)
    with pytest.raises(errors.StoreFullError):
        DocumentStore.create(folder)
    DocumentStore.create(folder).close()


def test_a_full_disk_at_close_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ragcache_core.retrieval.storage import writer

    monkeypatch.setattr(writer, "_SMALL_INDEX_BYTES", 0)
    make_store(folder, "add")
    store = DocumentStore.open(folder)
    store.add([Document("one", "one more")])
    with pytest.MonkeyPatch.context() as patched:
        failing_at(patched, 1, errno.ENOSPC)
        store.close()
    assert contents(folder)[-1] == ("one", "one more")


def test_what_a_crash_left_is_swept_up_by_the_next_writer_only(folder: Path) -> None:
    make_store(folder, "add")
    left = [folder / name for name in ("documents-000099.sqlite", "index-000099.faiss", "manifest.json.new")]
    for path in left:
        path.write_text("half")
    theirs = folder / "documents-mine.sqlite"
    theirs.write_text("not ours")
    DocumentStore.open(folder, read_only=True).close()
    assert all(path.exists() for path in left)
    DocumentStore.open(folder).close()
    assert not any(path.exists() for path in left)
    assert theirs.exists()
