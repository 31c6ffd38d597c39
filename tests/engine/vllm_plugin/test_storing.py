"""What a step shows vLLM's offloading: what neither fills a chunk nor gets blocks is left out, to no effect.

Requests are, and whole steps are.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ScheduleEndContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.compat import OffloadingConnectorMetadata
from ragcache_core.vllm_plugin.offload.compat import NOTHING_TO_COPY, end_quiet_step, take_late_stores, with_late_stores
from ragcache_core.vllm_plugin.offload.store_planner import StorePlanner
from ragcache_core.wire import encode_kv_transfer_params, tile
from tests.engine.vllm_plugin.storing_scene import Steps, host_scheduler, request

_CLEARED_AT = 70


@dataclass
class Served:
    """What came of some requests: ``stored`` is (step, request, blocks of the engine), and so is ``loaded``."""

    stored: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    loaded: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    flushed: list[tuple[int, int]] = field(default_factory=list)
    """Steps and how many copies had to end before them."""
    num_late: int = 0
    """How many of ``stored`` came with the step after, as the workers do not begin with them before."""
    num_steps: int = 0
    num_shown: int = 0
    """Requests that vLLM's offloading was shown, over all steps."""
    num_looked_at: int = 0
    """Steps of which it was shown anything."""
    num_ended: int = 0
    """Steps that its manager was told the end of."""
    num_left_alone: int = 0
    """Steps in which workers leave the connector alone."""
    num_said: int = 0
    """Steps that sent its counts to the server's process."""
    num_events: int = 0
    """Of blocks that came to host memory or left it, as vLLM publishes them."""
    num_asked_for_events: int = 0
    """Steps in which vLLM's offloading was asked for them."""
    ended_late: list[bool] = field(default_factory=list)
    """Of each time that vLLM's offloading was told of copies that ended: whether an answer waited for that."""
    ended_loads: list[bool] = field(default_factory=list)
    """And whether a load was among them."""


@dataclass
class ListeningSteps(Steps):
    """Steps of which is noted what workers get."""

    served: Served = field(default_factory=Served)
    is_lull: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        offloading = self.scheduler.connector.scheduler
        for owner, name, listen in [
            (offloading, "build_connector_meta", self._on_look),
            (offloading, "take_events", self._on_events),
            (offloading, "update_connector_output", self._on_ended),
            (offloading.manager, "on_schedule_end", self._on_end),
            (self.scheduler, "get_grammar_bitmask", self._on_lull),
        ]:
            setattr(owner, name, partial(listen, getattr(owner, name)))

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ran = super()._run(output)
        meta, served, step = output.kv_connector_metadata, self.served, self.num
        ended = ran.kv_connector_output and ran.kv_connector_output.kv_connector_worker_meta
        if meta is NOTHING_TO_COPY:  # nothing to begin, and nothing of the step before to be told of
            assert not any((ended, meta.store_jobs, meta.load_jobs, meta.jobs_to_flush))
            served.num_left_alone += 1
        late_jobs = getattr(meta, "late_jobs", {})
        served.num_late += len(late_jobs)
        for asked, jobs in ((step - 1, late_jobs), (step, meta.store_jobs)):
            served.stored += [(asked, job.req_id, tuple(job.src_spec.block_ids.tolist())) for job in jobs.values()]
        served.loaded += [(step, job.req_id, tuple(job.dst_spec.block_ids.tolist())) for job in meta.load_jobs.values()]
        served.flushed += [(step, len(meta.jobs_to_flush))] if meta.jobs_to_flush else []
        return ran

    def _update(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(output, ran)
        for said in (out.scheduler_stats.kv_connector_stats for out in outputs.values() if out.scheduler_stats):
            self.served.num_said += bool(said and said.get("offload"))

    def _on_look(self, look: Callable[..., Any], output: SchedulerOutput) -> Any:
        self.served.num_looked_at += 1
        self.served.num_shown += len(output.num_scheduled_tokens)
        return look(output)

    def _on_end(self, end: Callable[..., Any], context: ScheduleEndContext) -> None:
        self.served.num_ended += 1
        end(context)

    def _on_events(self, take: Callable[[], Iterable[Any]]) -> list[Any]:
        events = list(take())
        self.served.num_asked_for_events += 1
        self.served.num_events += len(events)
        return events

    def _on_ended(self, take_in: Callable[..., Any], output: KVConnectorOutput) -> None:
        self.served.ended_late.append(not self.is_lull)
        self.served.ended_loads.append(bool(output.finished_recving))
        take_in(output)

    def _on_lull(self, use: Callable[..., Any], output: SchedulerOutput) -> Any:
        self.is_lull = True
        try:
            return use(output)
        finally:
            self.is_lull = False


def _request(number: int, dice: random.Random) -> Request:
    """Return a request of 20 to 150 tokens; every other one says where its document lies."""
    tokens = [dice.randrange(10, 900) for _ in range(dice.randrange(20, 150))]
    num_answers, params = dice.randrange(1, 70), {}
    if number % 2:
        document = PromptSegment(SegmentKind.DOCUMENT, 4, dice.randrange(10, len(tokens)), f"d{number}")
        params = encode_kv_transfer_params(tile([document], len(tokens)))
    return request(f"r{number}", tokens, num_answers, params=params)


def _serve(
    num_blocks: int, seed: int, host_bytes: str = "1MiB", *, tells_events: bool = False, is_async: bool = False
) -> Served:
    """Return what came of forty requests, in the middle of which host memory was cleared."""
    dice = random.Random(seed)
    with host_scheduler(num_blocks, host_bytes, tells_events, is_async) as scheduler:
        steps = ListeningSteps(scheduler, is_async)
        waiting = [_request(i, dice) for i in range(40)]
        for i in range(3000):
            if waiting and i % 4 == 0:
                scheduler.add_request(waiting.pop())
            if i == _CLEARED_AT:
                scheduler.connector.reset_cache()
            if not steps.step() and not waiting:
                break
        assert not scheduler.requests
        assert not scheduler.connector._storing
        assert not scheduler.connector._storing.is_behind
        assert not scheduler.connector._ended, "the engine went to rest before it knew what was stored"
    steps.served.num_steps = steps.num
    steps.served.stored.sort()
    return steps.served


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize(("num_blocks", "host_bytes"), [(400, "1MiB"), (40, "1MiB"), (40, "48KiB"), (30, "160KiB")])
def test_what_is_stored_and_when_is_what_vllm_would_store(
    num_blocks: int, host_bytes: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [_serve(num_blocks, seed, host_bytes, is_async=is_async) for seed in range(3)]
    monkeypatch.setattr(StorePlanner, "concerning", lambda self, output: output)
    monkeypatch.setattr("ragcache_core.vllm_plugin.offload.store_planner.can_be_put_off", lambda *step: False)
    vllms = [_serve(num_blocks, seed, host_bytes, is_async=is_async) for seed in range(3)]
    for mine, theirs in zip(ours, vllms, strict=True):
        assert mine.stored == theirs.stored
        assert mine.loaded == theirs.loaded
        assert mine.flushed == theirs.flushed
        assert len(mine.stored) > 25
        assert mine.num_late > len(mine.stored) / 2
        assert theirs.num_late == 0
        assert mine.num_shown < theirs.num_shown / 3
        assert mine.num_looked_at < theirs.num_looked_at * 0.8
        assert mine.num_ended == mine.num_looked_at
        assert mine.num_left_alone > mine.num_steps / 4
        assert theirs.num_left_alone == 0
        assert mine.num_steps == theirs.num_looked_at
    assert any(served.flushed for served in ours)
    assert any(served.loaded for served in ours) == (num_blocks < 400)


def test_the_end_of_a_quiet_step_is_told_where_a_tier_lies_below_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_scheduler(40, "1MiB", tells_events=False) as scheduler:
        told: list[ScheduleEndContext] = []
        manager = scheduler.connector.scheduler.manager
        manager.on_schedule_end = told.append
        assert end_quiet_step(scheduler.connector) is NOTHING_TO_COPY
        assert told == []
        with monkeypatch.context() as patched:
            patched.setattr(manager, "secondary_tiers", [object()])
            end_quiet_step(scheduler.connector)
        assert told == [ScheduleEndContext((), ())]


def test_what_the_offloading_counts_is_not_sent_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.connector.stats_reporter._REPORT_EVERY_S", 3600.0)
    served = _serve(400, 0)
    assert 1 <= served.num_said < served.num_steps / 10


@pytest.mark.parametrize("num_blocks", [400, 40])
def test_what_was_stored_is_taken_in_while_the_model_computes_and_what_was_loaded_at_once(num_blocks: int) -> None:
    served = _serve(num_blocks, 0)
    assert not all(served.ended_loads)
    assert any(served.ended_loads) == (num_blocks < 400)
    waited = {
        is_load: [late for late, load in zip(served.ended_late, served.ended_loads, strict=True) if load == is_load]
        for is_load in (False, True)
    }
    assert all(waited[True])
    assert not all(waited[False])
    if num_blocks == 400:  # else stores that ended before a load go with it
        assert not any(waited[False])


def test_vllms_events_of_blocks_are_told_where_they_are_published_and_cost_nothing_elsewhere() -> None:
    told, quiet = (_serve(40, 0, tells_events=tells_events) for tells_events in (True, False))
    assert told.num_events > 0
    assert told.num_asked_for_events == told.num_steps
    assert quiet.num_asked_for_events == 0
    assert quiet.stored == told.stored


class Copies:
    """A worker's copies, of which is noted what is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def submit_store(self, job: int, source: Any, target: Any) -> bool:
        self.asked.append(job)
        return True

    def wait(self, jobs: set[int]) -> None:
        self.asked.append(sorted(jobs))


@pytest.mark.parametrize("is_writer", [True, False])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_workers_begin_with_late_stores_in_the_step_that_brings_them(is_writer: bool, is_quiet: bool) -> None:
    """In vLLM's own end of the offloading, of a worker that stores and of one whose KV another one stores as well."""
    source = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    job = TransferJob("r", source, CPULoadStoreSpec([1]))
    worker = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
    worker.worker, worker._is_store_writer = Copies(), is_writer
    worker._load_jobs, worker._unsubmitted_store_jobs = {}, []
    worker._connector_worker_meta = OffloadingWorkerMetadata()
    step = NOTHING_TO_COPY if is_quiet else OffloadingConnectorMetadata({}, {7: job, 8: job}, {1, 8})
    metadata = with_late_stores(step, OffloadingConnectorMetadata({}, {3: job, 4: job}, {3}))
    received = pickle.loads(pickle.dumps(metadata))
    take_late_stores(SimpleNamespace(connector_worker=worker), received)
    worker.handle_preemptions(received)
    worker.start_kv_transfers(received)
    worker.prepare_store_kv(received)
    needed = [3] if is_quiet else [1, 3, 8]
    begun = ([3, 4] if is_quiet else [3, 4, 8]) if is_writer else []
    assert worker.worker.asked == [*begun, needed]
    assert [number for number, *_ in worker._unsubmitted_store_jobs] == ([7] if is_writer and not is_quiet else [])
    told = worker._connector_worker_meta.completed_jobs
    assert told == ({} if is_writer else dict.fromkeys([3, 4] if is_quiet else [3, 4, 7, 8], 1))
    assert not NOTHING_TO_COPY.store_jobs
