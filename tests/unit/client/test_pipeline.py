"""The runner of a search with speculation: real asyncio and threads, a scripted source, engine and speculator."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ragcache_core.client.pipeline import run as search_run
from ragcache_core.client.pipeline.run import PipelineEvent, run_pipeline
from ragcache_core.client.speculation.client import EngineLoad
from ragcache_core.errors import SearchError, SearchTimeoutError
from ragcache_core.speculation import StageStabilityStats
from ragcache_core.types import Document, RetrievalUpdate
from tests.unit.client.pipeline_scene import (
    STEP_S,
    ScriptedDoor,
    ScriptedSpeculator,
    Sent,
    Source,
    document,
    join_starts,
    run,
    update,
)

# What a search gains


async def test_a_source_that_is_never_right_before_its_end_is_believed_no_more() -> None:
    speculator, history, door = ScriptedSpeculator(), StageStabilityStats(), ScriptedDoor()
    for _ in range(15):
        result = await run(Source("ab", "cd", "ef"), door, speculator, history=history)
    num_sent, num_submitted = len(speculator.sent), door.num_submitted
    assert 0 < num_sent < 30
    result = await run(Source("ab", "cd", "ef"), door, speculator, history=history)
    assert "seldom right" in (result.report.skipped_because or "")
    assert (len(speculator.sent), door.num_submitted) == (num_sent, num_submitted)
    for _ in range(3):
        result = await run(Source("ef", "ef", "ef"), door, speculator, history=history)
    assert result.report.is_confirmed, "it is watched all the same, and believed again"


async def test_an_unknown_source_is_speculated_on_where_the_engine_is_idle() -> None:
    speculator, history = ScriptedSpeculator(), StageStabilityStats()
    assert (await run(Source("ab", "ab"), ScriptedDoor(), speculator, history=history)).report.is_confirmed
    source, door = Source("ab", "ab", "ab", "ab", "ab"), ScriptedDoor(2)
    source.between[2] = lambda: setattr(door, "num_pending", 0)
    result = await run(source, door, speculator, history=history)
    assert result.report.num_started == 0, "it was busy a moment ago"
    assert "had no room" in (result.report.skipped_because or "")
    assert len(speculator.sent) == 1


async def test_concurrent_searches_try_an_unknown_source_once_each() -> None:
    async def asked(speculator: ScriptedSpeculator) -> None:
        source = Source("ab", "cd", "ef", "gh")
        await run_pipeline(source.updates(), ScriptedDoor(), speculator, history=history)

    history, alone, beside = StageStabilityStats(), ScriptedSpeculator(), ScriptedSpeculator()
    await asked(alone)
    assert len(alone.sent) == 3
    await asyncio.gather(asked(beside), asked(beside))
    assert len(beside.sent) == 2
    assert history.num_running == 0


async def test_a_search_that_fails_or_is_left_runs_no_more() -> None:
    history = StageStabilityStats()

    async def failing() -> AsyncIterator[RetrievalUpdate]:
        yield update("a")
        raise ValueError("no index")

    with pytest.raises(ValueError, match="no index"):
        await run_pipeline(failing(), ScriptedDoor(), ScriptedSpeculator(), history=history)
    left = asyncio.create_task(run(Source(*"aaaaaa"), ScriptedDoor(), ScriptedSpeculator(), history=history))
    await asyncio.sleep(STEP_S)  # it is under way
    assert history.num_running == 1
    left.cancel()
    await asyncio.wait([left])
    assert history.num_running == 0


async def test_what_a_busy_engine_shows_of_a_sources_stages_is_learnt_without_sending_anything() -> None:
    speculator, history, door = ScriptedSpeculator(), StageStabilityStats(), ScriptedDoor(2)
    for _ in range(3):
        result = await run(Source("ab", "ab", "ab", "ab", "ab"), door, speculator, history=history)
    assert speculator.num_calls == 0
    assert "had no room" in (result.report.skipped_because or "")
    source = Source("ab", "ab", "ab", "ab", "ab")
    source.between[2] = lambda: setattr(door, "num_pending", 0)
    result = await run(source, door, speculator, history=history)
    assert result.report.is_confirmed, "its first stage is known to be right: it waits for room"


async def test_candidates_that_stay_are_sent_once_and_confirmed() -> None:
    speculator, source = ScriptedSpeculator(), Source("ab", "ab", "ab", "ab")
    result = await run(source, ScriptedDoor(), speculator)
    [sent] = speculator.sent
    assert sent.is_confirmed
    assert not sent.is_cancelled
    assert result.speculation is sent
    assert result.update == update("ab", 3, is_final=True)
    report = result.report
    assert (report.num_stages, report.num_started, report.num_cancelled, report.is_confirmed) == (4, 1, 0, True)
    assert report.skipped_because is None
    assert STEP_S <= report.non_overlapped_search_s < 3 * STEP_S < report.search_s
    assert report.to_dict()["overlapped_search_s"] == report.search_s - report.non_overlapped_search_s


async def test_changed_candidates_cancel_the_speculation_and_send_another() -> None:
    speculator = ScriptedSpeculator()
    events: list[PipelineEvent] = []
    result = await run(Source("ab", "ba", "ba", "ba"), ScriptedDoor(), speculator, on_event=events.append)
    assert speculator.shown() == [("a", "b"), ("b", "a")]
    assert [sent.is_cancelled for sent in speculator.sent] == [True, False]
    assert (result.report.num_started, result.report.num_cancelled) == (2, 1)
    kinds = [event.kind for event in events]
    assert kinds == ["stage", "start", "stage", "cancel", "start", "stage", "stage", "confirm"]
    assert [e.doc_ids for e in events if e.kind == "start"] == speculator.shown()
    assert [e.overlapped_search_s for e in events] == [None] * 8, "it is told when the answer has ended"
    report = result.settled_report()
    settled = result.settled(report)
    assert settled is not None
    assert (settled.kind, settled.doc_ids, settled.overlapped_search_s) == (
        "settle",
        ("b", "a"),
        report.overlapped_search_s,
    )
    assert settled.overlapped_search_s
    speculator.sent[1].is_claimed = False
    unjoined = result.settled(result.settled_report())
    assert unjoined is not None
    assert unjoined.overlapped_search_s is None
    assert events[-1].search_s == result.report.search_s
    assert all(a.search_s <= b.search_s for a, b in pairwise(events[:-1]))


async def test_a_prefill_reports_the_overlapped_time_with_the_final_documents() -> None:
    speculator, source = ScriptedSpeculator(), Source("ab", "ab")
    source.between[1] = lambda: setattr(speculator.sent[0], "can_be_adopted", False)
    events: list[PipelineEvent] = []
    result = await run(source, ScriptedDoor(), speculator, on_event=events.append)
    assert (events[-1].kind, events[-1].overlapped_search_s) == ("confirm", result.report.overlapped_search_s)
    assert result.report.overlapped_search_s > 0
    assert result.settled(result.settled_report()) is None, "no answer tells it again"


async def test_a_prefill_that_fails_after_all_hid_nothing() -> None:
    speculator, source = ScriptedSpeculator(), Source("ab", "ab")
    source.between[1] = lambda: vars(speculator.sent[0]).update(can_be_adopted=False, is_claimed=False)
    result = await run(source, ScriptedDoor(), speculator)
    assert result.settled_report().is_confirmed
    speculator.sent[0].fail()
    report = result.settled_report()
    assert (report.is_confirmed, report.overlapped_search_s) == (False, 0.0)


async def test_unexpected_final_documents_are_a_misspeculation() -> None:
    speculator = ScriptedSpeculator()
    events: list[PipelineEvent] = []
    result = await run(Source("ab", "cd"), ScriptedDoor(), speculator, on_event=events.append)
    assert speculator.alive() == []
    assert result.speculation is None
    assert result.report.non_overlapped_search_s == result.report.search_s
    assert [event.kind for event in events] == ["stage", "start", "stage", "cancel", "miss"]
    assert (events[-1].doc_ids, events[-1].overlapped_search_s) == (("c", "d"), 0.0)


async def test_the_time_until_the_engine_began_is_not_hidden() -> None:
    speculator, source = ScriptedSpeculator(), Source("a", "a", "a")
    source.between[2] = lambda: setattr(speculator.sent[0], "started_s", speculator.sent[0].sent_s + STEP_S / 2)
    report = (await run(source, ScriptedDoor(), speculator)).report
    late = ScriptedSpeculator()
    source = Source("a", "a", "a")
    source.between[2] = lambda: setattr(late.sent[0], "started_s", late.sent[0].sent_s + 100.0)
    assert report.non_overlapped_search_s >= 1.5 * STEP_S
    assert report.overlapped_search_s > 0.0
    assert (await run(source, ScriptedDoor(), late)).report.overlapped_search_s == 0.0


async def test_nothing_counts_as_overlapped_until_the_start_time_is_reported() -> None:
    speculator, source = ScriptedSpeculator(), Source("a", "a", "a")
    source.between[1] = lambda: setattr(speculator.sent[0], "started_s", None)
    events: list[PipelineEvent] = []
    result = await run(source, ScriptedDoor(), speculator, on_event=events.append)
    assert (events[-1].kind, events[-1].overlapped_search_s) == ("confirm", None)
    assert result.report == result.settled_report()
    assert (result.report.is_confirmed, result.report.overlapped_search_s) == (True, 0.0)
    [sent] = speculator.sent
    sent.started_s, sent.making_s = result.began_s + result.report.search_s / 4, 0.0
    assert result.settled_report().overlapped_search_s == pytest.approx(0.75 * result.report.search_s)
    sent.started_s = result.began_s + 2 * result.report.search_s
    assert result.settled_report() == result.report, "it began when the search was over"
    sent.started_s, sent.is_claimed = result.began_s, False
    assert (result.settled_report().is_confirmed, result.settled_report().overlapped_search_s) == (False, 0.0)
    sent.can_be_adopted = False
    assert result.settled_report().non_overlapped_search_s == 0.0, "no request joins what only prefills"


async def test_the_speculator_gets_the_order_of_the_prompt_and_is_asked_for_it_once() -> None:
    speculator, asked = ScriptedSpeculator(), []

    def arrange(documents: Sequence[Document]) -> list[Document]:
        asked.append(documents)
        return sorted(documents, key=lambda d: d.doc_id)

    result = await run(Source("ba", "ab", "ba"), ScriptedDoor(), speculator, arrange=arrange)
    assert speculator.shown() == [("a", "b")]
    assert len(asked) == 2
    assert result.report.is_confirmed
    assert result.documents == (document("a"), document("b"))
    assert result.update.documents == (document("b"), document("a"))


def again(fields: dict[str, Any], between: Callable[[], object] = lambda: None) -> AsyncIterator[RetrievalUpdate]:
    """Two documents, and the same with other ``fields`` finally."""

    async def updates() -> AsyncIterator[RetrievalUpdate]:
        await asyncio.sleep(STEP_S)
        yield update("ab")
        await asyncio.sleep(2 * STEP_S)
        between()
        final = update("ab", 1, is_final=True)
        yield replace(final, documents=tuple(replace(d, **fields) for d in final.documents))

    return updates()


arranged_or_not = pytest.mark.parametrize(
    "arrange", [None, lambda documents: documents[::-1]], ids=["retrieval", "arranged"]
)
NEW_TEXT, NEW_METADATA = {"text": "new text"}, {"metadata": {"page": 2}}


@pytest.mark.parametrize(
    ("fields", "can_be_adopted"), [(NEW_TEXT, True), (NEW_METADATA, False)], ids=["text", "warmed"]
)
@arranged_or_not
async def test_documents_that_changed_during_the_search_are_other_documents(
    fields: dict[str, Any], can_be_adopted: bool, arrange: Callable[[Sequence[Document]], Sequence[Document]] | None
) -> None:
    speculator = ScriptedSpeculator()
    updates = again(fields, lambda: setattr(speculator.sent[0], "can_be_adopted", can_be_adopted))
    result = await run_pipeline(updates, ScriptedDoor(), speculator, arrange=arrange)
    assert sorted(result.documents, key=lambda d: d.doc_id) == [replace(document(d), **fields) for d in "ab"]
    assert result.speculation is None
    assert [sent.is_cancelled for sent in speculator.sent] == [True]


@arranged_or_not
async def test_whether_the_prompt_shows_new_metadata_the_request_says(
    arrange: Callable[[Sequence[Document]], Sequence[Document]] | None,
) -> None:
    speculator = ScriptedSpeculator()
    events: list[PipelineEvent] = []
    result = await run_pipeline(
        again(NEW_METADATA), ScriptedDoor(), speculator, arrange=arrange, on_event=events.append
    )
    assert {d.metadata["page"] for d in result.documents} == {2}
    [sent] = speculator.sent
    assert result.speculation is sent
    assert (sent.is_cancelled, sent.is_confirmed) == (False, False), "it is there to be joined, and still a guess"
    assert (events[-1].kind, events[-1].overlapped_search_s) == ("confirm", None)
    assert result.report.overlapped_search_s == 0.0
    assert result.settled_report().overlapped_search_s > STEP_S
    sent.is_claimed = False
    assert (result.settled_report().is_confirmed, result.settled_report().overlapped_search_s) == (False, 0.0)


# EngineLoad


async def test_the_scheduler_says_whether_there_is_room_and_not_the_number_of_prefills() -> None:
    speculator, door, history = ScriptedSpeculator(), ScriptedDoor(0), StageStabilityStats()
    door.has_room = False
    result = await run(Source("a", "a", "a"), door, speculator)
    assert speculator.num_calls == 0
    assert result.report.skipped_because == (
        "the engine had no room: it answers real requests, which on a CPU leave none, or it has as many speculative "
        "ones as max_prefill_bs allows"
    )
    door.has_room, door.num_pending = True, 5
    for named in "aaabbbb":
        history.record(0, named, "a", 1.0)
    assert not history.is_worthwhile(0, is_idle=False)
    assert (await run(Source("a", "a"), door, speculator, history=history)).report.is_confirmed


async def test_what_lives_ends_with_its_candidates_even_if_nothing_more_can_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LosingDoor(ScriptedDoor):
        def __init__(self) -> None:
            super().__init__()
            self.is_lost = asyncio.Event()

        async def apending_prefills(self) -> EngineLoad | None:
            if (load := await super().apending_prefills()) is not None and self.num_submitted == 1:
                return load
            await self.is_lost.wait()
            return None

    monkeypatch.setattr(search_run, "_LOAD_FRESH_S", 60.0)
    speculator, door, was_cancelled = ScriptedSpeculator(), LosingDoor(), []

    async def updates() -> AsyncIterator[RetrievalUpdate]:
        await asyncio.sleep(STEP_S)
        yield update("a")
        await asyncio.sleep(STEP_S)
        speculator.sent[0].fail()  # so that the load is asked again
        await asyncio.sleep(STEP_S)
        yield update("b", 1)
        await asyncio.sleep(STEP_S)
        door.is_lost.set()
        await asyncio.sleep(STEP_S)
        yield update("c", 2)
        await asyncio.sleep(STEP_S)
        was_cancelled.append(speculator.sent[1].is_cancelled)
        yield update("c", 3, is_final=True)

    await run_pipeline(updates(), door, speculator)
    assert (speculator.shown(), was_cancelled) == ([("a",), ("b",)], [True])


async def test_a_full_engine_gets_nothing_until_it_has_room() -> None:
    speculator, source, door = ScriptedSpeculator(), Source("a", "b", "b", "b", "b"), ScriptedDoor(2)
    source.between[2] = lambda: setattr(door, "num_pending", 1)
    result = await run(source, door, speculator)
    assert speculator.shown() == [("b",)]
    assert result.report.is_confirmed
    assert result.report.non_overlapped_search_s > 2.5 * STEP_S


async def test_a_full_engine_with_a_disk_reads_each_candidates_once_and_computes_them_when_it_has_room() -> None:
    speculator, source, door = ScriptedSpeculator(), Source(*"aabbbbbbbbbb"), ScriptedDoor(2)
    door.reads_ahead = True
    source.between[4] = lambda: setattr(door, "num_pending", 1)
    result = await run(source, door, speculator)
    join_starts()
    assert speculator.prefetched == [("a",), ("b",)]
    assert speculator.shown() == [("b",)]
    assert (result.report.num_started, result.report.num_cancelled) == (1, 0)


async def test_what_an_engine_has_room_for_is_not_read_ahead_as_well() -> None:
    speculator, door = ScriptedSpeculator(), ScriptedDoor()
    door.reads_ahead = True
    await run(Source("a", "b", "b"), door, speculator)
    join_starts()
    assert speculator.prefetched == []


async def test_an_engine_that_stays_full_is_asked_less_and_less_and_gets_nothing() -> None:
    speculator, door = ScriptedSpeculator(), ScriptedDoor(7)
    result = await run(Source(*"aaaaaaaaaaaa"), door, speculator)
    assert speculator.num_calls == 0
    assert 2 <= door.num_submitted <= 7
    assert result.report.skipped_because == ("the engine had no room: real requests that wait for their first token: 7")
    assert result.report.non_overlapped_search_s == result.report.search_s


async def test_a_slow_answer_about_the_load_delays_no_stage() -> None:
    door = ScriptedDoor()
    door.answers_after_s = 100 * STEP_S
    result = await run(Source("a", "a", "a"), door, ScriptedSpeculator())
    assert result.report.search_s < 10 * STEP_S
    assert result.report.skipped_because == "the documents were final before the engine had told its load"


@pytest.mark.parametrize(
    ("door", "speculator", "why"),
    [
        (None, ScriptedSpeculator(), "there is no engine to speculate on"),
        (ScriptedDoor(), None, "speculation is off"),
        (ScriptedDoor(can=False), ScriptedSpeculator(), "the engine takes no speculative requests"),
        (ScriptedDoor(max_prefill_bs=0), ScriptedSpeculator(), "the engine did not tell its load"),
        (ScriptedDoor(error=OSError("gone")), ScriptedSpeculator(), "the engine did not tell its load: gone"),
        (ScriptedDoor(), ScriptedSpeculator(has_any=False), "nothing could be sent ahead"),
    ],
)
async def test_a_search_without_speculation_is_a_search_and_reports_why(door: Any, speculator: Any, why: str) -> None:
    result = await run(Source("a", "a", "a"), door, speculator)
    assert result.update.documents == (document("a"),)
    assert result.speculation is None
    assert (result.report.num_started, result.report.skipped_because) == (0, why)
    assert speculator is None or speculator.num_calls <= 1


# Speculators and speculations that fail


async def test_a_slow_speculator_runs_in_threads_and_delays_nothing() -> None:
    speculator = ScriptedSpeculator(takes_s=0.5)
    began_s = time.perf_counter()
    result = await run(Source("a", "b", "b"), ScriptedDoor(), speculator)
    assert time.perf_counter() - began_s < 0.4
    assert threading.get_ident() not in speculator.threads
    assert result.report.search_s < 0.3
    assert result.report.skipped_because is not None
    assert result.speculation is None
    join_starts()
    assert (speculator.num_calls, speculator.sent) == (2, []), "what came too late is not even sent"


async def test_final_documents_wait_a_moment_for_a_start_on_its_way() -> None:
    speculator = ScriptedSpeculator(takes_s=1.5 * STEP_S)
    result = await run(Source("a", "a"), ScriptedDoor(), speculator)
    assert result.speculation is speculator.sent[0]
    assert result.report.overlapped_search_s == 0.0, "it was sent when the search was over"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit("enough"), KeyboardInterrupt()], ids=repr)
async def test_whatever_a_speculator_raises_the_search_has_its_result(error: BaseException) -> None:
    result = await run(Source("a", "a", "a"), ScriptedDoor(), ScriptedSpeculator(error=error))
    assert result.documents == (document("a"),)
    assert result.report.skipped_because == f"the speculator raised {type(error).__name__}: {error}"


async def test_a_speculator_that_raises_is_queried_again_once_and_the_search_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    speculator = ScriptedSpeculator(error=KeyError("no such template"))
    with caplog.at_level(logging.WARNING, logger="ragcache"):
        result = await run(Source(*"aaaaaa"), ScriptedDoor(), speculator)
    assert speculator.num_calls == 2
    assert result.report.skipped_because == "the speculator raised KeyError: 'no such template'"
    assert "RC-SPECULATION-FAILED: no request was sent before the search ended: KeyError" in caplog.text


async def test_a_speculation_that_fails_in_the_engine_is_sent_again_when_there_is_room() -> None:
    speculator, source = ScriptedSpeculator(), Source(*"aaaaa")
    source.between[2] = lambda: speculator.sent[0].fail()
    result = await run(source, ScriptedDoor(), speculator)
    assert len(speculator.sent) == 2
    assert result.speculation is speculator.sent[1]
    assert (result.report.num_started, result.report.num_cancelled) == (2, 0)


@pytest.mark.parametrize("end", [Sent.fail, Sent.cancel], ids=["failed", "cancelled"])
async def test_a_speculation_that_died_unseen_is_not_confirmed(end: Callable[[Sent], None]) -> None:
    speculator, source = ScriptedSpeculator(), Source("a", "a", "a")
    source.between[2] = lambda: end(speculator.sent[0])
    result = await run(source, ScriptedDoor(), speculator)
    assert result.speculation is None
    assert not speculator.sent[0].is_confirmed
    assert not result.report.is_confirmed


# Bad sources


@pytest.mark.parametrize("source", [Source(), Source("a", "b", final=False)], ids=["nothing", "no final stage"])
async def test_a_source_without_final_documents_is_an_error(source: Source) -> None:
    speculator = ScriptedSpeculator()
    with pytest.raises(SearchError, match="ended without final documents"):
        await run(source, ScriptedDoor(), speculator)
    assert speculator.alive() == []


async def test_a_source_that_never_ends_is_a_time_out_and_leaves_nothing() -> None:
    speculator = ScriptedSpeculator()
    with pytest.raises(SearchTimeoutError, match="not final after 0.1 s: allow more time") as caught:
        await run(Source("a", ends=False), ScriptedDoor(), speculator, timeout_s=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert [sent.is_cancelled for sent in speculator.sent] == [True]


async def test_a_source_that_cancels_its_own_task_is_an_error_and_not_a_wait() -> None:
    async def updates() -> AsyncIterator[RetrievalUpdate]:
        yield update("a")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60.0)

    with pytest.raises(SearchError, match="cancelled by its source"):
        await asyncio.wait_for(run_pipeline(updates(), None, None), 5.0)


async def test_a_source_that_finds_more_than_it_was_asked_for_is_cut_at_the_first_documents() -> None:
    speculator, events = ScriptedSpeculator(), list[PipelineEvent]()
    result = await run(Source("aabcd", "abdc", "abacd"), ScriptedDoor(), speculator, on_event=events.append, k=2)
    assert result.documents == (document("a"), document("b"))
    assert len(result.update.scores) == 2
    assert speculator.shown() == [("a", "b")], "candidates that differ behind the cut are the same"
    assert {e.doc_ids for e in events} == {("a", "b")}


async def test_a_source_that_never_waits_and_never_ends_is_timed_out() -> None:
    async def updates() -> AsyncIterator[RetrievalUpdate]:
        while True:
            yield update("a")

    with pytest.raises(SearchTimeoutError, match=r"not final after 0\.1 s"):
        await asyncio.wait_for(run_pipeline(updates(), None, None, timeout_s=0.1), 30.0)


@pytest.mark.parametrize("timeout_s", [STEP_S, 60.0, None])
async def test_a_source_that_blocks_the_event_loop_is_named_where_it_broke_the_time_out(
    timeout_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def updates() -> AsyncIterator[RetrievalUpdate]:
        time.sleep(0.2)  # noqa: ASYNC251  (that is what is wrong with it)
        yield update("a", is_final=True)

    result = await run_pipeline(updates(), None, None, timeout_s=timeout_s)
    assert result.documents == (document("a"),)
    assert ("because something blocked the event loop" in caplog.text) == (timeout_s == STEP_S)


async def test_a_clean_up_that_hangs_delays_a_time_out_by_a_second_at_most(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.perf_counter()
    with pytest.raises(SearchTimeoutError, match="not final after 0.1 s"):
        await run_pipeline(_hanging(num_stages=1), None, None, timeout_s=0.1)
    assert time.perf_counter() - began_s < 2.0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert "closing a search took more than 1 s and was cut off: see how its source ends" in caplog.text


async def test_a_clean_up_that_hangs_does_not_keep_the_result_nor_a_consumer_that_left() -> None:
    result = await asyncio.wait_for(run_pipeline(_hanging(num_stages=2), None, None), 5.0)
    assert result.documents == (document("a"),)
    task = asyncio.create_task(run_pipeline(_hanging(num_stages=1), None, None))
    await asyncio.sleep(STEP_S)
    task.cancel()
    began_s = time.perf_counter()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - began_s < 2.0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ends", ["well", "late", "cancelled"])
async def test_a_clean_up_runs_to_its_end(ends: str) -> None:
    released = []

    async def updates() -> AsyncIterator[RetrievalUpdate]:
        try:
            yield update("a", is_final=ends != "late")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(STEP_S)
            released.append(True)

    async def listen(event: PipelineEvent) -> None:
        if ends == "cancelled":
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    began_s = time.perf_counter()
    search = run_pipeline(updates(), None, None, timeout_s=STEP_S, on_event=listen)
    if ends == "well":
        assert (await search).documents == (document("a"),)
    else:
        with pytest.raises(SearchTimeoutError if ends == "late" else asyncio.CancelledError):
            await search
    assert released == [True]
    assert time.perf_counter() - began_s < 0.5, "no longer than it takes"


async def test_what_a_clean_up_raises_is_logged_and_the_result_stands(caplog: pytest.LogCaptureFixture) -> None:
    async def updates() -> AsyncIterator[RetrievalUpdate]:
        try:
            yield update("a", is_final=True)
        finally:
            raise OSError("the connection was gone already")

    assert (await run_pipeline(updates(), None, None)).documents == (document("a"),)
    assert "a source of stages could not be closed" in caplog.text


async def test_what_is_no_document_is_an_error_with_its_hint() -> None:
    async def updates() -> AsyncIterator[Any]:
        yield replace(update("ab", 3), documents=(document("a"), None))

    with pytest.raises(SearchError, match="stage 3 of the search yielded None: yield Documents only"):
        await run_pipeline(updates(), None, None)


async def test_duplicates_count_once_with_the_first_score() -> None:
    speculator = ScriptedSpeculator()
    result = await run(Source("aba", "aab", "abb"), ScriptedDoor(), speculator)
    assert speculator.shown() == [("a", "b")]
    assert result.update.documents == (document("a"), document("b"))
    assert result.update.scores == (0.0, 1.0)


async def test_nothing_is_read_after_the_final_documents() -> None:
    async def updates() -> AsyncIterator[RetrievalUpdate]:
        yield update("a", is_final=True)
        raise AssertionError

    assert (await run_pipeline(updates(), None, None)).report.num_stages == 1


# Consumers


@pytest.mark.parametrize("after_steps", [0.5, 1.5, 2.5])
async def test_a_cancelled_consumer_leaves_nothing(after_steps: float) -> None:
    speculator, source = ScriptedSpeculator(takes_s=0.7 * STEP_S), Source("a", "b", "b", ends=False)
    task = asyncio.create_task(run(source, ScriptedDoor(), speculator))
    await asyncio.sleep(after_steps * STEP_S)
    num_before = speculator.num_calls
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(2 * STEP_S)
    assert speculator.num_calls == num_before
    await _until(lambda: speculator.alive() == [])


@pytest.mark.parametrize("kind", ["stage", "start", "cancel", "confirm"])
async def test_a_listener_that_raises_ends_the_search_and_all_it_led_to(kind: str) -> None:
    speculator = ScriptedSpeculator()

    async def listen(event: PipelineEvent) -> None:
        await asyncio.sleep(0)
        if event.kind == kind:
            raise RuntimeError("the page was left")

    with pytest.raises(RuntimeError, match="the page was left"):
        await run(Source("a", "b", "b"), ScriptedDoor(), speculator, on_event=listen)
    await _until(lambda: speculator.alive() == [])  # a thread may just be sending one


async def test_a_consumer_cancelled_at_the_last_moment_leaves_no_confirmed_speculation() -> None:
    speculator = ScriptedSpeculator()
    confirmed = asyncio.Event()

    async def listen(event: PipelineEvent) -> None:
        if event.kind == "confirm":
            confirmed.set()
            await asyncio.sleep(10)

    task = asyncio.create_task(run(Source(*"aaaaaaaaaa"), ScriptedDoor(), speculator, on_event=listen))
    async with asyncio.timeout(10):
        await confirmed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [sent.is_cancelled for sent in speculator.sent] == [True]


def test_a_loop_that_was_closed_does_not_disturb_what_was_sent() -> None:
    speculator = ScriptedSpeculator()
    result = asyncio.run(run(Source("a", "a"), ScriptedDoor(), speculator))
    assert result.speculation is not None
    speculator.sent[0].fail()
    gc.collect()


def test_a_fork_speculates_in_threads_of_its_own() -> None:
    def search() -> None:
        assert asyncio.run(run(Source("a", "a"), ScriptedDoor(), ScriptedSpeculator())).speculation is not None

    search()
    child = multiprocessing.get_context("fork").Process(target=search)
    child.start()
    child.join()
    assert child.exitcode == 0


async def test_many_searches_at_once_do_not_mix() -> None:
    speculators = [ScriptedSpeculator() for _ in range(20)]
    letters = "abcdefghijklmnopqrst"
    door = ScriptedDoor()
    results = await asyncio.gather(
        *(run_pipeline(Source("z", c, c, c).updates(), door, s) for c, s in zip(letters, speculators, strict=True))
    )
    for letter, speculator, result in zip(letters, speculators, results, strict=True):
        assert [d.doc_id for d in result.documents] == [letter]
        assert [s.doc_ids for s in speculator.alive()] == [(letter,)]
        assert result.speculation is speculator.alive()[0]


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(250):
        if holds():
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError("it did not come true")


async def _hanging(num_stages: int) -> AsyncGenerator[RetrievalUpdate]:
    """A search whose second stage is final, and whose clean-up never ends."""
    try:
        for stage in range(num_stages):
            yield update("a", stage, is_final=stage == 1)
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()
