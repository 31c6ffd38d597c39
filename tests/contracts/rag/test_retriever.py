"""A search in stages in both frameworks: what it returns, prefills and publishes, and how it goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.errors import SearchError, SearchTimeoutError
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.contracts.rag.frameworks import Framework
from tests.support.cached_orders import keep_cached
from tests.support.late_search import begin_late
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import EVENTS_OF_A_CHANGE, QUESTION, ScriptedSource, Stage
from tests.support.waiting import until

TEXTS = [f"Planet number {i} is called {name}." for i, name in enumerate(["Zor", "Mel", "Tak", "Ruv", "Bim", "Lof"])]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)
both_ways = pytest.mark.parametrize("is_async", [False, True])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "store") as store:
        store.add(Document(f"p{i}", text, {"number": i}) for i, text in enumerate(TEXTS))
        yield store


@both_ways
async def test_the_nearest_documents_are_found_and_each_stage_is_an_event(
    framework: Framework, is_async: bool, store: DocumentStore
) -> None:
    retriever = framework.retriever(store, k=3, stages=3)
    found = await framework.find(retriever, is_async=is_async, question="Who is Mel?")
    assert found == [d.doc_id for d in store.search("Who is Mel?", 3).documents]
    assert found[0] == "p1"
    events = framework.events
    assert [event.brief[:2] for event in events] == [("stage", i) for i in range(len(events))]
    assert [event.is_final for event in events] == [False] * (len(events) - 1) + [True]
    assert list(events[-1].doc_ids) == found
    assert sorted(events[-1].scores, reverse=True) == list(events[-1].scores), "the larger, the nearer"
    assert len(events[-1].scores) == 3
    assert {event.query for event in events} == {"Who is Mel?"}


async def test_what_a_question_found_last_is_its_first_stage_whichever_retriever_is_asked(
    framework: Framework, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_late(store, monkeypatch)

    async def stages(question: str) -> list[tuple[int, list[str]]]:
        framework.restart()
        await framework.find(framework.retriever(store), question=question)
        return [(event.stage, list(event.doc_ids)) for event in framework.events]

    *searched, final = await stages("Who is Mel?")
    assert await stages("Who is Mel?") == [(-1, final[1]), *searched, final]
    assert (await stages("Who is Zor?"))[0][0] == 0


def test_threads_share_a_retriever(framework: Framework, store: DocumentStore) -> None:
    retriever, found = framework.retriever(store, k=1), []
    ask = lambda: found.append(asyncio.run(framework.find(retriever, question="Who is Mel?")))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["p1"]] * 8


# What the engine does meanwhile


@both_ways
@pytest.mark.usefixtures("idle")
async def test_the_beginning_of_a_bound_prompt_is_prefilled_while_the_search_goes_on(
    framework: Framework, is_async: bool, warmed: Any, server: ScriptedServer, num_begun: Any
) -> None:
    def num_starts() -> int:
        return [event.kind for event in framework.events].count("start")

    framework.bind(PromptLayout())
    server.script(Reply("late", wait_s=30.0))
    stages = (
        Stage("mars"),
        Stage("moon", once=lambda: num_starts() == num_begun() == server.num_running == 1),
        Stage("moon", once=lambda: num_starts() == num_begun() == 2),
    )
    retriever = framework.retriever(ScriptedSource(stages))
    assert await framework.find(retriever, is_async=is_async) == ["moon"]
    assert [event.brief for event in framework.events] == EVENTS_OF_A_CHANGE
    confirm = framework.events[-1]
    assert 0 < (confirm.overlapped_search_s or 0) < confirm.search_s
    wrong, right = warmed()
    assert [[d["id"] for d in each.documents] for each in (wrong, right)] == [["mars"], ["moon"]]
    assert (right.body["max_tokens"], right.speculation is None) == (1, False)
    assert await asyncio.to_thread(until, lambda: server.confirmed == [right.speculation])
    assert await asyncio.to_thread(until, lambda: server.aborted == [wrong])


@pytest.mark.usefixtures("idle")
async def test_the_prompt_is_learned_from_the_first_question_of_a_chain(
    framework: Framework, warmed: Any, generations: Any, server: ScriptedServer
) -> None:
    for is_known in (False, True):
        last = Stage("moon sun", once=lambda: bool(warmed()) or not is_known)  # noqa: B023
        retriever = framework.retriever(ScriptedSource((Stage("moon sun"), last)))
        await framework.answer(framework.pair(retriever, framework.other_model()))  # the retriever alone
        await asyncio.to_thread(framework.chain(retriever, framework.model()), QUESTION)
        assert bool(warmed()) == is_known
    warm, asked = warmed()[-1], generations()[-1]
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert server.tokens_of(asked)[: len(warm.body["prompt"])] == warm.body["prompt"]


@both_ways
@pytest.mark.parametrize("why", ["switched off", "no engine", "no prompt", "plain server"])
@pytest.mark.usefixtures("idle")
async def test_without_speculation_nothing_is_sent_and_the_documents_are_the_same(
    framework: Framework, why: str, is_async: bool, engine: Engine, server: ScriptedServer
) -> None:
    if why != "no prompt":
        framework.bind(PromptLayout())
    if why == "plain server":
        server.load = None
    retriever = framework.retriever(
        ScriptedSource((Stage("mars"), Stage("moon sun"))),
        engine=None if why == "no engine" else engine,
        speculate=why != "switched off",
    )
    assert await framework.find(retriever, is_async=is_async) == ["moon", "sun"]
    assert server.requests == []
    assert [event.brief for event in framework.events] == [("stage", 0, "mars"), ("stage", 1, "moon", "sun")]
    if why in ("switched off", "no engine"):
        assert server.cache_questions == []


@pytest.mark.usefixtures("idle")
async def test_retrievers_that_share_an_engine_each_have_their_prompt(framework: Framework, warmed: Any) -> None:
    mine = framework.bind(PromptLayout(static_prefix="Answer from the documents. This is a prompt of mine alone."))
    framework.bind(PromptLayout())
    for prompt in (mine, None):
        num_before = len(warmed())
        stages = Stage("moon"), Stage("moon", once=lambda: len(warmed()) > num_before)  # noqa: B023
        await framework.find(framework.retriever(ScriptedSource(stages), prompt=prompt))
    of_mine, of_bound = (seen.body["prompt"] for seen in warmed())
    assert of_mine != of_bound


async def test_what_was_retrieved_is_known_in_the_next_prompt(
    framework: Framework, store: DocumentStore, server: ScriptedServer
) -> None:
    first, *_ = await framework.find(framework.retriever(store), question="Who is Mel?")
    await framework.ask(next(iter(framework.asks)), framework.model(), f"{TEXTS[1]} Who?")
    assert [d["id"] for d in server.requests[-1].documents] == [first]


# Order, and exchanged documents


@both_ways
async def test_documents_come_in_the_order_that_is_asked_for(
    framework: Framework, is_async: bool, engine: Engine
) -> None:
    for one in (engine, None):
        for settings, expected in (({}, ["mars", "moon", "sun"]), ({"keep_first": True}, ["sun", "mars", "moon"])):
            source = ScriptedSource((Stage("sun moon mars"), Stage("sun mars moon")))
            retriever = framework.retriever(source, k=3, engine=one, document_order="canonical", **settings)
            assert await framework.find(retriever, is_async=is_async) == expected


@pytest.fixture
async def cached(framework: Framework, server: ScriptedServer, generations: Any, idle: None) -> None:
    """Much of ``moon sun`` is cached after the other prompt, a little of ``sun moon`` after mine."""
    for layout in (MINE, OTHER):
        await framework.answer(framework.over(Stage("mars"), layout=layout))
    mine, other = generations()
    keep_cached(server, framework.engine, (mine, "sun moon", 10), (other, "moon sun", 100), (mine, "sun mars", 5))


MINE, OTHER = (PromptLayout(static_prefix=f"You are {who}.") for who in ("brief", "an old friend who likes to talk"))
FOUND = Stage("sun moon mars", scores=(1.0, 1.02, 1.03))  # squared distances: mars is 0.5 % worse than the moon


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("layout", "order"), [(MINE, ["sun", "moon"]), (OTHER, ["moon", "sun"])])
async def test_a_pair_goes_by_its_own_prompt(
    framework: Framework, few: str, layout: PromptLayout, order: list[str], generations: Any
) -> None:
    framework.bind(OTHER)
    retriever = framework.retriever(ScriptedSource((Stage("moon sun"),)), document_order="cache_aware")
    num_before = len(generations())
    await framework.answer(framework.pair(retriever, layout=layout), few)
    (seen,) = generations()[num_before:]
    assert [d["id"] for d in seen.documents] == order


@pytest.fixture
async def mars_cached(framework: Framework, server: ScriptedServer, generations: Any, idle: None) -> None:
    """``sun mars`` is cached after the prompt."""
    await framework.answer(framework.over(Stage("sun")))
    keep_cached(server, framework.engine, (generations()[0], "sun mars", 50))


@pytest.mark.usefixtures("mars_cached")
@pytest.mark.parametrize(
    ("settings", "expected", "k"),
    [({}, "moon", 2), ({"max_score_loss": 0.02}, "mars", 4), ({"max_score_loss": 0.004}, "moon", 4)],
)
async def test_the_cached_one_of_two_nearly_equal_documents_is_returned_if_it_may(
    framework: Framework, settings: Any, expected: str, k: int
) -> None:
    framework.bind(PromptLayout())
    framework.restart()
    source = ScriptedSource((FOUND,))
    assert await framework.find(framework.retriever(source, **settings)) == ["sun", expected]
    (event,) = framework.events
    assert event.swaps == (("moon", "mars"),) * (expected == "mars")
    assert source.asked == [(QUESTION, k)]


@pytest.mark.usefixtures("mars_cached")
async def test_a_pair_asks_ahead_with_what_it_will_show_and_reports_each_swap(
    framework: Framework, generations: Any
) -> None:
    num_before = len(generations())
    ahead = Stage(FOUND.doc_ids, once=lambda: len(generations()) > num_before, scores=FOUND.scores)
    answer = await framework.answer(
        framework.pair(framework.retriever(ScriptedSource((FOUND, ahead)), max_score_loss=0.02))
    )
    (seen,) = generations()[num_before:]
    assert [document["id"] for document in seen.documents] == ["sun", "mars"]
    report = answer.stats["pipeline"]
    assert report["is_confirmed"]
    assert [(swap["doc_out"], swap["doc_in"]) for swap in report["swaps"]] == [("moon", "mars")]


async def test_without_an_engine_nothing_is_exchanged(framework: Framework) -> None:
    assert await framework.find(framework.retriever(ScriptedSource((FOUND,)), engine=None, max_score_loss=0.5)) == [
        "sun",
        "moon",
    ]


# Rerankers


@both_ways
@pytest.mark.usefixtures("idle")
async def test_the_candidates_are_prefilled_while_a_reranker_works(
    framework: Framework, is_async: bool, server: ScriptedServer, warmed: Any
) -> None:
    framework.bind(PromptLayout())
    reranker = framework.reranker(lambda _: ["moon", "sun"], once=lambda: bool(warmed()))
    source = ScriptedSource((Stage("moon sun mars"),))
    retriever = framework.retriever(source, reranker=reranker, num_candidates=3)
    assert await framework.find(retriever, is_async=is_async) == ["moon", "sun"]
    assert source.asked == [(QUESTION, 3)]
    (warm,) = warmed()
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert await asyncio.to_thread(until, lambda: server.confirmed == [warm.speculation])


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (["mars"], ["mars"]),
        ([], []),
        (["mars", "mars", "sun", "mars"], ["mars", "sun"]),
        (["mars", "sun", "moon"], ["mars", "sun"]),
    ],
    ids=["drops one", "drops all", "repeats", "keeps more than wanted"],
)
async def test_a_reranker_may_drop_and_what_it_repeats_counts_once(
    framework: Framework, chosen: list[str], found: list[str]
) -> None:
    source = ScriptedSource((Stage("moon sun mars"),))
    retriever = framework.retriever(source, reranker=framework.reranker(lambda _: chosen), num_candidates=3)
    assert await framework.find(retriever) == found


async def test_a_reranker_that_fails_or_hangs_ends_the_search(framework: Framework) -> None:
    def fail(_: list[str]) -> list[str]:
        raise OSError("the reranker is gone")

    source = ScriptedSource((Stage("moon sun mars"),))
    with pytest.raises(OSError, match="the reranker is gone"):
        await framework.find(framework.retriever(source, reranker=framework.reranker(fail)))
    hanging = framework.reranker(lambda ids: ids, once=lambda: False)
    with pytest.raises(SearchTimeoutError):
        await framework.find(framework.retriever(source, reranker=hanging, search_timeout_s=0.1))


# Failures


@both_ways
@pytest.mark.parametrize("how", ["raises", "ends", "lasts"])
@pytest.mark.usefixtures("idle")
async def test_a_search_that_goes_wrong_leaves_no_prefill(
    framework: Framework, how: str, is_async: bool, warmed: Any, server: ScriptedServer
) -> None:
    framework.bind(PromptLayout())
    server.script(Reply("late", wait_s=30.0))
    stages = [Stage("moon")]
    if how == "raises":
        stages.append(Stage(error=OSError("the disk is gone"), once=lambda: bool(warmed())))
    source = ScriptedSource(tuple(stages), is_endless=True, pause_s=0.1 if how == "ends" else 60.0)
    retriever = framework.retriever(source, search_timeout_s=0.3 if how == "lasts" else 20.0)
    with pytest.raises({"raises": OSError, "ends": SearchError, "lasts": SearchTimeoutError}[how]):
        await framework.find(retriever, is_async=is_async)
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
    assert source.num_open == 0


@pytest.mark.usefixtures("idle")
async def test_leaving_a_search_leaves_no_task(framework: Framework, server: ScriptedServer) -> None:
    framework.bind(PromptLayout())
    server.script(ENDLESS)
    source, before = ScriptedSource((Stage("moon"),), is_endless=True), asyncio.all_tasks()
    task = asyncio.ensure_future(framework.find(framework.retriever(source), is_async=True))
    assert await asyncio.to_thread(until, lambda: len(server.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert source.num_open == 0
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
