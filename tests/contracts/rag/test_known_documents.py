"""Documents of retrievers of another make, in chains of the frameworks' own: known in prompts, or a hint says how."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from tests.contracts.rag.frameworks import Framework
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import ScriptedSource, Stage

QUESTION = "Which moon has seas of methane?"
TITAN = Document("titan", "Titan is a moon of Saturn with seas of methane and a thick orange sky.")
CERES = Document("ceres", "Ceres is the largest body between Mars and Jupiter, found by Giuseppe Piazzi.")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "ragcache")
    return caplog


def names(answer: Any) -> list[str]:
    return [d["doc_id"] for d in answer.stats.get("documents", ())]


def test_documents_of_any_retriever_are_known_to_any_model(
    framework: Framework, server: ScriptedServer, logged: pytest.LogCaptureFixture
) -> None:
    model = framework.model(base_url=server.base_url)
    chain = framework.chain(framework.other_retriever(TITAN, CERES), model)
    first, again = chain(QUESTION), chain(QUESTION)
    assert names(first) == names(again) == ["titan", "ceres"]
    assert [d["id"] for d in server.requests[-1].documents] == ["titan", "ceres"]
    assert sum(d["num_cached_tokens"] for d in again.stats["documents"]) > 0
    assert {"titan", "ceres"} == set(framework.summary().documents)
    for _ in range(4):
        framework.chain(framework.other_retriever(TITAN), model)(QUESTION)
    assert logged.messages == []
    model.close()


def test_where_documents_cannot_be_known_one_hint_names_the_way(
    framework: Framework, logged: pytest.LogCaptureFixture
) -> None:
    framework.chain(framework.other_retriever(TITAN), framework.model())(QUESTION)
    unknown = Document("unknown", TITAN.text.upper() * 20)
    model, way = framework.model(), next(iter(framework.asks))

    def search(question: str) -> str:
        framework.chain(framework.other_retriever(CERES), framework.other_model())(question)
        return f"{unknown.text}\n\n{question}"

    for _ in range(6):
        answer = asyncio.run(framework.ask(way, model, search(QUESTION)))
        assert names(answer) == []
    (hint,) = logged.messages
    assert "no known document" in hint
    assert "as_retriever()" in hint


@pytest.mark.usefixtures("idle")
def test_a_prompt_of_another_retriever_teaches_nothing_and_is_not_warned_of(
    framework: Framework, logged: pytest.LogCaptureFixture
) -> None:
    model = framework.model()
    framework.chain(framework.retriever(ScriptedSource((Stage("sun mars"),))), model)(QUESTION)
    learned = framework.engine.integration.prompts.bound_prompt
    assert learned is not None
    for documents in ((TITAN,), (TITAN, CERES)):
        framework.question_first(framework.other_retriever(*documents), model)(QUESTION)
    assert logged.messages == []
    assert framework.engine.integration.prompts.bound_prompt is learned


@pytest.mark.usefixtures("idle")
def test_the_warning_of_a_question_before_the_documents_names_prompt_and_retriever(
    framework: Framework, logged: pytest.LogCaptureFixture
) -> None:
    retriever = framework.retriever(ScriptedSource((Stage("moon sun"),)))
    for _ in range(2):
        framework.question_first(retriever, framework.model())(QUESTION)
    (message,) = logged.messages
    assert "RAGCacheRetriever" in message
    assert PromptLayout().static_prefix[:30] in message
    assert QUESTION not in message
    bound = framework.engine.integration.prompts.bound_prompt
    assert bound is not None
    assert bound.is_question_first
