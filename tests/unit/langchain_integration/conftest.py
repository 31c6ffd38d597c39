"""An engine handle of a scripted server, with the demo model's tokenizer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout
from tests.support.scripted_server import THREE_TIERS, ScriptedServer, Seen
from tests.support.scripted_source import ScriptedSource, Stage
from tests.support.waiting import until

DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"
API_KEY = "test-key"


@pytest.fixture(scope="module")
def _server() -> Iterator[ScriptedServer]:
    with ScriptedServer(api_key=API_KEY, root=str(DEMO_MODEL)) as server:
        yield server


@pytest.fixture
def server(_server: ScriptedServer) -> ScriptedServer:
    """A scripted server that has seen nothing yet."""
    _server.clear()
    _server.rules = ()
    _server.names_tokens = False
    _server.cache = THREE_TIERS
    _server.load = None
    _server.cached_paths = None
    _server.admits_after_s = 0.0
    return _server


@pytest.fixture
def llm(engine: Engine) -> ChatRAGCache:
    return ChatRAGCache(engine=engine)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Poll a condition, for a few seconds at most."""
    return until


@pytest.fixture
def make_rag(engine: Engine, llm: ChatRAGCache) -> Callable[..., SpeculativeRAG]:
    """Makes a SpeculativeRAG over a source of stages."""

    def made(*stages: Stage, is_endless: bool = False, **settings: Any) -> SpeculativeRAG:
        source = ScriptedSource(stages, is_endless)
        retriever = RAGCacheRetriever(store=source, engine=engine, k=2)
        return SpeculativeRAG(**{"retriever": retriever, "prompt": prompt_from_layout(), "llm": llm, **settings})

    return made


@pytest.fixture
def warmed(server: ScriptedServer) -> Callable[[], list[Seen]]:
    """The prefills that the server was asked for."""
    return lambda: [r for r in server.requests if r.path == "/v1/completions"]


@pytest.fixture
def make(engine: Engine) -> Callable[..., RAGCacheRetriever]:
    """Makes a retriever over a source of stages."""

    def made(*stages: Stage, is_endless: bool = False, **settings: Any) -> RAGCacheRetriever:
        return RAGCacheRetriever(store=ScriptedSource(stages, is_endless), engine=engine, k=2, **settings)

    return made
