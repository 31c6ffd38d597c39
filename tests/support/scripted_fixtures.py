"""Fixtures of a scripted server: an engine at it, what it says and what it was asked for. A conftest imports them."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer, Seen

# Clients of scripted servers check no certificate, and reading the authorities' for each takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A scripted server of RAGCache that takes no speculations; with ``idle`` it does."""
    with ScriptedServer(api_key="secret", root=str(DEMO_MODEL), cache=THREE_TIERS) as running:
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
def warmed(server: ScriptedServer) -> Callable[[], list[Seen]]:
    """The prefills that the server was asked for."""
    return lambda: [r for r in server.requests if r.path == "/v1/completions"]
