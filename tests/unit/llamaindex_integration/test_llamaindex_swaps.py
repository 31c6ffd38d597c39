"""Nearly equal nodes exchanged for cached ones, by a retriever and a query engine, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex import RAGCacheQueryEngine, RAGCacheRetriever, RetrievalStageEvent
from tests.support.cached_orders import keep_cached
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage
from tests.unit.llamaindex_integration.conftest import EventLog

pytestmark = pytest.mark.usefixtures("idle")

FOUND = Stage("sun moon mars", scores=(1.0, 1.02, 1.03))


def retriever(engine: Engine | None, *stages: Stage, **settings: Any) -> RAGCacheRetriever:
    return RAGCacheRetriever(ScriptedSource(stages), engine, **settings)


@pytest.fixture
def cached(
    scripted: Engine, server: ScriptedServer, generations: Any, make_engine: Callable[..., RAGCacheQueryEngine]
) -> None:
    """``sun mars`` is cached after the prompt."""
    make_engine(Stage("sun")).query(QUESTION)
    keep_cached(server, scripted, (generations()[0], "sun mars", 50))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("settings", "expected"), [({}, "moon"), ({"max_score_loss": 0.02}, "mars")])
def test_a_retriever_returns_the_cached_one_of_two_nearly_equal_nodes_if_it_may(
    scripted: Engine, event_log: EventLog, settings: Any, expected: str
) -> None:
    scripted.bind_prompt(PromptLayout())
    nodes = retriever(scripted, FOUND, **settings).retrieve(QUESTION)
    assert [node.node.node_id for node in nodes] == ["sun", expected]
    (event,) = event_log.of(RetrievalStageEvent)
    assert [(swap.doc_out, swap.doc_in) for swap in event.swaps] == [("moon", "mars")] * (expected == "mars")


@pytest.mark.usefixtures("cached")
async def test_a_query_engine_asks_ahead_with_what_it_will_show_and_reports_each_swap(
    scripted: Engine, make_engine: Callable[..., RAGCacheQueryEngine], generations: Any
) -> None:
    num_before = len(generations())
    ahead = Stage(FOUND.doc_ids, once=lambda: len(generations()) > num_before, scores=FOUND.scores)
    found = retriever(scripted, FOUND, ahead, max_score_loss=0.02)
    response: Any = await make_engine(retriever=found).aquery(QUESTION)
    (seen,) = generations()[num_before:]
    assert [document["id"] for document in seen.documents] == ["sun", "mars"]
    report = response.metadata["ragcache"]["pipeline"]
    assert report["is_confirmed"]
    assert [(swap["doc_out"], swap["doc_in"]) for swap in report["swaps"]] == [("moon", "mars")]


def test_a_bound_that_is_none_is_refused_when_the_retriever_is_made() -> None:
    for settings in ({"max_score_loss": 1.5}, {"max_score_loss": 0.1, "document_order": "canonical"}):
        with pytest.raises(ConfigError, match="max_score_loss is"):
            retriever(None, FOUND, **settings)
