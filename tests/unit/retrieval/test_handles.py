"""What happens around a handle: another folder, a fork, an interrupt, a busy writer, no threads left."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.storage import snapshot
from ragcache_core.retrieval.storage.documents import SegmentFile

from .conftest import make_documents

FORKING = """
import os, sys
from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

folder = sys.argv[1]
store = DocumentStore.create(folder, index="flat")
store.add([Document(f"d{i}", f"text {i}") for i in range(9)])
child = os.fork()
if not child:
    calls = (
        lambda: store.add([Document("child", "text")]),
        lambda: store.delete(["d0"]),
        lambda: store.search("text", 1),
        lambda: store.get(["d0"]),
        lambda: "d0" in store,
    )
    num_refused = 0
    for call in calls:
        try:
            call()
        except errors.StoreError as error:
            num_refused += "opened before a fork: open it again" in str(error)
    store.close()
    try:
        DocumentStore.open(folder)
    except errors.StoreLockedError:
        os._exit(10 + num_refused)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
store.add([Document("parent", "text")])
try:
    DocumentStore.open(folder)
except errors.StoreLockedError:
    print("still locked")
store.close()
with DocumentStore.open(folder) as store:
    print(len(store))
"""


def test_a_forked_child_cannot_use_the_handle_and_closing_it_there_leaves_the_lock_to_the_parent(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.split("\n")[:3] == ["15", "still locked", "10"], result.stderr


def test_an_interrupted_close_frees_the_lock_and_a_second_close_waits_for_the_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DocumentStore.create(folder, index="flat")
    store.add(make_documents(5))
    is_free = threading.Event()
    running = store._threads.submit(lambda: is_free.wait(60))
    with monkeypatch.context() as patched:

        def interrupted() -> None:
            raise KeyboardInterrupt

        patched.setattr(store._threads, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    with pytest.raises(errors.StoreError, match="was closed"):
        store.add(make_documents(1, first=5))
    with DocumentStore.open(folder) as other:
        other.add(make_documents(5, first=5))
        threading.Timer(0.1, is_free.set).start()
        store.close()
        assert running.done()
        with pytest.raises(errors.StoreLockedError):
            DocumentStore.open(folder)
    store.close()
    with DocumentStore.open(folder, read_only=True) as reader:
        assert len(reader) == 10


def change_before_each_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_changes: int
) -> Callable[[], DocumentStore]:
    """Return what opens a store whose files are replaced between the manifest and them, that many times."""
    writer = DocumentStore.create(folder, index="flat")
    writer.add(make_documents(3))
    real, changes = SegmentFile.open, iter(range(num_changes))

    def late(path: Path, entry: Any) -> SegmentFile:
        if not writer._is_changing and (i := next(changes, None)) is not None:
            writer.put(make_documents(3, first=i))
        return real(path, entry)

    def read() -> DocumentStore:
        monkeypatch.setattr(SegmentFile, "open", late)
        try:
            return DocumentStore.open(folder, read_only=True)
        finally:
            monkeypatch.setattr(SegmentFile, "open", real)
            writer.close()

    return read


def test_a_reader_waits_for_a_pause_of_a_busy_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with change_before_each_read(folder, monkeypatch, 20)() as reader:
        assert len(reader) == 22


def test_a_writer_that_never_pauses_is_not_called_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_TIMEOUT_S", 0.2)
    with pytest.raises(errors.StoreError, match="changed too fast: try again") as raised:
        change_before_each_read(folder, monkeypatch, 10**6)()
    assert not isinstance(raised.value, errors.StoreCorruptError)


def test_damage_is_reported_at_once_even_when_patience_is_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DocumentStore.create(folder, index="flat") as store:
        store.add(make_documents(3))
    next(folder.glob("documents-*")).write_bytes(b"x")
    monkeypatch.setattr(snapshot, "_TIMEOUT_S", -1.0)
    with pytest.raises(errors.StoreCorruptError):
        DocumentStore.open(folder, read_only=True)


@pytest.mark.parametrize("again", ["add", "delete", "close"])
def test_changing_the_store_from_a_progress_callback_is_refused(store: DocumentStore, again: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: store.add(make_documents(1, first=99)),
        "delete": lambda: store.delete(["doc-0"]),
        "close": store.close,
    }
    with pytest.raises(errors.StoreError, match="is being changed by this very call"):
        store.add(make_documents(2, first=50), progress=lambda *_: calls[again]())
    assert len(store) == 20
    store.add(make_documents(2, first=50))
    assert len(store) == 22
