"""Workers whose blocks do not fit into a row of host memory, or whose host memory is another one: what is given up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id, region_place
from ragcache_core.vllm_plugin.compat import CanonicalKVCaches, KVConnectorRole, RequestStatus
from ragcache_core.vllm_plugin.connector import tiered_connector
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from ragcache_core.vllm_plugin.offload.worker_memory import WorkerMemory
from tests.engine.vllm_plugin.storing_scene import BLOCK_BYTES, Steps, engine_config, host_scheduler, request
from tests.support.waiting import until

IDENTITY = {"weights": "one", "tokens_per_block": 32}
ELSEWHERE = ("another host", 5, 77)
PROMPT = list(range(10, 110))
NUM_BLOCKS = 6
"""Whole blocks of the prompt."""


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFiles]:
    """What an engine that is started more than once has in shared memory."""
    monkeypatch.setattr("ragcache_core.vllm_plugin.offload.spec.kv_identity", lambda config: IDENTITY)
    held = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 20)
    yield held
    held.remove()


def region_of(engine_id: str) -> Path:
    return Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")


@pytest.fixture
def engine_id() -> Iterator[str]:
    """The name of an engine on a host where it was never launched."""
    name = new_engine_id(os.getpid())
    yield name
    region_of(name).unlink(missing_ok=True)


def report_memory(scheduler: Any, *block_bytes: int, elsewhere: int = 0) -> None:
    """Tell a scheduler what the workers of that many stages report, the last of them from another host."""
    config = scheduler.connector.engine_config
    place = region_place(config.kv_transfer_config.engine_id)
    places = [place] * (len(block_bytes) - elsewhere) + [ELSEWHERE] * elsewhere
    said = {(i, 0): WorkerMemory(size, where) for i, (size, where) in enumerate(zip(block_bytes, places, strict=True))}
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(said)


def ask(scheduler: Any, name: str) -> Steps:
    steps = Steps(scheduler, is_async=False)
    scheduler.add_request(request(name, PROMPT, 2))
    assert until(lambda: not steps.step()), "a disk takes its time"
    return steps


def tiers(scheduler: Any) -> dict[str, int]:
    return {tier["name"]: tier["num_blocks"] for tier in scheduler.report()["tiers"]}


def test_stages_that_need_more_than_the_first_leave_an_engine_with_gpu_memory_alone(
    files: EngineFiles, plugin_log: pytest.LogCaptureFixture
) -> None:
    with host_scheduler(400, "1MiB", files=files) as scheduler:
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES)
        assert list(tiers(scheduler)) == ["gpu"]
        assert region_of(files.engine_id).stat().st_blocks == 0, "its memory is given back"
        for name in ("first", "second"):
            scheduler.add_request(request(name, PROMPT, 2))
            output = scheduler.schedule()
            assert output.num_scheduled_tokens == {name: 64}
            assert not hasattr(output.kv_connector_metadata, "store_jobs"), "workers were told to copy"
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            scheduler.schedule()
            assert scheduler.reset_prefix_cache(reset_connector=True)
        assert list(tiers(scheduler)) == ["gpu"]
    assert "Failed to close mmap_obj" not in plugin_log.text
    line = (
        "RC-TIERS-OFF: RAGCache keeps nothing below the GPU: a block of KV takes 1024, 1024, 2048 bytes on the "
        "workers, and each has the 1024 of the first in host memory: give the first pipeline stage at least as many "
        "layers as any"
    )
    assert plugin_log.text.count(line) == 1


def test_a_disk_that_such_an_engine_leaves_may_hold_what_is_forgotten(
    files: EngineFiles, tmp_path: Path, identity: None
) -> None:
    with host_scheduler(400, "1MiB", files=files, disk_bytes="1MiB", directory=tmp_path) as scheduler:
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES)
        scheduler.forget(["d"])
        (why,) = scheduler.left()["problems"]
        assert str(tmp_path) in why


def test_stages_that_need_less_than_the_first_have_all_tiers(
    files: EngineFiles, plugin_log: pytest.LogCaptureFixture
) -> None:
    with host_scheduler(400, "1MiB", files=files) as scheduler:
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES // 2)
        assert ask(scheduler, "r").num_stored == NUM_BLOCKS
        assert tiers(scheduler)["host"] == NUM_BLOCKS
    assert "keeps nothing" not in plugin_log.text


def test_workers_with_host_memory_of_their_own_have_no_disk(
    files: EngineFiles, tmp_path: Path, identity: None, plugin_log: pytest.LogCaptureFixture
) -> None:
    kept: dict[str, Any] = {"disk_bytes": "1MiB", "directory": tmp_path}
    with host_scheduler(400, "1MiB", files=files, **kept) as scheduler:
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES)
        ask(scheduler, "r")
        assert tiers(scheduler)["disk"] == NUM_BLOCKS
    with host_scheduler(400, "1MiB", files=files, **kept) as scheduler:
        assert tiers(scheduler)["disk"] == NUM_BLOCKS
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES, elsewhere=1)
        assert list(tiers(scheduler)) == ["gpu", "host"]
        scheduler.forget(["d"])
        (why,) = scheduler.left()["problems"]
        assert "may serve it again after the next start: before that, delete" in why
        assert str(tmp_path) in why
        steps = ask(scheduler, "again")
        assert steps.num_stored == NUM_BLOCKS, "host memory is used as ever"
        assert tiers(scheduler)["host"] == NUM_BLOCKS
    line = (
        "RC-WORKERS-APART: RAGCache keeps nothing on disk, nor in host memory after a crash: 1 of 2 workers have host "
        "memory of their own, on another host or in another container (stage 1 rank 0): keep all workers of an engine "
        "on one host"
    )
    assert plugin_log.text.count(line) == 1
    with host_scheduler(400, "1MiB", files=files, **kept) as scheduler:
        report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES)
        assert tiers(scheduler)["disk"] == NUM_BLOCKS, "what was on disk was not theirs to delete"


def worker(engine_id: str, stages: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the connector of the second stage's worker, of a pipeline whose blocks take that many bytes."""
    config, kv_config = engine_config(400, "1MiB", engine_id)
    config.parallel_config.pipeline_parallel_size = len(stages)
    config.parallel_config.world_size = len(stages)
    config.parallel_config.rank = 1
    config.compilation_config.static_forward_context = {"layer 0": None}  # none that waits for its own copies

    def told(num_bytes: int) -> list[int]:
        assert num_bytes == stages[1]
        return stages

    monkeypatch.setattr(tiered_connector, "bytes_of_stages", told)
    return RAGCacheConnector(config, KVConnectorRole.WORKER, kv_config)


def memory() -> CanonicalKVCaches:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor

    layer = torch.randint(-128, 128, (400, BLOCK_BYTES), dtype=torch.int8)
    return CanonicalKVCaches([CanonicalKVCacheTensor(layer, BLOCK_BYTES)], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]])


def test_a_worker_that_needs_more_than_the_first_maps_nothing(engine_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = worker(engine_id, [BLOCK_BYTES // 2, BLOCK_BYTES], monkeypatch)
    assert type(connector) is DocumentConnector
    assert connector.get_handshake_metadata() == WorkerMemory(BLOCK_BYTES, None)
    assert not region_of(engine_id).exists()


def test_a_worker_that_needs_less_than_the_first_writes_behind_what_the_first_may(
    engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_bytes = 4 * BLOCK_BYTES
    connector = worker(engine_id, [first_bytes, BLOCK_BYTES], monkeypatch)
    assert isinstance(connector, RAGCacheConnector)
    spec = connector.below.connector_worker.spec
    caches = memory()
    copying = spec.get_worker(caches)
    rows = np.frombuffer(copying._region.create_kv_memoryview(), np.uint8).reshape(spec.num_chunks, -1)
    assert rows.shape[1] == spec.kv_bytes_per_chunk == 2 * first_bytes
    copying._host[0][5, 0] = caches.tensors[0].tensor[3].numpy()
    there = np.flatnonzero(rows[5])
    assert first_bytes <= there.min()
    assert there.max() < first_bytes + BLOCK_BYTES
    assert connector.get_handshake_metadata() == WorkerMemory(BLOCK_BYTES, region_place(engine_id))
    del rows
    copying.shutdown()


def test_workers_with_host_memory_of_their_own_find_nothing_there_after_a_crash(files: EngineFiles) -> None:
    for apart, num_found in ((0, 0), (0, NUM_BLOCKS), (1, 0), (0, 0)):
        with host_scheduler(400, "1MiB", files=files) as scheduler:
            report_memory(scheduler, BLOCK_BYTES, BLOCK_BYTES, elsewhere=apart)
            assert tiers(scheduler)["host"] == num_found
            if not num_found:
                assert ask(scheduler, "r").num_stored == NUM_BLOCKS
