"""Ours as a child of vLLM's MultiConnector: who loads, what is stored, and what is said of it. The scheduler's side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from ragcache_core.client.launch import arguments
from ragcache_core.config import OWN_CONNECTORS
from ragcache_core.errors import ConfigError
from ragcache_core.types import Origin, Tier
from ragcache_core.vllm_plugin import connector, other_connectors, release
from ragcache_core.vllm_plugin.compat import broadcast_to_api_servers
from ragcache_core.vllm_plugin.connector import minimal
from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from ragcache_core.vllm_plugin.other_connectors import ragcache_connector
from ragcache_core.vllm_plugin.scheduler.own import own_scheduler
from tests.engine.vllm_plugin.other_connector import KeepingConnector
from tests.engine.vllm_plugin.scheduler_scene import scheduler_of
from tests.engine.vllm_plugin.storing_scene import (
    BLOCK,
    Steps,
    engine_config,
    host_scheduler,
    request,
    serve_at_random,
    tokens,
)
from tests.support.waiting import until

OTHER = {"kv_connector": "KeepingConnector", "kv_connector_module_path": KeepingConnector.__module__}


@pytest.fixture(autouse=True)
def _keeps_nothing() -> None:
    KeepingConnector.kept.clear()
    KeepingConnector.finished.clear()
    KeepingConnector.num_loaded = 0


@contextmanager
def two_connectors(
    num_blocks: int = 60, host_bytes: str = "1MiB", *, loads_async: bool = False, **settings: Any
) -> Iterator[Any]:
    """Yield our scheduler with another connector before ours."""
    other = {**OTHER, "kv_connector_extra_config": {"is_async": loads_async}}
    with host_scheduler(num_blocks, host_bytes, connectors=(other,), **settings) as scheduler:
        assert isinstance(scheduler.connector, MultiConnector)
        assert isinstance(ragcache_connector(scheduler.connector), RAGCacheConnector)
        yield scheduler


@pytest.mark.parametrize("loads_async", [False, True], ids=["loads in a step", "loads before"])
@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_no_request_reads_kv_of_other_tokens_with_any_connector(is_async: bool, loads_async: bool) -> None:
    num_loaded = num_loaded_by_other = num_preempted = 0
    for seed in range(3):
        with two_connectors(24, "160KiB", loads_async=loads_async, is_async=is_async) as scheduler:
            steps = Steps(scheduler, is_async, store_steps=2)
            asked = serve_at_random(scheduler, steps, random.Random(seed))
            assert steps.num_stored > 30
            num_loaded += scheduler._controller.counters.num_loaded_bytes
            num_loaded_by_other += KeepingConnector.num_loaded
        assert len(KeepingConnector.finished) == 120 * (seed + 1), "the other is told of every request"
        num_preempted += sum(each.num_preemptions for each in asked)
    assert num_loaded > 0
    assert num_loaded_by_other > 0
    assert num_preempted > 0


@dataclass
class LoadsFail(Steps):
    """Steps: some that load from the other connector read nothing, and say so at their end.

    What is computed on that is nonsense, until the scheduler has heard of it: from then on no request may read it.
    """

    fails: Callable[[], bool] = lambda: True
    num_failed: int = 0
    _unsaid: dict[int, set[int]] = field(default_factory=dict)

    def _run(self, output: Any) -> Any:
        loads = output.kv_connector_metadata.metadata[0].loads
        failed = set(loads) if loads and self.fails() else set()
        if failed:
            self.num_failed += 1
            self._unsaid[self.num] = failed
            loads.update(dict.fromkeys(failed, (0, -1, self.num)))
        ran = super()._run(output)
        if failed:
            said = ran.kv_connector_output or KVConnectorOutput()
            ran.kv_connector_output = replace(said, invalid_block_ids=failed)
        return ran

    def _compute(self, output: Any) -> None:
        wrong: dict[str, tuple[int, ...]] = {}
        nonsense = {(0, -1, step) for step in self._unsaid}
        written: dict[str, list[int]] = {}
        for _ in output.num_scheduled_tokens:  # one may read what another computes in this very step
            for name, num_tokens in output.num_scheduled_tokens.items():
                (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
                end = self.scheduler.requests[name].num_computed_tokens
                first = (end - num_tokens) // BLOCK
                if name not in wrong and (read := nonsense.intersection(map(self._engine.get, blocks[:first]))):
                    wrong[name], written[name] = max(read), blocks[first : -(-end // BLOCK)]
                    self._engine.update(dict.fromkeys(written[name], wrong[name]))
        right = {name: num for name, num in output.num_scheduled_tokens.items() if name not in wrong}
        super()._compute(replace(output, num_scheduled_tokens=right))
        for name, what in wrong.items():
            self._engine.update(dict.fromkeys(written[name], what))

    def _update(self, output: Any, ran: Any) -> None:
        super()._update(output, ran)
        if ran.kv_connector_output is not None and (said := ran.kv_connector_output.invalid_block_ids):
            self._unsaid = {step: failed for step, failed in self._unsaid.items() if failed is not said}


@pytest.fixture
def disk(tmp_path: Path, identity: None) -> dict[str, Any]:
    """Return the settings of a disk below host memory."""
    return {"disk_bytes": "1MiB", "directory": tmp_path}


def test_what_another_connector_failed_to_load_is_not_stored() -> None:
    shared = tokens(1, 64)
    with two_connectors() as scheduler:
        steps = LoadsFail(scheduler, is_async=False)
        scheduler.add_request(request("first", [*shared, *tokens(2, 9)], 2))
        steps.rest()
        assert KeepingConnector.kept
        scheduler.connector.reset_cache()
        scheduler.reset_prefix_cache()
        again = request("again", [*shared, *tokens(3, 9)], 4)
        scheduler.add_request(again)
        steps.rest()
        assert steps.num_failed == 1
        assert again.num_output_tokens == 4
        assert not scheduler._controller.tree.tiers[Tier.HOST].num_units
        KeepingConnector.kept.clear()
        scheduler.add_request(request("later", [*shared, *tokens(4, 9)], 1))
        steps.rest()
        assert scheduler._controller.tree.tiers[Tier.HOST].num_units >= len(shared) // BLOCK, "computed, then stored"


def test_a_read_from_disk_gets_no_memory_that_a_failed_store_still_writes_to(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others, ours = tokens(1, 64), tokens(2, 64)
    with two_connectors(**disk) as scheduler:
        steps = LoadsFail(scheduler, is_async=False, store_steps=3)
        copy = steps._store
        late_s = 0.0
        monkeypatch.setattr(steps, "_store", lambda jobs: (time.sleep(late_s if jobs else 0.0), copy(jobs)))
        scheduler.add_request(request("first", [*ours, *tokens(3, 9)], 1))
        assert until(lambda: rests(steps))
        KeepingConnector.kept.clear()
        KeepingConnector.kept.update(tuple(others[:end]) for end in range(BLOCK, len(others) + 1, BLOCK))
        with scheduler.keeping_weights():
            scheduler.connector.reset_cache()
        scheduler.reset_prefix_cache()
        scheduler.add_request(request("failing", [*others, *tokens(4, 9)], 4))
        steps.step()
        assert steps.num_failed == 1
        late_s = 0.1  # after a read that begins with the same step has ended
        scheduler.add_request(request("reading", [*ours, *tokens(5, 9)], 4))
        assert until(lambda: rests(steps))
        assert scheduler._controller.counters.num_tokens_by_tier[Origin.DISK] == len(ours)


def fails(dice: random.Random) -> bool:
    return dice.random() < 0.6


def has_fewer_than(number: int, steps: Steps) -> bool:
    """Return whether so few requests are left, after some steps."""
    return any(len(steps.scheduler.requests) < number or not steps.step() for _ in range(50))


def rests(steps: Steps) -> bool:
    """Return whether there is nothing to do, after some steps."""
    return not any(steps.step() for _ in range(50))


@pytest.mark.parametrize("loads_async", [False, True], ids=["loads in a step", "loads before"])
@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_no_request_reads_what_could_not_be_loaded_from_whichever_tier(
    is_async: bool, loads_async: bool, disk: dict[str, Any]
) -> None:
    documents = [tokens(100 + i, 20 + 9 * i) for i in range(6)]
    num_failed = num_from_disk = 0
    num_blocks, most = 40, 3  # of 11 blocks: vLLM waits for ever where requests whose loads failed fill its memory
    for seed, host_bytes in enumerate(("40KiB", "160KiB")):
        dice = random.Random(seed)
        with two_connectors(num_blocks, host_bytes, loads_async=loads_async, is_async=is_async, **disk) as scheduler:
            steps = LoadsFail(scheduler, is_async, dice.choice((1, 2, 3)), fails=partial(fails, dice))
            for number in range(120):
                words = [*dice.choice(documents), *dice.choice(documents), *tokens(number, 9)]
                assert until(partial(has_fewer_than, most, steps), 60.0)
                scheduler.add_request(request(f"r{number}", words, dice.randrange(1, 30)))
                if number % 4 == 1:
                    nobodys = [*dice.choice(documents), *dice.choice(documents)]
                    scheduler.prefetch(request(f"p{number}", nobodys, 1))
                for _ in range(dice.randrange(6)):
                    steps.step()
                if number % 5 == 3 and scheduler.requests:
                    ended = dice.choice(list(scheduler.requests))
                    scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)
                if number % 9 == 5:
                    KeepingConnector.kept.clear()
            assert until(partial(rests, steps), 60.0)
            own = ragcache_connector(scheduler.connector)
            assert not scheduler.requests
            assert not own.copies.num_requests
            assert not any(own._host._num_reads[row] for row in own._host.contents().values())
            num_failed += steps.num_failed
            num_from_disk += scheduler._controller.counters.num_tokens_by_tier[Origin.DISK]
    assert num_failed > 0 or loads_async, "there is too much memory for many loads"
    assert num_from_disk > 0
    assert not [name for name in KeepingConnector.finished if name.startswith("p")], "which are no requests"


def test_what_ours_finds_counts_as_ours_and_what_the_other_finds_does_not() -> None:
    shared, found = tokens(1, 64), []
    with two_connectors() as scheduler:
        steps = Steps(scheduler, is_async=False)
        for i, name in enumerate(("first", "ours", "others")):
            scheduler.reset_prefix_cache()
            if name == "ours":
                KeepingConnector.kept.clear()
            if name == "others":
                KeepingConnector.kept.update(tuple(shared[:end]) for end in range(BLOCK, len(shared) + 1, BLOCK))
            scheduler.add_request(request(name, [*shared, *tokens(10 + i, 9)], 1))
            steps.rest()
            found.append((scheduler._controller.counters.num_tokens_by_tier[Origin.HOST], KeepingConnector.num_loaded))
    assert found == [(0, 0), (64, 0), (64, 64)]


def test_statistics_of_both_reach_the_server_by_name() -> None:
    (plugin,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "ragcache")
    for _ in range(2):  # vLLM may load it several times
        plugin.load()()
    for name in OWN_CONNECTORS:
        assert KVConnectorFactory.get_connector_class_by_name(name).__name__ == name
    with two_connectors() as scheduler:
        scheduler.add_request(request("r", tokens(1, 40), 1))
        Steps(scheduler, is_async=False).rest()
        scheduler._controller.record_change()
        said = scheduler.connector.get_kv_connector_stats()
        assert isinstance(said, MultiKVConnectorStats)
        sent = MultiConnector.build_kv_connector_stats(said.to_dict())
        assert sent is not None
        assert other_connectors.own_stats(sent.to_dict())["engine"]["num_requests"] == 1
        assert "ragcache_requests" in sent.reduce()["RAGCacheConnector"]
        told = {0: SimpleNamespace(scheduler_stats=SchedulerStats(kv_connector_stats=sent.to_dict()))}
        broadcast_to_api_servers(told, 2)
        copied = told[1].scheduler_stats.kv_connector_stats
        assert copied == {"RAGCacheConnector": {**other_connectors.own_stats(sent.to_dict()), "offload": None}}


def test_the_other_connector_may_have_what_is_forgotten_and_the_receipt_reports_it() -> None:
    with two_connectors() as scheduler:
        (problem,) = scheduler.left()["problems"]
        assert problem == "KeepingConnector beside RAGCache may keep KV of its own: delete it there"


def test_events_of_the_tiers_pass_through() -> None:
    with two_connectors(emits_events=True) as scheduler:
        told: list[Any] = []
        scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
        scheduler.add_request(request("r", tokens(1, 40), 1))
        Steps(scheduler, is_async=False).rest()
        assert {"GPU", "CPU"} <= {event.medium for event in told}


def test_a_worker_leaves_the_handshake_to_the_other_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_scheduler(60, "1MiB") as scheduler:
        assert scheduler.connector.get_handshake_metadata() is not None
        monkeypatch.setattr(
            "ragcache_core.vllm_plugin.connector.gpu_connector.connector_of_this_worker", lambda: object()
        )
        assert scheduler.connector.get_handshake_metadata() is None


def put_below(monkeypatch: pytest.MonkeyPatch, **tier: str) -> None:
    """Have engines started with one of vLLM's own tiers below host memory."""
    transfer_config = arguments.transfer_config

    def with_tier(*given: Any) -> Any:
        transfer = transfer_config(*given)
        extra: Any = transfer["kv_connector_extra_config"]
        extra["secondary_tiers"] = [tier]
        return transfer

    monkeypatch.setattr(arguments, "transfer_config", with_tier)


def test_a_tier_that_serves_other_engines_out_of_vllms_manager_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    put_below(monkeypatch, type="p2p")
    with (
        pytest.raises(ConfigError, match=r"type 'p2p', which serves other engines.*CacheConfig\(shared"),
        host_scheduler(60, "1MiB"),
    ):
        pass


def test_vllms_own_tier_below_ours_is_loaded_from_and_a_receipt_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_below(monkeypatch, type="fs", root_dir=str(tmp_path))
    shared = tokens(1, 64)
    with host_scheduler(60, "1MiB") as scheduler:
        assert scheduler.left()["problems"] == ["vLLM's tier 'fs' may keep KV of its own: delete it there"]
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("first", [*shared, *tokens(2, 9)], 1))
        # Its files are written by threads of its own, which no number of steps waits for.
        assert until(lambda: not steps.step() and len(list(tmp_path.rglob("*.bin"))) >= len(shared) // BLOCK, 30)
        with scheduler.keeping_weights():
            scheduler.connector.reset_cache()
        scheduler.reset_prefix_cache()
        scheduler.add_request(request("again", [*shared, *tokens(3, 9)], 1))
        assert until(lambda: not steps.step() and not scheduler.requests, 30)
        assert scheduler._controller.counters.num_tokens_by_tier[Origin.DISK] == len(shared)


def test_with_an_unknown_release_documents_are_read_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (connector, release, minimal):
        monkeypatch.setattr(module, "unsupported_reason", lambda: "this is vLLM 9")
    init_none_hash(sha256)
    config, kv_config = engine_config(60, "1MiB", "unknown", connectors=(OTHER,))
    scheduler = scheduler_of(own_scheduler, config, kv_config)
    try:
        scheduler.add_request(request("r", tokens(1, 40), 1))
        assert scheduler.report()["num_requests"] == 0, "it waits"
        assert scheduler.connector.get_kv_connector_stats() is None
    finally:
        scheduler.shutdown()
