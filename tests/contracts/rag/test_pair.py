"""Answers that are under way before the search has ended: ``SpeculativeRAG`` and ``RAGCacheQueryEngine``."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from ragcache_core.errors import RequestRejectedError, SearchTimeoutError
from ragcache_core.prompt import PromptLayout
from tests.contracts.rag.frameworks import Framework
from tests.support.scripted_server import Refusal, Reply, ScriptedServer
from tests.support.scripted_source import (
    DOCUMENTS,
    EVENTS_OF_A_CHANGE,
    QUESTION,
    InTurn,
    ScriptedSource,
    Stage,
    expected,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)  # twice as long as anything here is waited for


async def eventually(condition: Any) -> bool:
    return await asyncio.to_thread(until, condition)


async def test_the_request_joins_the_speculation_that_was_right(
    framework: Framework, answer: str, generations: Any, server: ScriptedServer, num_begun: Any
) -> None:
    pair = framework.over(Stage("moon sun"), Stage("moon sun", once=lambda: num_begun() == 1))
    said = await framework.answer(pair, answer)
    assert said.text == expected("moon", "sun")
    (seen,) = generations()
    assert seen.speculation is not None
    assert await eventually(lambda: server.confirmed == [seen.speculation])
    assert [d["id"] for d in seen.documents] == ["moon", "sun"]
    assert server.aborted == []
    report = said.stats["pipeline"]
    assert (report["num_stages"], report["num_started"], report["num_cancelled"]) == (2, 1, 0)
    assert report["is_confirmed"]
    assert 0 < report["overlapped_search_s"] < report["search_s"]
    assert report["skipped_because"] is None
    assert [d["doc_id"] for d in said.stats["documents"]] == ["moon", "sun"]
    assert said.stats["num_prompt_tokens"] > 0


async def test_a_speculation_that_was_wrong_is_cancelled_and_the_next_one_joined(
    framework: Framework, answer: str, generations: Any, server: ScriptedServer, num_begun: Any
) -> None:
    server.script(ENDLESS)
    pair = framework.over(
        Stage("mars"),
        Stage("moon sun", once=lambda: num_begun() == 1),
        Stage("moon sun", once=lambda: num_begun() == 2),
    )
    said = await framework.answer(pair, answer)
    assert said.text == expected("moon", "sun")
    wrong, right = generations()
    assert [d["id"] for d in wrong.documents] == ["mars"]
    assert await eventually(lambda: server.aborted == [wrong])
    assert await eventually(lambda: server.confirmed == [right.speculation])
    report, summary = said.stats["pipeline"], framework.summary()
    assert (report["num_started"], report["num_cancelled"], report["is_confirmed"]) == (2, 1, True)
    assert (summary.num_speculations, summary.num_confirmed_speculations, summary.num_requests) == (2, 1, 1)
    assert summary.overlapped_search_s == report["overlapped_search_s"] > 0


async def test_candidates_that_never_settle_cost_one_more_request(
    framework: Framework, few: str, generations: Any, server: ScriptedServer
) -> None:
    server.script(ENDLESS)
    pair = framework.over(Stage("mars"), Stage("moon", once=lambda: len(generations()) == 1))
    said = await framework.answer(pair, few)
    assert said.text == expected("moon")
    wrong, real = generations()
    assert real.speculation is None
    assert await eventually(lambda: server.aborted == [wrong])
    assert server.confirmed == []
    assert said.stats["pipeline"]["overlapped_search_s"] == 0


async def test_equal_questions_join_their_own_speculations(
    framework: Framework, few: str, generations: Any, server: ScriptedServer
) -> None:
    answers: list[Any] = []
    first = ScriptedSource((Stage("moon"), Stage("moon", once=lambda: bool(answers))))
    second = ScriptedSource(
        (Stage("moon", once=lambda: bool(generations())), Stage("moon", once=lambda: len(generations()) == 2))
    )
    pair = framework.pair(framework.retriever(InTurn(first, second)))
    asking = asyncio.ensure_future(framework.answer(pair, few))
    assert await eventually(lambda: bool(generations()))
    answers.append(await framework.answer(pair, few))
    answers.append(await asking)
    assert [said.text for said in answers] == [expected("moon")] * 2
    assert all(said.stats["pipeline"]["is_confirmed"] for said in answers)
    assert await eventually(lambda: sorted(server.confirmed) == sorted(g.speculation for g in generations()))
    assert len(generations()) == 2


async def test_pairs_that_share_a_retriever_speculate_each_for_itself(
    framework: Framework, generations: Any, server: ScriptedServer
) -> None:
    num_awaited = 2
    stages = Stage("moon"), Stage("moon", once=lambda: len(server.requests) == num_awaited)
    retriever = framework.retriever(ScriptedSource(stages))
    pairs = framework.pair(retriever), framework.pair(retriever)
    questions = "Which moon?", "Which month?"
    answers = await asyncio.gather(
        *(framework.answer(pair, question=each) for pair, each in zip(pairs, questions, strict=True))
    )
    assert [said.text for said in answers] == [expected("moon", question=each) for each in questions]
    assert all(said.stats["pipeline"]["is_confirmed"] for said in answers)
    num_awaited = 3
    await framework.find(retriever, question="Which light?")  # alone: the beginning of a prompt, and no answer
    assert [r.path for r in server.requests][2:] == ["/v1/completions"]
    assert len(generations()) == 2


async def test_without_our_plugin_the_request_is_sent_when_the_search_has_ended(
    framework: Framework, few: str, generations: Any, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.load = None
    pair = framework.over(Stage("mars"), Stage("moon", once=lambda: bool(caplog.records)))
    for _ in range(2):
        said = await framework.answer(pair, few)
        assert said.text == expected("moon")
        assert said.stats["pipeline"]["skipped_because"] is not None
    assert [seen.speculation for seen in generations()] == [None, None]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "RAGCache's scheduler" in warning.message


async def test_another_model_answers_when_the_search_has_ended_and_that_is_reported_once(
    framework: Framework, few: str, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    model = framework.other_model()
    for _ in range(2):
        pair = framework.over(Stage("mars"), Stage("moon"), model=model)
        said = await framework.answer(pair, few)
        assert said.stats["pipeline"]["num_stages"] == 2
    assert server.requests == []
    assert all(type(model).__name__ in r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert caplog.records


async def test_a_retriever_of_another_make_is_one_stage(
    framework: Framework, few: str, generations: Any, server: ScriptedServer
) -> None:
    moon, sun = DOCUMENTS["moon"], DOCUMENTS["sun"]
    said = await framework.answer(framework.pair(framework.other_retriever(moon, sun, moon)), few)
    assert said.text == expected("moon", "sun")
    (seen,) = generations()
    assert (seen.speculation, len(seen.documents)) == (None, 2)
    report = said.stats["pipeline"]
    assert (report["num_stages"], report["overlapped_search_s"]) == (1, 0)
    assert "one stage only" in report["skipped_because"]
    (stage,) = framework.events
    assert (stage.is_final, stage.doc_ids, stage.scores) == (True, ("moon", "sun"), ())


@pytest.mark.parametrize("way", [0, 1])
async def test_events_report_each_stage_and_each_speculation_in_order(
    framework: Framework, way: int, num_begun: Any
) -> None:
    def num_starts() -> int:
        return [event.kind for event in framework.events].count("start")

    pair = framework.over(
        Stage("mars"),
        Stage("moon", once=lambda: num_starts() == num_begun() == 1),
        Stage("moon", once=lambda: num_starts() == num_begun() == 2),
    )
    said = await framework.answer(pair, list(framework.answers)[way])
    assert [event.brief for event in framework.events] == [*EVENTS_OF_A_CHANGE, ("settle", 2, "moon")]
    assert {event.query for event in framework.events} == {QUESTION}
    confirm, settle = framework.events[-2:]
    assert confirm.overlapped_search_s is None
    assert settle.overlapped_search_s == said.stats["pipeline"]["overlapped_search_s"]
    assert 0 < (settle.overlapped_search_s or 0) < settle.search_s


async def test_the_candidates_of_a_reranker_are_answered_from_while_it_works(
    framework: Framework, server: ScriptedServer
) -> None:
    for chosen, is_right in ((["moon", "sun"], True), (["mars", "moon"], False)):
        server.clear()
        reranker = framework.reranker(lambda _: chosen, once=lambda: bool(server.requests))  # noqa: B023
        retriever = framework.retriever(ScriptedSource((Stage("moon sun mars"),)), reranker=reranker, num_candidates=3)
        said = await framework.answer(framework.pair(retriever))
        assert said.text == expected(*chosen)
        assert said.stats["pipeline"]["is_confirmed"] == is_right
        assert len(server.requests) == (1 if is_right else 2)


async def test_reordered_documents_are_asked_ahead_with_the_line_that_names_the_best(
    framework: Framework, few: str, generations: Any
) -> None:
    source = ScriptedSource((Stage("sun mars moon"), Stage("sun mars moon", once=lambda: bool(generations()))))
    layout = PromptLayout(relevance_hint="Best first: {order}")
    pair = framework.pair(framework.retriever(source, k=3, document_order="canonical"), layout=layout)
    said = await framework.answer(pair, few)
    assert said.text == expected("mars", "moon", "sun").replace("\n\nQuestion", "\n\nBest first: 3, 1, 2\n\nQuestion")
    (seen,) = generations()
    assert said.stats["pipeline"]["is_confirmed"]
    assert seen.kv_transfer_params["ragcache"]["reordered"]


# Failures


async def test_a_search_that_raises_leaves_no_request(
    framework: Framework, few: str, generations: Any, server: ScriptedServer
) -> None:
    server.script(ENDLESS)
    source = ScriptedSource((Stage("moon"), Stage(error=OSError("the disk is gone"), once=lambda: bool(generations()))))
    with pytest.raises(OSError, match="the disk is gone"):
        await framework.answer(framework.pair(framework.retriever(source)), few)
    assert await eventually(lambda: server.num_running == 0)
    assert source.num_open == 0


@pytest.mark.parametrize("on_the_retriever", [False, True])
async def test_a_search_that_never_ends_is_timed_out(
    framework: Framework, few: str, on_the_retriever: bool, server: ScriptedServer
) -> None:
    server.script(ENDLESS)
    source = ScriptedSource((Stage("moon"),), is_endless=True)
    retriever = framework.retriever(source, search_timeout_s=0.1 if on_the_retriever else 600.0)
    pair = framework.pair(retriever, search_timeout_s=None if on_the_retriever else 0.1)
    with pytest.raises(SearchTimeoutError, match=r"0\.1 s"):
        await framework.answer(pair, few)
    assert await eventually(lambda: server.num_running == 0)
    assert source.num_open == 0


async def test_a_speculation_that_the_engine_refuses_is_queried_again_for_real(
    framework: Framework, generations: Any, server: ScriptedServer
) -> None:
    server.script(Refusal(503, "too busy", "ServiceUnavailable"))
    pair = framework.over(Stage("moon"), Stage("moon", once=lambda: len(generations()) >= 1))
    assert (await framework.answer(pair)).text == expected("moon")
    server.rules = (lambda _: Refusal(400, "no such thing"),)
    with pytest.raises(RequestRejectedError, match="no such thing"):
        await framework.answer(framework.over(Stage("moon"), Stage("moon")))


async def test_leaving_during_the_search_leaves_nothing_behind(framework: Framework, server: ScriptedServer) -> None:
    source, loop = ScriptedSource((Stage("moon"),), is_endless=True), asyncio.get_running_loop()
    pair = framework.pair(framework.retriever(source))
    before = asyncio.all_tasks()
    for way in [name for name in framework.answers if name in ("ainvoke", "astream", "aquery", "streamed_aquery")]:
        server.clear()
        server.script(ENDLESS)
        task = asyncio.ensure_future(framework.answer(pair, way))
        assert await eventually(lambda: server.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await eventually(lambda: server.num_running == 0)
        assert source.num_open == 0
        assert await eventually(lambda: asyncio.all_tasks(loop) == before), "the loop closes generators in tasks"
