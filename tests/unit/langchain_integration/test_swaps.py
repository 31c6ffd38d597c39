"""Nearly equal documents exchanged for cached ones, by a retriever in a chain and in a fused pair, and what is said."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from pydantic import ValidationError

from ragcache_core.client import Engine
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    SpeculativeRAG,
    format_documents,
    prompt_from_layout,
)
from tests.support.cached_orders import keep_cached
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage

pytestmark = pytest.mark.usefixtures("idle")

FOUND = Stage("sun moon mars", scores=(1.0, 1.02, 1.03))  # squared distances: mars is 0.5 % worse than the moon


class Candidates(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == "ragcache.candidates":
            self.events.append(data)


def retriever(engine: Engine | None, *stages: Stage, **settings: Any) -> RAGCacheRetriever:
    return RAGCacheRetriever(store=ScriptedSource(stages), engine=engine, k=2, **settings)


def pair(engine: Engine, *stages: Stage, **settings: Any) -> SpeculativeRAG:
    return SpeculativeRAG(
        retriever=retriever(engine, *stages, **settings), prompt=prompt_from_layout(), llm=ChatRAGCache(engine=engine)
    )


@pytest.fixture
def cached(engine: Engine, server: ScriptedServer, generations: Any) -> None:
    """``sun mars`` is cached after the prompt."""
    pair(engine, Stage("sun")).invoke(QUESTION)
    keep_cached(server, engine, (generations()[0], "sun mars", 50))


@pytest.mark.usefixtures("cached")
def test_a_chain_shows_the_cached_one_of_two_nearly_equal_documents_and_says_so(engine: Engine) -> None:
    engine.bind_prompt(prompt_from_layout(), format_documents)
    seen = Candidates()
    found = retriever(engine, FOUND, max_score_loss=0.02).invoke(QUESTION, {"callbacks": [seen]})
    assert [document.id for document in found] == ["sun", "mars"]
    (event,) = seen.events
    (swap,) = event["swaps"]
    assert (event["doc_ids"], swap["doc_out"], swap["doc_in"]) == (["sun", "mars"], "moon", "mars")
    assert swap["score_loss"] == pytest.approx(1 - (1 / 2.03) / (1 / 2.02))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("settings", [{}, {"max_score_loss": 0.004}, {"max_score_loss": None}])
def test_without_a_bound_or_beyond_it_the_best_are_shown(engine: Engine, settings: Any) -> None:
    seen = Candidates()
    found = retriever(engine, FOUND, **settings).invoke(QUESTION, {"callbacks": [seen]})
    assert [document.id for document in found] == ["sun", "moon"]
    assert seen.events[0]["swaps"] == []


@pytest.mark.usefixtures("cached")
def test_by_default_no_more_is_searched_for_than_is_wanted(engine: Engine) -> None:
    for settings, k in (({}, 2), ({"max_score_loss": 0.02}, 4)):
        source = ScriptedSource((FOUND,))
        RAGCacheRetriever(store=source, engine=engine, k=2, **settings).invoke(QUESTION)
        assert source.asked == [(QUESTION, k)]


@pytest.mark.usefixtures("cached")
def test_a_fused_pair_asks_ahead_with_what_it_will_show_and_reports_each_swap(engine: Engine, generations: Any) -> None:
    num_before = len(generations())
    ahead = Stage(FOUND.doc_ids, once=lambda: len(generations()) > num_before, scores=FOUND.scores)
    answer = pair(engine, FOUND, ahead, max_score_loss=0.02).invoke(QUESTION)
    (seen,) = generations()[num_before:]
    assert [document["id"] for document in seen.documents] == ["sun", "mars"]
    report = answer.response_metadata["ragcache"]["pipeline"]
    assert report["is_confirmed"]
    assert [(swap["doc_out"], swap["doc_in"]) for swap in report["swaps"]] == [("moon", "mars")]


def test_a_free_order_lets_what_is_cached_first_stand_first(
    engine: Engine, server: ScriptedServer, generations: Any
) -> None:
    pair(engine, Stage("sun")).invoke(QUESTION)
    keep_cached(server, engine, (generations()[0], "mars sun", 50))
    engine.bind_prompt(prompt_from_layout(), format_documents)
    both = {"max_score_loss": 0.02, "document_order": "cache_aware"}
    assert [d.id for d in retriever(engine, FOUND, **both).invoke(QUESTION)] == ["mars", "sun"]


def test_without_an_engine_nothing_is_cached() -> None:
    assert [d.id for d in retriever(None, FOUND, max_score_loss=0.5).invoke(QUESTION)] == ["sun", "moon"]


def test_a_bound_that_is_none_is_refused_when_the_retriever_is_made() -> None:
    for settings in ({"max_score_loss": 1.5}, {"max_score_loss": 0.1, "document_order": "canonical"}):
        with pytest.raises(ValidationError, match="max_score_loss is"):
            retriever(None, FOUND, **settings)
