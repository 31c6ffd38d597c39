"""Both frameworks on an engine that is a scripted server, with the demo model's tokenizer."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from llama_index.core.instrumentation import get_dispatcher

from ragcache_core.client import Engine
from tests.contracts.rag.frameworks import ANSWERS, ASKS, DEMO_MODEL, FRAMEWORKS, STREAMED, Framework, LlamaIndex
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer, Seen

# Clients of scripted servers check no certificate, and reading the authorities' for each takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test over the frameworks, and over each framework's ways if it takes one."""
    for name, ways in (("ask", ASKS), ("answer", ANSWERS), ("stream", STREAMED), ("few", _FEW)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(("framework", name), ways, ids=map("-".join, ways), indirect=["framework"])
            return
    if "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework", FRAMEWORKS, indirect=True)


_FEW = [("langchain", "invoke"), ("langchain", "astream"), ("llamaindex", "query"), ("llamaindex", "streamed_aquery")]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server of RAGCache that takes no speculations; with ``idle`` it does."""
    with ScriptedServer(root=str(DEMO_MODEL), cache=THREE_TIERS) as server:
        yield server


@pytest.fixture
def engine(server: ScriptedServer) -> Iterator[Engine]:
    with Engine.connect(server.url) as engine:
        yield engine


@pytest.fixture
def framework(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Framework]:
    made = FRAMEWORKS[request.param](engine)
    if isinstance(made, LlamaIndex):
        get_dispatcher().add_event_handler(made.log)
    yield made
    if isinstance(made, LlamaIndex):
        get_dispatcher().event_handlers.remove(made.log)


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
