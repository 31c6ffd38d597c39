"""What is stored in host memory and loaded from it, step by step, however late workers copy."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import LayerLoads
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadMetadata
from ragcache_core.vllm_plugin.other_connectors import ragcache_connector
from tests.engine.vllm_plugin.storing_scene import (
    BLOCK,
    FULL,
    WINDOW,
    Steps,
    host_scheduler,
    request,
    serve_at_random,
    tokens,
)


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("store_steps", [1, 2, 3])
def test_an_engine_comes_to_rest_however_late_a_store_ends(store_steps: int, is_async: bool) -> None:
    with host_scheduler(400, "1MiB", is_async=is_async) as scheduler:
        steps = Steps(scheduler, is_async, store_steps)
        for num_answers in range(1, 20):
            scheduler.add_request(request(f"r{num_answers}", tokens(num_answers, 40), num_answers))
            steps.rest()
            assert not scheduler.connector.copies.num_jobs
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
        assert not scheduler.connector.copies.num_jobs


@pytest.mark.parametrize(
    ("num_blocks", "host_bytes", "store_steps", "is_async"),  # each memory, delay and depth with each of the others
    [
        (24, "1MiB", 1, False),
        (24, "1MiB", 2, True),
        (24, "64KiB", 2, False),
        (24, "64KiB", 5, True),
        (60, "160KiB", 5, False),
        (60, "160KiB", 1, True),
    ],
)
def test_no_request_reads_kv_of_other_tokens_however_late_copies_are_made(
    num_blocks: int, host_bytes: str, store_steps: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = random.Random(0)
    monkeypatch.setattr(LayerLoads, "_is_better", lambda *_: choices.random() < 0.6)
    num_loaded = num_stored = num_layer_loads = 0
    for seed in range(4):
        with host_scheduler(num_blocks, host_bytes, is_async=is_async) as scheduler:
            steps = Steps(scheduler, is_async, store_steps)
            serve_at_random(scheduler, steps, random.Random(seed))
            num_loaded += scheduler._controller.counters.num_loaded_bytes
            num_stored += steps.num_stored
            num_layer_loads += steps.num_layer_loads
    assert num_loaded > 0
    assert num_stored > 100
    assert num_layer_loads > 0


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_what_is_stored_after_a_preemption_and_a_reset_is_of_the_blocks_in_use(is_async: bool) -> None:
    with host_scheduler(42, "1MiB", is_async=is_async) as scheduler:
        steps = Steps(scheduler, is_async)
        first, second = request("first", tokens(2, 200), 250), request("second", tokens(1, 300), 250)
        second.skip_reading_prefix_cache = True  # it computes again what it had stored
        scheduler.add_request(first)
        scheduler.add_request(second)
        while not second.num_preemptions:
            assert steps.step()
        while second.num_computed_tokens < 100:
            assert steps.step()
        scheduler.connector.reset_cache()
        steps.rest(max_steps=3000)
        assert second.num_output_tokens == 250


def rows_with_bytes(host: Any, rows: Iterable[int]) -> list[int]:
    view = host.get_kv_memoryview()
    memory = np.frombuffer(view, np.uint8).reshape(view.shape)
    return [row for row in rows if memory[row].any()]


@pytest.mark.parametrize("is_reset_first", [True, False], ids=["reset, forget", "forget, reset"])
def test_rows_that_are_being_written_when_all_is_reset_and_forgotten_hold_nothing_in_the_end(
    is_reset_first: bool,
) -> None:
    with host_scheduler(60, "1MiB") as scheduler:
        steps = Steps(scheduler, is_async=False, store_steps=50)  # far beyond the request's end
        scheduler.add_request(request("a", tokens(1, 200), 9))
        own = ragcache_connector(scheduler.connector)
        while not own.copies.num_jobs:
            assert steps.step()
        rows = [row for row in own._host.contents().values() if own._host._num_reads[row] < 0]
        acts = [scheduler.connector.reset_cache, partial(scheduler.act_on_cache, "purge", {})]
        for act in acts if is_reset_first else reversed(acts):
            act()
        assert scheduler.left()["num_blocks"] > 0
        steps.rest()
        assert scheduler.left()["num_blocks"] == 0
        assert rows_with_bytes(own._host, rows) == []


@pytest.mark.parametrize("layerwise_loads", [False, True])
def test_kv_that_is_being_loaded_when_all_is_reset_and_forgotten_is_not_overwritten(layerwise_loads: bool) -> None:
    with host_scheduler(30, "1MiB", layerwise_loads=layerwise_loads) as scheduler:
        steps = Steps(scheduler, is_async=False)
        for name, seed, count in (("other", 9, 100), ("first", 1, 200)):
            scheduler.add_request(request(name, tokens(seed, count), 2))
            steps.rest()
        scheduler.reset_prefix_cache()  # the GPU's alone
        scheduler.add_request(request("again", tokens(1, 200), 2))
        num_loads = 0
        for _ in range(5):
            output = scheduler.schedule()
            steps.num += 1
            meta = output.kv_connector_metadata
            if meta.load_jobs or isinstance(meta, LayerLoadMetadata):
                num_loads += 1
                scheduler.connector.reset_cache()
                scheduler.act_on_cache("purge", {})
            steps._update(output, steps._run(output))
        assert num_loads == 1
        steps.rest()


def serve(scheduler: Any) -> Steps:
    """Serve twenty requests whose documents do not fit into the engine's memory together."""
    steps = Steps(scheduler, is_async=False)
    for number in range(20):
        scheduler.add_request(request(f"r{number}", tokens(number % 5, 100), 30))
        for _ in range(4):
            steps.step()
    steps.rest()
    return steps


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full attention", "a window"])
def test_host_memory_without_room_is_asked_for_few_blocks_until_the_request_ends(
    groups: tuple[KVCacheSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with host_scheduler(400, "1MiB", groups=groups, retained_share=1.0) as scheduler:
        tiers = ragcache_connector(scheduler.connector).tiers
        offered: list[int] = []
        monkeypatch.setattr(tiers, "prepare_store", lambda keys, context: offered.append(len(keys)))
        steps = Steps(scheduler, is_async=False)
        metadata = {"ragcache": {"retain_s": 60.0}}  # so that its answer is stored, too
        scheduler.add_request(request("long", tokens(1, 70), 900, params=metadata))
        for _ in range(890):
            steps.step()
        num_blocks = 960 // BLOCK * len(groups)
        assert num_blocks // 2 < sum(offered) <= 3 * num_blocks
        monkeypatch.undo()
        steps.rest()
        host = scheduler._controller.tree.tiers[Tier.HOST]
        assert host.num_units >= 950 // BLOCK, "the end of the request stores what had no room"


def test_what_is_stored_is_counted_once() -> None:
    with host_scheduler(400, "1MiB") as scheduler:
        steps = serve(scheduler)
        counters = scheduler._controller.counters
        block_bytes = scheduler._controller.tiers[Tier.GPU].block_bytes
        assert steps.num_stored >= 5 * 6
        assert counters.num_stored_bytes == steps.num_stored * block_bytes


def test_what_the_offloading_counts_is_not_sent_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.connector.gpu_connector._REPORT_EVERY_S", 3600.0)
    with host_scheduler(400, "1MiB") as scheduler:
        stats, said = scheduler.connector.get_kv_connector_stats, []

        def listen() -> Any:
            said.append(stats())
            return said[-1]

        monkeypatch.setattr(scheduler.connector, "get_kv_connector_stats", listen)
        steps = serve(scheduler)
        num_logged = sum(bool(answer and answer.data["offload"]) for answer in said)
        assert 1 <= num_logged < steps.num / 10


@pytest.mark.parametrize("emits_events", [True, False])
def test_block_events_of_vllm_are_emitted_only_where_they_are_published(
    emits_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host_scheduler(40, "1MiB", emits_events) as scheduler:
        copies, asked = scheduler.connector.copies, []
        take = copies.take_events

        def listen() -> Iterable[Any]:
            asked.append(list(take()))
            return asked[-1]

        monkeypatch.setattr(copies, "take_events", listen)
        steps = serve(scheduler)
        assert len(asked) == (steps.num if emits_events else 0)
        assert any(asked) == emits_events
