"""What the engine says of its room for speculation, at once and when it is idle again; who may stop its steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ragcache_core.vllm_plugin.scheduler import scheduler
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeFreeBlockQueue
from tests.engine.vllm_plugin.scheduler_scene import Stage


@pytest.mark.parametrize("is_gpu", [False, True])
def test_there_is_room_where_a_speculation_would_be_admitted_now(is_gpu: bool) -> None:
    stage = Stage(is_gpu=is_gpu, is_async=is_gpu, settings={"max_prefill_bs": 2})
    assert stage.controller.has_room()
    stage.ask("A", num_answers=20)
    assert not stage.controller.has_room(), "it waits"
    for _ in range(3):
        stage.step()
    assert stage.controller.has_room() == is_gpu, "beside an answer"
    stage.finish_all()
    assert stage.controller.has_room()
    stage.ask("BCDE", speculation="s1", num_answers=20)
    assert stage.controller.has_room()
    stage.step()
    assert stage.controller.has_room()
    loaded = stage.ask("FG", speculation="s2", is_loaded=True)
    assert not stage.controller.has_room(), "that one waits and takes it"
    stage.step()
    assert stage.requests[loaded].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not stage.controller.has_room()
    stage.finish_all()
    assert stage.controller.has_room()


@pytest.mark.parametrize(
    ("num_blocks", "max_num_batched_tokens", "most"),
    [(400, 1024, 4), (400, 300, 1), (60, 1024, 3), (60, 2048, 3)],
    ids=["step", "short step", "small GPU, step", "small GPU"],
)
def test_speculations_run_up_to_a_step_of_the_engine_and_what_its_gpu_holds(
    num_blocks: int, max_num_batched_tokens: int, most: int
) -> None:
    """Each prompt has 324 tokens; a GPU of 60 blocks holds 960."""
    stage = Stage(num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens)
    for number, documents in enumerate(("AB", "CD", "EF", "GH", "IJ", "KL"), start=1):
        assert stage.controller.has_room() == (number <= most)
        stage.ask(documents, speculation=f"s{number}", num_answers=30)
    for _ in range(6):
        assert len(stage.step()) <= most
        assert len(stage.scheduler.running) <= most
    assert not stage.controller.has_room()
    stage.finish_all()
    assert stage.controller.has_room()


def test_a_prompt_longer_than_a_step_is_speculated_on_alone() -> None:
    stage = Stage(max_num_batched_tokens=128)
    stage.ask("AB", speculation="s1", num_answers=3)
    stage.ask("CD", speculation="s2", num_answers=3)
    while stage.scheduler.has_unfinished_requests():
        assert len(stage.step()) <= 1
    assert [len(answer) for answer in stage.answers.values()] == [3, 3]


@pytest.mark.parametrize("ends_by", ["answer", "abort"])
def test_the_room_is_reported_when_it_changes_and_when_the_engine_is_idle_again(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    said: list[bool] = []
    stats = stage.scheduler.connector.get_kv_connector_stats

    def listen() -> Any:
        answer = stats()
        if answer is not None and answer.data["has_room"] is not None:
            said.append(answer.data["has_room"])
        return answer

    monkeypatch.setattr(stage.scheduler.connector, "get_kv_connector_stats", listen)
    request_id = stage.ask("A", num_answers=20)
    stage.step()
    stage.step()
    assert said == [False]
    if ends_by == "abort":
        stage.abort(request_id)
        assert stage.scheduler.has_requests(), "vLLM makes one more step, in which it is said"
        stage.step()
    stage.finish_all()
    assert said == [False, True]


def test_what_an_engine_core_of_its_own_has_made_is_frozen_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps: list[int] = []
    monkeypatch.setattr(scheduler, "freeze_survivors", lambda: num_steps.append(1))
    stage = Stage()
    stage.ask("A")
    stage.finish_all()
    assert not num_steps, "in an application's process are its objects, too"
    monkeypatch.setattr(scheduler, "parent_process", object)
    stage = Stage()
    stage.ask("A")
    stage.finish_all()
    assert len(num_steps) == len(stage.steps)


def test_a_request_that_has_ended_needs_no_collector() -> None:
    """A cycle that was frozen while it lived would stay for good."""
    stage = Stage()
    request_id = stage.ask("A")
    gc.collect()
    gc.disable()
    try:
        stage.finish_all()
        ended = weakref.ref(stage.requests.pop(request_id))
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_structured", [False, True])
def test_the_tokens_of_a_structured_answer_do_not_wait_for_blocks_to_be_placed(
    is_structured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    stage.ask("A", num_answers=1)
    stage.step()
    stage.ask("B")
    placed: list[int] = []
    place = TreeFreeBlockQueue.place_returned
    monkeypatch.setattr(TreeFreeBlockQueue, "place_returned", lambda queue: (placed.append(1), place(queue))[1])
    monkeypatch.setattr(Scheduler, "get_grammar_bitmask", lambda *args: object() if is_structured else None)
    output = stage.scheduler.schedule()
    placed.clear()
    stage.scheduler.get_grammar_bitmask(output)
    assert bool(placed) is not is_structured


def test_which_documents_are_cached_is_reported_from_one_question_to_the_next() -> None:
    stage = Stage()
    stage.ask("AB")
    stage.finish_all()
    first = stage.scheduler.cached_paths("")
    stage.ask("AC", salt="a tenant's")
    stage.ask("BA")
    stage.finish_all()
    second = stage.scheduler.cached_paths(first["cursor"])
    assert [sorted("".join(path) for _, path, *_ in said["changes"]) for said in (first, second)] == [
        ["A", "AB"],
        ["B", "BA"],
    ]


def test_an_idle_engine_that_steps_for_nothing_but_copies_says_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.ask("A")
    stage.finish_all()
    asked: list[int] = []
    monkeypatch.setattr(stage.scheduler.connector, "_stats_below", lambda: asked.append(1))
    assert [stage.scheduler.connector.get_kv_connector_stats() for _ in range(50)] == [None] * 50
    assert asked == []
    monkeypatch.setattr(stage.scheduler.connector, "_num_copies", lambda: 3)
    assert [stage.scheduler.connector.get_kv_connector_stats() for _ in range(50)] == [None] * 50
    assert asked == [1], "vLLM's gauges of them would stay as they were"
    asked.clear()
    stage.controller.record_change()
    stats = stage.scheduler.connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["engine"] is not None, "what happens meanwhile is told at once"
    assert asked == [1]
