"""Both frameworks on an engine that is a scripted server, with the demo model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.instrumentation import get_dispatcher

from ragcache_core.client import Engine
from tests.contracts.rag.frameworks import ANSWERS, ASKS, DEMO_MODEL, FRAMEWORKS, STREAMED, Framework, LlamaIndex
from tests.support.scripted_fixtures import engine, generations, idle, warmed  # noqa: F401 (fixtures)
from tests.support.scripted_server import THREE_TIERS, ScriptedServer


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
    """A server without a key, so that models that take an address need none."""
    with ScriptedServer(root=str(DEMO_MODEL), cache=THREE_TIERS) as server:
        yield server


@pytest.fixture
def framework(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Framework]:  # noqa: F811 (the fixture)
    made = FRAMEWORKS[request.param](engine)
    if isinstance(made, LlamaIndex):
        get_dispatcher().add_event_handler(made.log)
    yield made
    if isinstance(made, LlamaIndex):
        get_dispatcher().event_handlers.remove(made.log)
