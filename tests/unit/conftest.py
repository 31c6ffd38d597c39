"""Of a package's scripted ``server``: that it takes speculations, and what it was asked for."""

import ssl
from collections.abc import Callable
from functools import cache

import pytest

from tests.support.scripted_server import IDLE, ScriptedServer, Seen

# Clients of scripted servers check no certificate, and reading the authorities' for each takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.fixture
def idle(server: ScriptedServer) -> None:
    """The server is RAGCache's, and has nothing to do: it takes speculations."""
    server.load = IDLE


@pytest.fixture
def generations(server: ScriptedServer) -> Callable[[], list[Seen]]:
    """The requests for an answer that the server has seen."""
    return lambda: [r for r in server.requests if r.path == "/v1/chat/completions"]
