"""The searches and the questions of the examples: slowed, but the store's own; answerable from the demo corpus."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from examples import document_order, speculative_rag
from examples._shared import SlowSearch, demo_documents, demo_questions, open_demo_store
from examples.document_order import Measured, popular_questions
from ragcache_core.retrieval import DocumentStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentStore]:
    with open_demo_store(tmp_path_factory.mktemp("demo") / "store") as opened:
        yield opened


async def test_a_slow_search_finds_what_the_store_finds_and_takes_its_time(store: DocumentStore) -> None:
    question = demo_questions("single")[0]["question"]
    began_s = time.perf_counter()
    updates = [(time.perf_counter() - began_s, u) async for u in SlowSearch(store, 0.1).stages(question, 2)]
    assert [u.is_final for _, u in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[-1][1].documents == store.search(question, 2).documents
    assert updates[0][0] < updates[-1][0]
    assert updates[-1][0] >= 0.1


async def test_most_searches_of_the_examples_settle_before_they_end(store: DocumentStore) -> None:
    num_settled = 0
    questions = [q["question"] for q in demo_questions("single")]
    for question in questions:
        *_, last, final = [u.documents async for u in SlowSearch(store, 0.0).stages(question, 2)]
        num_settled += last == final
    assert num_settled > len(questions) / 2


def test_every_question_is_answered_by_a_document_of_the_corpus() -> None:
    texts = [d.text for d in demo_documents()]
    for asked in popular_questions(200):
        assert any(asked.answer in text for text in texts), asked


def test_the_same_seed_asks_the_same_questions_some_of_them_often() -> None:
    questions = popular_questions(200)
    assert questions == popular_questions(200)
    assert questions != popular_questions(200, seed=1)
    assert len(set(questions)) < 200


@pytest.mark.parametrize("given", ["0", "-3"])
def test_too_few_questions_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        document_order.parse_arguments(["--questions", given])
    assert f"{given} is too few: give 1 or more" in capsys.readouterr().err


def test_the_table_of_orders_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    document_order.print_measured(
        [
            Measured("retrieval", False, 40, 3, 9000, 0.25, 0.0, 0.975, 0.01),
            Measured("cache_aware", True, 40, 3, 9000, 0.5, 0.125, 1.0, 0.2),
        ]
    )
    _, plain, kept = capsys.readouterr().out.splitlines()
    assert plain.split() == ["retrieval", "40", "9000", "25.0%", "0.0%", "97.5%", "0.010"]
    assert kept.split() == ["cache_aware,", "first", "kept", "40", "9000", "50.0%", "12.5%", "100.0%", "0.200"]


def test_events_read_as_lines() -> None:
    stage = {"doc_ids": ["a", "b"], "stage": 2, "is_final": True, "scores": [0.1, 0.2]}
    assert speculative_rag.described("ragcache.candidates", stage) == "stage 2: a, b (final)"
    event = {"doc_ids": ["a", "b"], "stage": 2, "hidden_search_s": None, "search_s": 0.1}
    assert speculative_rag.described("ragcache.speculation", {**event, "event": "start"}) == "start: a, b"
    assert speculative_rag.described("ragcache.speculation", {**event, "event": "confirm"}) == "confirm: a, b"
    unjoined = speculative_rag.described("ragcache.speculation", {**event, "event": "settle"})
    assert unjoined == "settle: the request was another one after all"
    hidden = {**event, "event": "settle", "hidden_search_s": 0.08}
    assert speculative_rag.described("ragcache.speculation", hidden) == "settle: 80 of 100 ms of the search were hidden"
