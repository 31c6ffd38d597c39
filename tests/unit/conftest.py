"""What tests of several folders need: a disk that waits, and what a scripted ``server`` says and was asked for."""

import ssl
import threading
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.client import Engine
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer, Seen

# Clients of scripted servers check no certificate, and reading the authorities' for each takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.fixture
def server(demo_model: str) -> Iterator[ScriptedServer]:
    """RAGCache's server over the demo model, scripted, with three tiers."""
    with ScriptedServer(api_key="secret", root=demo_model, cache=THREE_TIERS) as running:
        yield running


@pytest.fixture
def engine(server: ScriptedServer) -> Iterator[Engine]:
    """A handle of the scripted server."""
    with Engine.connect(server.url, api_key=server.api_key) as connected:
        yield connected


@pytest.fixture
def idle(server: ScriptedServer) -> None:
    """The server is RAGCache's, and has nothing to do: it takes speculations."""
    server.load = IDLE


@pytest.fixture
def generations(server: ScriptedServer) -> Callable[[], list[Seen]]:
    """The requests for an answer that the server has seen."""
    return lambda: [r for r in server.requests if r.path == "/v1/chat/completions"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write and read of the disk until it is set."""
    go_on = threading.Event()
    write, read = SlotFile.write, SlotFile.read
    monkeypatch.setattr(SlotFile, "write", lambda self, *args: (go_on.wait(10), write(self, *args))[1])
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (go_on.wait(10), read(self, *args))[1])
    yield go_on
    go_on.set()
