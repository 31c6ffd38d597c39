"""What is put off to a lull is done when there is none any more, and when somebody waits for it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.offload.compat import can_be_put_off
from ragcache_core.vllm_plugin.offload.host_index import HostIndex
from tests.engine.vllm_plugin.storing_scene import BLOCK, Steps, host_scheduler, request


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 900), k=count)


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("store_steps", [1, 2, 3])
def test_an_engine_comes_to_rest_however_late_a_store_ends(store_steps: int, is_async: bool) -> None:
    with host_scheduler(400, "1MiB", is_async=is_async) as scheduler:
        steps = Steps(scheduler, is_async, store_steps)
        for num_answers in range(1, 20):
            scheduler.add_request(request(f"r{num_answers}", tokens(num_answers, 40), num_answers))
            steps.rest()
            assert scheduler.connector._ended == []
            assert not scheduler.connector.scheduler._jobs
        assert scheduler._controller.tree.tiers[Tier.HOST].num_units >= 19 * 2


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("num_answers", [1, 2, 3, 4])
def test_a_request_that_waits_for_a_store_of_another_gets_it(num_answers: int, is_async: bool) -> None:
    shared = tokens(1, 40)
    with host_scheduler(12, "1MiB", is_async=is_async) as scheduler:
        steps = Steps(scheduler, is_async, store_steps=50)
        scheduler.add_request(request("first", shared, 1))
        for _ in range(3):
            steps.step()
        # it takes blocks of the first, whose store has to end before
        scheduler.add_request(request("large", tokens(2, 150), num_answers, params={"max_offload_tokens": 0}))
        steps.step()
        again = request("again", shared, 2)
        scheduler.add_request(again)
        steps.rest()
        assert again.num_output_tokens == 2
        assert not scheduler.requests
        assert not scheduler.connector.scheduler._jobs


@pytest.mark.parametrize(("host_bytes", "is_full"), [("1MiB", False), ("96KiB", True)])
def test_what_was_stored_gives_way_at_once_where_host_memory_is_full(host_bytes: str, is_full: bool) -> None:
    with host_scheduler(400, host_bytes) as scheduler:
        steps = Steps(scheduler, is_async=False)
        put_off: list[bool] = []
        for seed in range(20):
            scheduler.add_request(request(f"r{seed}", tokens(seed, 60), 20))
            while steps.step():
                put_off.append(bool(scheduler.connector._ended))
        assert any(put_off[-40:]) != is_full


def test_without_lulls_what_ended_is_taken_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vLLM's own scheduler."""
    with host_scheduler(400, "1MiB") as scheduler:
        connector = scheduler.connector
        monkeypatch.setattr(connector, "use_lull", lambda: None)
        take_in, ended = connector.update_connector_output, []

        def listen(output: Any) -> None:
            take_in(output)
            ended.append(bool(output.kv_connector_worker_meta))
            assert connector._ended == []

        monkeypatch.setattr(connector, "update_connector_output", listen)
        scheduler.add_request(request("r", tokens(1, 40), 40))
        Steps(scheduler, is_async=False).rest()
        assert any(ended)
        assert not connector.scheduler._jobs


def test_what_was_stored_before_the_end_of_an_engine_is_noted_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed: list[int] = []
    monkeypatch.setattr(HostIndex, "seal", lambda self, chunk, *note: sealed.append(chunk))
    with host_scheduler(400, "1MiB") as scheduler:
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("r", tokens(1, 40), 40))
        while not scheduler.connector._ended:
            assert steps.step()
        scheduler.connector._policy.journal = HostIndex.__new__(HostIndex)
        monkeypatch.setattr(HostIndex, "close", lambda self: sealed.append(-1))
    assert sealed[-1] == -1
    assert len(sealed) > 1


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("store_steps", [1, 2, 5])
@pytest.mark.parametrize(("num_blocks", "host_bytes"), [(24, "1MiB"), (24, "64KiB"), (60, "160KiB")])
def test_no_request_reads_kv_of_other_tokens_however_late_copies_are_made(
    num_blocks: int, host_bytes: str, store_steps: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off: list[bool] = []

    def listen(*step: Any) -> bool:
        put_off.append(can_be_put_off(*step))
        return put_off[-1]

    monkeypatch.setattr("ragcache_core.vllm_plugin.offload.store_planner.can_be_put_off", listen)
    num_loaded = num_stored = 0
    for seed in range(4):
        dice = random.Random(seed)
        documents = [tokens(100 + i, dice.randrange(20, 70)) for i in range(6)]
        with host_scheduler(num_blocks, host_bytes, is_async=is_async) as scheduler:
            steps = Steps(scheduler, is_async, store_steps)
            for number in range(120):
                words = [*dice.choice(documents), *dice.choice(documents), *tokens(number, 9)]
                scheduler.add_request(request(f"r{number}", words, dice.randrange(1, 40)))
                for _ in range(dice.randrange(6)):
                    steps.step()
                if number % 7 == 3 and scheduler.requests:
                    scheduler.finish_requests(dice.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
                if number % 50 == 30:
                    scheduler.connector.reset_cache()
            steps.rest(max_steps=5000)
            assert not scheduler.requests
            assert not scheduler.connector.scheduler._req_status
            assert not any(chunk.ref_cnt for chunk in scheduler.connector._policy._chunks.values())
            num_loaded += scheduler._controller.counters.num_loaded_bytes
            num_stored += steps.num_stored
    assert num_loaded > 0
    assert num_stored > 100
    assert any(put_off)
    assert not all(put_off)


def test_a_chunk_that_a_request_left_is_stored_before_its_block_is_written_to() -> None:
    """It ended with a full block that was never looked at, and the next one gets that block."""
    with host_scheduler(400, "1MiB") as scheduler:
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("r", tokens(1, BLOCK * 2), 1))
        for _ in range(2):
            steps.step()
        state = scheduler.connector.scheduler._req_status["r"]
        step = SimpleNamespace(
            total_num_scheduled_tokens=3,
            preempted_req_ids=None,
            finished_req_ids={"r"},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), new_block_ids=[None, ([7],)]),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        assert can_be_put_off(scheduler.connector, step)
        state.group_states[0].next_stored_chunk_idx = 1
        assert not can_be_put_off(scheduler.connector, step)
        state.group_states[0].next_stored_chunk_idx = 2
        scheduler.connector.scheduler._block_id_to_pending_jobs[7] = {1}
        assert not can_be_put_off(scheduler.connector, step)
        scheduler.connector.scheduler._block_id_to_pending_jobs.clear()
        resumed = SimpleNamespace(resumed_req_ids={"other"}, new_block_ids=[([7],)])
        for changed in (
            {"preempted_req_ids": {"r"}},
            {"total_num_scheduled_tokens": 0},
            {"scheduled_cached_reqs": resumed},
            {"kv_cache_block_copies": [7]},
        ):
            assert not can_be_put_off(scheduler.connector, SimpleNamespace(**{**vars(step), **changed}))
        steps.rest()


def test_a_step_that_was_put_off_is_looked_into_before_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_scheduler(400, "1MiB") as scheduler:
        connector = scheduler.connector
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("r", tokens(1, 40), 40))
        with monkeypatch.context() as patched:
            patched.setattr(connector, "use_lull", lambda: None)
            steps.step()
        assert connector._storing.is_behind
        assert connector.has_pending_push_work()
        connector.reset_cache()
        offloading, late = connector.scheduler, connector._storing._late
        assert connector._storing._put_off is None
        assert late.store_jobs
        assert max(late.store_jobs) < offloading._stale_job_threshold
        assert late.store_jobs.keys() <= offloading._current_batch_jobs_to_flush
        steps.rest()
        assert not connector.scheduler._jobs
        again = request("again", tokens(1, 40), 2)
        scheduler.add_request(again)
        steps.rest()
        assert again.num_output_tokens == 2


def test_a_step_that_was_put_off_is_looked_into_before_what_ended_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended goes on to the disk, where something gives way for it: not what a lookup of that step has found."""
    with host_scheduler(400, "1MiB") as scheduler:
        connector = scheduler.connector
        steps, order = Steps(scheduler, is_async=False, store_steps=2), []
        look, complete = connector._storing._look_into, connector.scheduler.manager.complete_store
        monkeypatch.setattr(connector._storing, "_look_into", lambda step: [order.append("look"), look(step)][1])
        monkeypatch.setattr(
            connector.scheduler.manager, "complete_store", lambda *ended: [order.append("end"), complete(*ended)][1]
        )
        monkeypatch.setattr(connector, "use_lull", lambda: None)
        for number in range(8):
            scheduler.add_request(request(f"r{number}", tokens(number, 60), 3))
        in_update = []
        while True:
            output_of = scheduler.update_from_output

            def update(*step: Any, output_of: Any = output_of) -> Any:
                order.clear()
                outputs = output_of(*step)
                in_update.append(list(order))
                return outputs

            with monkeypatch.context() as patched:
                patched.setattr(scheduler, "update_from_output", update)
                if not steps.step():
                    break
        both = [seen for seen in in_update if "look" in seen and "end" in seen]
        assert both
        assert all(seen[0] == "look" for seen in both)
