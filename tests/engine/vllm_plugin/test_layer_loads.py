"""Layer-wise loads: no layer computes before its KV came, and only requests load this way that gain by it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.offload import device_copies
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoad, LayerLoadWorker, calls_each_layer
from tests.conftest import ROOT
from tests.engine.vllm_plugin.storing_scene import BLOCK, Steps, host_scheduler, request, tokens


class Stream:
    """A copy stream that notes what is copied and who waits for which copy."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, list[int], list[int]]] = []
        self.waited: list[int] = []
        self.num_done = 0

    def begin(self) -> None:
        """Do nothing."""

    def copy(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        self.copied.append((tensor, rows.tolist(), blocks.tolist()))
        return 10 * len(rows)

    def record(self) -> Any:
        count = len(self.copied)
        return SimpleNamespace(
            wait=lambda: self.waited.append(count),
            is_done=lambda: self.num_done >= count,
            seconds_since=lambda _: 0.5,
        )


def load(number: int, *places: tuple[int, int]) -> LayerLoad:
    rows, blocks = zip(*places, strict=True)
    return LayerLoad(number, np.array(rows), np.array(blocks))


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def worker(stream: Stream) -> LayerLoadWorker:
    return LayerLoadWorker(stream, 3, {"a": 0, "b": 1, "c": 2})


def test_each_layer_waits_for_its_own_copies_of_all_loads_of_the_step(worker: LayerLoadWorker, stream: Stream) -> None:
    worker.start([load(-1, (4, 7), (5, 8)), load(-2, (6, 9))], waits_by_layer=True)
    assert stream.copied == [(tensor, [4, 5, 6], [7, 8, 9]) for tensor in range(3)]
    assert stream.waited == []
    for name in ("a", "a", "b", "another"):  # the last one is not of the group: its KV may be anywhere
        worker.wait(name)
    assert stream.waited == [1, 1, 2, 3]
    worker.end_step()
    worker.wait("a")
    assert stream.waited == [1, 1, 2, 3, 3], "the next step has nothing to wait for"


def test_a_step_whose_layers_do_not_ask_waits_for_all_before_it_begins(worker: LayerLoadWorker, stream: Stream) -> None:
    worker.start([load(-1, (4, 7))], waits_by_layer=False)
    assert stream.waited == [3]


def test_loads_end_in_order_once_their_last_layer_is_copied(worker: LayerLoadWorker, stream: Stream) -> None:
    worker.start([load(-1, (4, 7)), load(-2, (6, 9))], waits_by_layer=True)
    worker.start([load(-3, (1, 1))], waits_by_layer=True)
    stream.num_done = 2
    assert worker.take_finished() == []
    stream.num_done = 3
    assert worker.take_finished() == [([-1, -2], 60, 0.5)]
    stream.num_done = 6
    assert worker.take_finished() == [([-3], 30, 0.5)]
    assert worker.take_finished() == []


def test_a_replayed_graph_of_a_whole_step_does_not_ask_by_layer() -> None:
    def context(mode: CUDAGraphMode, attn_metadata: object) -> Any:
        return SimpleNamespace(cudagraph_runtime_mode=mode, attn_metadata=attn_metadata)

    assert calls_each_layer(context(CUDAGraphMode.NONE, {}))
    assert calls_each_layer(context(CUDAGraphMode.PIECEWISE, {}))
    assert not calls_each_layer(context(CUDAGraphMode.FULL, {}))
    assert not calls_each_layer(context(CUDAGraphMode.NONE, None)), "vLLM's second runner, before a graph of a step"


@pytest.fixture
def scheduler() -> Iterator[Any]:
    """Yield a scheduler whose host memory has the KV of 100 tokens that its GPU lost."""
    with host_scheduler(60, "1MiB") as scheduler:
        steps = Steps(scheduler, is_async=False)
        scheduler.add_request(request("first", tokens(1, 6 * BLOCK + 4), 2))
        steps.rest()
        scheduler.reset_prefix_cache()
        scheduler.steps = steps
        yield scheduler


def cached_and_kind(scheduler: Any, name: str, num_tokens: int) -> tuple[int, str]:
    """Ask with the first of these tokens; return how many came from host memory, and how they were loaded."""
    before, loads = scheduler._controller.counters.num_tokens_by_tier[Tier.HOST], scheduler.steps.num_layer_loads
    scheduler.add_request(request(name, tokens(1, 6 * BLOCK + 4)[:num_tokens], 2))
    scheduler.steps.rest()
    cached = scheduler._controller.counters.num_tokens_by_tier[Tier.HOST] - before
    kind = "layer-wise" if scheduler.steps.num_layer_loads > loads else "asynchronous"
    return cached, kind if cached else "none"


@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [(6 * BLOCK + 4, 6 * BLOCK), (6 * BLOCK, 5 * BLOCK), (6 * BLOCK - 1, 5 * BLOCK), (BLOCK + 1, BLOCK)],
)
def test_an_idle_engine_loads_layer_by_layer_what_leaves_a_token_to_compute(
    scheduler: Any, num_tokens: int, cached: int
) -> None:
    assert cached_and_kind(scheduler, "again", num_tokens) == (cached, "layer-wise")


def test_a_prompt_of_one_cached_block_is_loaded_as_a_whole(scheduler: Any) -> None:
    assert cached_and_kind(scheduler, "again", BLOCK)[1] != "layer-wise", "nothing would be left to compute"


@pytest.mark.parametrize(
    ("is_profiled", "bytes_per_s", "kind"),
    [
        (True, 1e12, "layer-wise"),
        (True, 1.0, "asynchronous"),
        (False, 1e12, "asynchronous"),
        (True, 0.0, "asynchronous"),
    ],
    ids=["fast", "slow", "no profile", "no load yet"],
)
def test_a_load_during_another_request_must_be_expected_to_overlap(
    scheduler: Any, is_profiled: bool, bytes_per_s: float, kind: str
) -> None:
    scheduler._controller.is_profiled = is_profiled
    if bytes_per_s:
        scheduler.connector._layer_loads.on_loaded(int(bytes_per_s), 1.0)
    scheduler.add_request(request("other", tokens(2, 40), 60))
    scheduler.steps.step()
    assert cached_and_kind(scheduler, "again", 6 * BLOCK + 4) == (6 * BLOCK, kind)


def test_rows_are_free_once_all_workers_have_read_them(scheduler: Any) -> None:
    copies = scheduler.connector.copies
    copies._jobs._num_workers = 2
    own = request("again", tokens(1, 6 * BLOCK + 4), 1)
    scheduler.add_request(own)
    (load,) = scheduler.schedule().kv_connector_metadata.layer_loads
    told = OffloadingWorkerMetadata(completed_jobs={load.number: 1})
    host = scheduler.connector._host
    rows = [row for row in host.contents().values() if host._num_reads[row]]
    assert len(rows) == 6
    scheduler.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert all(host._num_reads[row] for row in rows)
    scheduler.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert not any(host._num_reads[row] for row in rows)
    assert not copies.num_jobs


class HostDevice:
    """Streams, events and the copying kernel of a device whose memory is main memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.Stream = self.current_stream = self

    def __call__(self) -> HostDevice:
        return self

    def wait_stream(self, _other: object) -> None:
        self.calls.append("wait for the computation")

    def wait_event(self, _event: object) -> None:
        self.calls.append("computation waits")

    @contextmanager
    def stream(self, _stream: object) -> Iterator[None]:
        yield

    def event(self, *, enable_timing: bool) -> Any:
        return SimpleNamespace(record=lambda _stream: None, query=lambda: True, elapsed_time=lambda _later: 2000.0)

    def swap_blocks_batch(self, sources: Any, targets: Any, sizes: Any, **_options: bool) -> None:
        self.calls.append(f"copy {len(sizes)}")
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_copies_each_layer_to_its_addresses(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, pages = HostDevice(), (96, 160, 96)
    monkeypatch.setattr(device_copies, "current_platform", device)
    monkeypatch.setattr(device_copies, "ops", device)
    monkeypatch.setattr(device_copies.torch, "Event", device.event)
    tensors = [torch.zeros((8, page), dtype=torch.int8) for page in pages]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)], [[]]
    )
    host = torch.randint(-128, 128, (5, 2 * sum(pages)), dtype=torch.int8)  # a row has a part of each of two workers
    copies = device_copies.DeviceCopies(
        caches,
        SimpleNamespace(base_tensor=host.view(-1)),  # type: ignore[arg-type]
        row_bytes=2 * sum(pages),
        first_byte=rank * sum(pages),
    )
    worker = LayerLoadWorker(copies, 3, {"a": 0, "b": 1, "c": 2})
    worker.start([load(-1, (4, 7), (1, 2))], waits_by_layer=True)
    worker.wait("b")
    assert device.calls == ["wait for the computation", "copy 2", "copy 2", "copy 2", "computation waits"]
    for i, tensor in enumerate(tensors):
        first = rank * sum(pages) + sum(pages[:i])
        for row, block in ((4, 7), (1, 2)):
            assert torch.equal(tensor[block], host[row, first : first + pages[i]])
        assert not tensor[[0, 1, 3, 4, 5, 6]].any()
    assert worker.take_finished() == [([-1], 2 * sum(pages), 2.0)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_are_those_of_vllm_without_a_cache_however_late_each_layer_comes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.vllm_plugin.layer_load_facts", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["late"]["layer-wise loads"] > 10
    assert facts["late"]["from host"] > 0
    assert facts["late"]["loads left"] == 0
    assert facts["late"]["different"] == 0
    assert facts["late"]["worst"] < 1e-3
    assert facts["unawaited"]["different"] > 0, "layers that do not wait are not noticed: this test shows nothing"
