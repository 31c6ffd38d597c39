"""What a question found last is a stage before all others when it is asked again: a guess that is never in the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from ragcache_core.client.pipeline.histories import CACHED_RESULT_STAGE, RecentQuestions
from ragcache_core.client.pipeline.run import run_pipeline
from ragcache_core.errors import UnknownDocumentError
from ragcache_core.speculation import StageStabilityStats
from ragcache_core.types import Document, RetrievalUpdate
from tests.unit.client.pipeline_scene import STEP_S, ScriptedDoor, ScriptedSpeculator, document, join_starts, update

SEARCH_S = 2 * STEP_S

Shown = list[tuple[int, str, bool]]


class Store:
    """Answers with ``finds`` after its time, in one stage; documents are read at once unless they are gone."""

    def __init__(self, finds: str = "ab", takes_s: float = SEARCH_S) -> None:
        self.finds, self.takes_s = finds, takes_s
        self.gone: set[str] = set()
        self.reading_takes_s = 0.0
        self.num_running = 0
        self.texts: dict[str, str] = {}

    async def search(self) -> AsyncGenerator[RetrievalUpdate, None]:
        self.num_running += 1
        try:
            await asyncio.sleep(self.takes_s)  # the search
            yield update(self.finds, is_final=True)
        finally:
            self.num_running -= 1

    def read(self, doc_ids: Sequence[str]) -> list[Document]:
        time.sleep(self.reading_takes_s)  # a store far away
        if lost := self.gone & set(doc_ids):
            raise UnknownDocumentError(f"{lost} are gone")
        return [Document(i, self.texts[i]) if i in self.texts else document(i) for i in doc_ids]


async def ask(recent: RecentQuestions, store: Store, question: str = "Who?") -> Shown:
    async with aclosing(recent.stages(store.search(), question, store.read)) as updates:
        return [(u.stage, "".join(d.doc_id for d in u.documents), u.is_final) async for u in updates]


FIRST: Shown = [(0, "ab", True)]
AGAIN: Shown = [(CACHED_RESULT_STAGE, "ab", False), (0, "ab", True)]


async def test_a_question_that_was_asked_before_has_its_documents_before_they_are_searched() -> None:
    recent, store = RecentQuestions(), Store()
    assert await ask(recent, store) == FIRST
    assert await ask(recent, store) == AGAIN
    assert await ask(recent, store, "Where?") == FIRST


async def test_what_the_search_finds_is_final_and_is_what_is_recalled_the_next_time() -> None:
    recent, store = RecentQuestions(), Store()
    await ask(recent, store)
    store.finds = "cd"
    assert await ask(recent, store) == [(CACHED_RESULT_STAGE, "ab", False), (0, "cd", True)]
    assert await ask(recent, store) == [(CACHED_RESULT_STAGE, "cd", False), (0, "cd", True)]


async def test_a_deleted_document_is_no_candidate_and_a_changed_one_is_shown_as_it_is_now() -> None:
    recent, store = RecentQuestions(), Store()
    await ask(recent, store)
    store.texts["b"] = "new"
    async with aclosing(recent.stages(store.search(), "Who?", store.read)) as updates:
        first = await anext(updates)
    assert [d.text for d in first.documents] == ["text of a", "new"]
    store.gone = {"b"}
    assert await ask(recent, store) == FIRST


async def test_a_quick_search_is_preceded_by_nothing() -> None:
    recent, store = RecentQuestions(), Store(takes_s=0.0)
    await ask(recent, store)
    assert await ask(recent, store) == FIRST
    store.takes_s = SEARCH_S
    assert await ask(recent, store) == FIRST
    assert await ask(recent, store) == AGAIN


async def test_what_is_read_later_than_it_is_found_is_left_out_and_holds_nothing_up() -> None:
    recent, store = RecentQuestions(), Store()
    await ask(recent, store)
    store.reading_takes_s = 50 * STEP_S
    began_s = time.perf_counter()
    assert await ask(recent, store) == FIRST
    assert time.perf_counter() - began_s < 25 * STEP_S


@pytest.mark.parametrize("num_read", [0, 1, 2])
async def test_a_cancelled_client_leaves_no_search(num_read: int) -> None:
    recent, store = RecentQuestions(), Store()
    await ask(recent, store)
    updates = recent.stages(store.search(), "Who?", store.read)
    for _ in range(num_read):
        await anext(updates)
    await updates.aclose()
    assert store.num_running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_search_that_fails_fails_as_it_would_without() -> None:
    recent, store = RecentQuestions(), Store()
    await ask(recent, store)

    async def failing() -> AsyncGenerator[RetrievalUpdate, None]:
        await asyncio.sleep(STEP_S)  # so that what is recalled comes first
        raise ValueError("the index is broken")
        yield

    with pytest.raises(ValueError, match="broken"):
        async for _ in recent.stages(failing(), "Who?", store.read):
            pass


async def test_only_the_last_thousand_questions_are_remembered() -> None:
    recent, store = RecentQuestions(), Store(takes_s=0.0)
    for number in range(1025):
        await ask(recent, store, str(number))
    store.takes_s = SEARCH_S
    await ask(recent, store, "slow")
    assert await ask(recent, store, "0") == FIRST
    assert await ask(recent, store, "1000") == AGAIN


async def test_an_engine_answers_a_repeated_question_while_its_search_of_one_stage_goes_on() -> None:
    recent, store, history, speculator = RecentQuestions(), Store(), StageStabilityStats(), ScriptedSpeculator()
    for is_again in (False, True):
        updates = recent.stages(store.search(), "Who?", store.read)
        result = await run_pipeline(updates, ScriptedDoor(), speculator, history=history)
        assert result.report.is_confirmed == is_again
    assert result.report.overlapped_search_s > SEARCH_S / 3
    for letter in "cdef":
        store.finds = letter
        await run_pipeline(
            recent.stages(store.search(), "Who?", store.read), ScriptedDoor(), speculator, history=history
        )
    assert not history.is_worthwhile(CACHED_RESULT_STAGE, is_idle=False), "a store that changes all the time is seen to"
    join_starts()
