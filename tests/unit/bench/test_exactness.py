"""The comparison of answers reads all of them, in every way to ask, and none of those whose reader left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from ragcache_core.client import Engine
from tests.benchmarks.pipeline import exactness as pipeline_exact
from tests.benchmarks.pipeline.answer_tap import AnswerTap, HandedOver
from tests.benchmarks.pipeline.entry_points import WAYS
from tests.benchmarks.pipeline.exactness import Case
from tests.benchmarks.searches import DocumentTexts, DrawnSearch
from tests.conftest import DEMO_MODEL
from tests.support.scripted_server import IDLE, ScriptedServer

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ScriptedServer(root=str(DEMO_MODEL), load=IDLE) as server, Engine.connect(server.url) as engine:
        yield engine


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_that_is_awaited_is_read_and_no_task_is_left(way: str, engine: Engine) -> None:
    tap = AnswerTap(engine)
    search = DrawnSearch(DocumentTexts(DEMO_MODEL.parent / "demo_corpus", 50), 8, 0.03)
    case = Case(way, search, tuple(f"Who is number {i}?" for i in range(10)), k=3, order="canonical")
    assert asyncio.run(pipeline_exact._ask_all(engine, [case], speculate=True)) == 0
    assert set(case.awaited()) <= set(tap.answers)
    for question in case.awaited():
        answer = tap.answers[question]
        assert answer.prompt.endswith(f"Question: {question}")
        assert len(set(pipeline_exact._shown(answer))) == 3


def test_plain_vllm_is_asked_for_the_documents_in_the_order_that_was_shown() -> None:
    search = DrawnSearch(DocumentTexts(DEMO_MODEL.parent / "demo_corpus", 50), 8, 0.0)
    case = Case("aquery", search, ("Who?",), k=3, order="cache_aware")

    async def final(of: Case) -> list[str]:
        return [d.doc_id for d in [update async for update in of.source.stages("Who?", 3)][-1].documents]

    found = asyncio.run(final(case))
    prompt = "\n".join(f"Record {doc_id.removeprefix('document-')}. Words." for doc_id in reversed(found))
    plain = pipeline_exact._as_shown(case, {"Who?": HandedOver(prompt, (), ())})
    assert plain.order == "retrieval"
    assert asyncio.run(final(plain)) == found[::-1]
