"""LlamaIndex's parts on an engine that is a scripted server, and a record of what the dispatcher publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers.base import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from pydantic import Field

from ragcache_core.client import Engine
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever
from tests.support.scripted_source import ScriptedSource, Stage


class EventLog(BaseEventHandler):
    """Keeps every event, and with it whatever the event refers to."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, *kinds: type[BaseEvent]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kinds)]


@pytest.fixture
def llm(engine: Engine) -> RAGCacheLLM:
    return RAGCacheLLM(engine, temperature=0, max_tokens=200)


@pytest.fixture
def event_log() -> Iterator[EventLog]:
    root, log = get_dispatcher(), EventLog()
    root.add_event_handler(log)
    yield log
    root.event_handlers.remove(log)


@pytest.fixture
def make_engine(engine: Engine, llm: RAGCacheLLM) -> Callable[..., RAGCacheQueryEngine]:
    """Makes a query engine over a source of stages."""

    def made(*stages: Stage, is_endless: bool = False, retriever: Any = None, **settings: Any) -> RAGCacheQueryEngine:
        found = {"retriever": retriever or RAGCacheRetriever(ScriptedSource(stages, is_endless), engine)}
        return RAGCacheQueryEngine(**{**found, "llm": llm, **settings})

    return made
