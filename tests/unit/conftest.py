"""What tests of several folders need: a disk that waits, and what a scripted ``server`` says and was asked for."""

import threading
from collections.abc import Iterator

import pytest

from ragcache_core.chunkstore.slotfile import SlotFile
from tests.support.scripted_fixtures import engine, generations, idle, server, warmed  # noqa: F401 (fixtures)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write and read of the disk until it is set."""
    go_on = threading.Event()
    write, read = SlotFile.write, SlotFile.read
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (go_on.wait(10), read(self, *args))[1])
    yield go_on
    go_on.set()
