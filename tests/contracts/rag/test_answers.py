"""A cache of answers in both frameworks: what it returns, marks and counts apart, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.contracts.rag.frameworks import Framework
from tests.support.moons import NEAR, QUESTION, TEXTS
from tests.support.scripted_server import Reply, ScriptedServer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store") as store:
        store.add([Document(doc_id, text) for doc_id, text in TEXTS.items()])
        yield store


@pytest.fixture
def answers(framework: Framework) -> Any:
    return framework.answer_cache()


def pair(framework: Framework, store: DocumentStore, answers: Any, **settings: Any) -> Any:
    model = framework.model(temperature=0, **framework.cached_by(answers), **settings)
    return framework.pair(framework.retriever(store, k=1), model)


async def test_a_near_question_about_the_same_documents_sends_no_request(
    framework: Framework, few: str, store: DocumentStore, answers: Any, server: ScriptedServer
) -> None:
    asked = pair(framework, store, answers)
    way = few if "stream" not in few or framework.name == "llamaindex" else "ainvoke"  # LangChain caches no streams
    first, near = [await framework.answer(asked, way, question) for question in (QUESTION, NEAR)]
    assert near.text == first.text
    assert len(server.requests) == len(answers) == 1
    assert "answer_cache" not in first.stats
    mark = near.stats["answer_cache"]
    assert mark["question"] == QUESTION
    assert 0.92 <= mark["similarity"] <= 1
    assert near.stats["pipeline"]["search_s"] > 0
    summary = framework.summary()
    assert (summary.num_cached_answers, summary.num_requests, summary.num_unfinished) == (1, 1, 0)
    assert "1 answer kept from before" in str(summary)
    assert answers.forget(["titan"]) == 1


async def test_other_questions_settings_and_tenants_are_asked(
    framework: Framework, store: DocumentStore, answers: Any, server: ScriptedServer
) -> None:
    await framework.answer(pair(framework, store, answers), question=QUESTION)
    await framework.answer(pair(framework, store, answers), question="Who found Ceres?")
    for settings in ({"max_tokens": 7}, {"chunk_reuse": False}, {"deduplicate": True}, {"ttft_slo": 0.5}):
        await framework.answer(pair(framework, store, answers, **settings), question=QUESTION)
    for salt in ("a", "b", "b"):
        asked = pair(framework, store, answers, extra_body={"cache_salt": salt})
        await framework.answer(asked, question=QUESTION)
    assert len(server.requests) == len(answers) == 8


async def test_a_changed_document_is_asked_about_again_and_its_former_answer_is_gone(
    framework: Framework, store: DocumentStore, answers: Any, server: ScriptedServer
) -> None:
    await framework.answer(pair(framework, store, answers), question=QUESTION)
    store.put([Document("titan", TEXTS["titan"].replace("thick orange", "dense orange"))])
    server.script(Reply("Titan, where Huygens landed."))
    again = await framework.answer(pair(framework, store, answers), question=NEAR)
    assert again.text == "Titan, where Huygens landed."
    assert len(answers) == 1
    assert answers.forget_outdated(store) == 0
    store.delete(["titan"])
    assert answers.forget_outdated(store) == 1


async def test_a_document_that_is_forgotten_while_it_is_answered_from_leaves_nothing(
    framework: Framework, store: DocumentStore, answers: Any, server: ScriptedServer
) -> None:
    forgotten = []
    server.rules = (lambda _: forgotten.append(answers.forget(["titan"])),)
    await framework.answer(pair(framework, store, answers), question=QUESTION)
    assert forgotten == [0]
    assert len(answers) == 0


async def test_a_prompt_without_a_search_gets_its_own_answer_alone_and_calls_of_tools_none(
    framework: Framework, answers: Any, server: ScriptedServer
) -> None:
    model, way = framework.model(**framework.cached_by(answers)), next(iter(framework.asks))
    for question in (QUESTION, QUESTION, NEAR):
        await framework.ask(way, model, question)
    assert len(server.requests) == len(answers) == 2
    framework.tool_calls(model, is_streamed=False)
    assert len(answers) == 2


async def test_answers_come_back_from_a_folder(
    framework: Framework, store: DocumentStore, tmp_path: Path, server: ScriptedServer
) -> None:
    said = []
    for _ in range(2):
        answers = framework.answer_cache(folder=tmp_path / "answers")
        said.append(await framework.answer(pair(framework, store, answers), question=QUESTION))
        assert len(answers) == 1
        answers.close()
    assert said[1].stats["answer_cache"]["similarity"] == 1
    assert said[0].text == said[1].text
