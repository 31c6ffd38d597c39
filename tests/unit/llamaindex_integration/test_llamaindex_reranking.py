"""Post-processors as the last stage of a search: what goes into them is prefilled, or answered from, meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, SearchError
from ragcache_integrations.llamaindex import RAGCacheRetriever
from tests.support.scripted_source import DOCUMENTS, QUESTION, ScriptedSource, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("idle")


class Reranker(BaseNodePostprocessor):
    """Returns what ``choose`` makes of the nodes, once ``once`` holds."""

    choose: Callable[[list[NodeWithScore]], Any]
    once: Callable[[], bool] = lambda: True

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> Any:
        assert query_bundle is not None
        assert query_bundle.query_str == QUESTION
        until(self.once)
        return self.choose(list(nodes))


def named(*doc_ids: str) -> Callable[[list[NodeWithScore]], list[NodeWithScore]]:
    def choose(nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        by_id = {n.node.node_id: n.node for n in nodes}
        return [NodeWithScore(node=by_id[doc_id], score=9.0 - rank) for rank, doc_id in enumerate(doc_ids)]

    return choose


@pytest.fixture
def make(scripted: Engine) -> Callable[..., RAGCacheRetriever]:
    """Makes a retriever that reranks three nodes, of which one stage names all."""

    def made(choose: Any, once: Callable[[], bool] = lambda: True, **settings: Any) -> RAGCacheRetriever:
        source = ScriptedSource((Stage("moon sun mars"),))
        rerankers = [Reranker(choose=choose, once=once)]
        return RAGCacheRetriever(source, scripted, node_postprocessors=rerankers, **{"num_candidates": 3, **settings})

    return made


def ids_of(nodes: list[NodeWithScore]) -> list[str]:
    return [n.node.node_id for n in nodes]


def test_llamaindexs_own_cutoff_leaves_out_what_is_not_near(make: Any, scripted: Engine) -> None:
    source = ScriptedSource((Stage("moon sun mars"),))  # their distances are 0, 1, 2
    cutoff = SimilarityPostprocessor(similarity_cutoff=0.6)
    assert ids_of(
        RAGCacheRetriever(source, scripted, node_postprocessors=[cutoff], num_candidates=3).retrieve(QUESTION)
    ) == ["moon"]


def test_what_a_reranker_invents_is_returned_and_told_once(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    invented = NodeWithScore(node=TextNode(id_="summary", text="All of them are in the sky."), score=1.0)
    retriever = make(lambda nodes: [invented, nodes[0]])
    with caplog.at_level(logging.WARNING, "ragcache_core"):
        found = [ids_of(retriever.retrieve(QUESTION)) for _ in range(2)]
    assert found == [["summary", "moon"]] * 2
    (told,) = caplog.messages
    assert "Reranker returned 1 documents that it was not given, 'summary' first" in told


def test_a_changed_text_is_returned_with_its_nodes_id(make: Any) -> None:
    def shorten(nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=n.node.node_id, text=n.node.get_content()[:9])) for n in nodes]

    node = make(shorten).retrieve(QUESTION)[0].node
    assert (node.node_id, node.get_content()) == ("moon", DOCUMENTS["moon"].text[:9])


@pytest.mark.parametrize("found", [None, "moon", [3]])
def test_what_is_no_list_of_nodes_is_an_error(found: Any, make: Any) -> None:
    with pytest.raises(SearchError, match="return a list of NodeWithScore"):
        make(lambda _: found).retrieve(QUESTION)


def test_fewer_candidates_than_nodes_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="num_candidates is 1: give a whole number of at least 2"):
        make(named("moon"), num_candidates=1)
    with pytest.raises(ConfigError, match="num_candidates is 9, and nothing reranks them: give node_postprocessors="):
        RAGCacheRetriever(ScriptedSource(()), num_candidates=9)
