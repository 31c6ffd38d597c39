"""The copying worker on vLLM's own shared region and transfer specs: bytes go where they belong, and come back."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id
from ragcache_core.vllm_plugin.offload.cpu_worker import CopyingWorker

NUM_BLOCKS = 24
NUM_CHUNKS = 12
PAGES = (96, 160, 96)
"""Bytes of a block in each layer; the second differs."""


class Scene:
    """The memory of an engine with three layers, and a region of host memory."""

    def __init__(
        self, blocks_per_chunk: int, groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),), engine_id: str | None = None
    ) -> None:
        used = sum(PAGES) * blocks_per_chunk
        self.row_bytes = -(-used // 4096) * 4096
        self.blocks_per_chunk = blocks_per_chunk
        self.engine_id = engine_id or f"ragcache-test-{secrets.token_hex(4)}"
        self.region = SharedOffloadRegion(self.engine_id, NUM_CHUNKS, 0, self.row_bytes, self.row_bytes)
        self.view = self.region.create_kv_memoryview()
        self.layers = [torch.randint(-128, 128, (NUM_BLOCKS, page), dtype=torch.int8) for page in PAGES]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(layer, page) for layer, page in zip(self.layers, PAGES, strict=True)],
            [[CanonicalKVCacheRef(layer, PAGES[layer]) for layer in group] for group in groups],
        )
        self.worker = CopyingWorker(caches, blocks_per_chunk, self.region)

    @property
    def path(self) -> Path:
        return Path(f"/dev/shm/vllm_offload_{self.engine_id}.mmap")

    def host(self, chunk: int, part: int, layer: int) -> bytes:
        """Return what a part of a chunk holds of a layer, by the layout that other workers and the disk rely on."""
        offset = sum(PAGES[:layer]) * self.blocks_per_chunk + part * PAGES[layer]
        return bytes(np.frombuffer(self.view, np.uint8).reshape(self.view.shape)[chunk, offset : offset + PAGES[layer]])

    def close(self) -> None:
        self.view.release()
        self.worker.shutdown()


Opening = Callable[..., Scene]


@pytest.fixture
def opening() -> Iterator[Opening]:
    opened: list[Scene] = []

    def open_scene(blocks_per_chunk: int, groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),)) -> Scene:
        opened.append(Scene(blocks_per_chunk, groups))
        return opened[-1]

    yield open_scene
    for scene in opened:
        scene.close()


@pytest.mark.parametrize(
    ("blocks_per_chunk", "first_index", "blocks", "chunks", "parts"),
    [
        (1, 0, [3, 7, 5], [2, 0, 9], [(2, 0), (0, 0), (9, 0)]),
        (1, 5, [3, 7], [4, 1], [(4, 0), (1, 0)]),
        (2, 0, [3, 7, 5, 1], [6, 2], [(6, 0), (6, 1), (2, 0), (2, 1)]),
        (2, 0, [3, 7, 5], [6, 2], [(6, 0), (6, 1), (2, 0)]),
        (2, 3, [3, 7, 5], [6, 2], [(6, 1), (2, 0), (2, 1)]),
        (2, 1, [3], [11], [(11, 1)]),
        (2, 7, [3, 7, 5, 1], [8, 0, 3], [(8, 1), (0, 0), (0, 1), (3, 0)]),
        (3, 2, [3, 7, 5, 1, 9], [8, 0, 3], [(8, 2), (0, 0), (0, 1), (0, 2), (3, 0)]),
    ],
)
def test_each_block_is_a_part_of_its_chunk_and_comes_back(
    opening: Opening,
    blocks_per_chunk: int,
    first_index: int,
    blocks: list[int],
    chunks: list[int],
    parts: list[tuple[int, int]],
) -> None:
    scene = opening(blocks_per_chunk)
    before = [layer.clone() for layer in scene.layers]
    engine, host = GPULoadStoreSpec(blocks, [len(blocks)], [first_index]), CPULoadStoreSpec(chunks)
    assert scene.worker.submit_store(1, engine, host)
    for block, (chunk, part) in zip(blocks, parts, strict=True):
        for number, layer in enumerate(before):
            assert scene.host(chunk, part, number) == layer[block].numpy().tobytes()
    written = np.frombuffer(scene.view, np.uint8).reshape(scene.view.shape).any(axis=1)
    assert set(np.flatnonzero(written)) == set(chunks), "no other chunk was touched"
    for layer in scene.layers:
        layer.zero_()
    assert scene.worker.submit_load(2, host, engine)
    for layer, old in zip(scene.layers, before, strict=True):
        assert torch.equal(layer[blocks], old[blocks])
        others = [block for block in range(NUM_BLOCKS) if block not in blocks]
        assert not layer[others].any(), "no other block was touched"
    first, second = scene.worker.get_finished()
    num_bytes = len(blocks) * sum(PAGES)
    assert (first.job_id, first.success, first.transfer_size) == (1, True, num_bytes)
    assert (second.job_id, second.success, second.transfer_size) == (2, True, num_bytes)
    assert scene.worker.get_finished() == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks_per_chunk=st.integers(1, 4),
    first_index=st.integers(0, 9),
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_what_was_stored_can_be_loaded_into_other_blocks(
    blocks_per_chunk: int, first_index: int, blocks: list[int], data: st.DataObject
) -> None:
    scene = Scene(blocks_per_chunk)
    try:
        num_chunks = -(-(first_index % blocks_per_chunk + len(blocks)) // blocks_per_chunk)
        chunks = data.draw(st.permutations(range(NUM_CHUNKS)))[:num_chunks]
        others = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(blocks)]
        expected = [layer[blocks].clone() for layer in scene.layers]
        host = CPULoadStoreSpec(chunks)
        scene.worker.submit_store(1, GPULoadStoreSpec(blocks, [len(blocks)], [first_index]), host)
        scene.worker.submit_load(2, host, GPULoadStoreSpec(others, [len(blocks)], [first_index]))
        for layer, old in zip(scene.layers, expected, strict=True):
            assert torch.equal(layer[others], old)
    finally:
        scene.close()


def test_a_part_of_what_was_stored_can_be_loaded(opening: Opening) -> None:
    """A request that has the first blocks already loads from the middle of a chunk."""
    scene = opening(2)
    expected = [layer[[4, 5, 6]].clone() for layer in scene.layers]
    scene.worker.submit_store(1, GPULoadStoreSpec([3, 4, 5, 6], [4], [0]), CPULoadStoreSpec([7, 1]))
    scene.worker.submit_load(2, CPULoadStoreSpec([7, 1]), GPULoadStoreSpec([10, 11, 12], [3], [1]))
    for layer, old in zip(scene.layers, expected, strict=True):
        assert torch.equal(layer[[10, 11, 12]], old)


def test_groups_of_layers_have_blocks_and_chunks_of_their_own(opening: Opening) -> None:
    scene = opening(2, groups=((0, 2), (1,)))
    engine = GPULoadStoreSpec([3, 4, 5, 8], [3, 1], [1, 0])
    scene.worker.submit_store(1, engine, CPULoadStoreSpec([7, 1, 2]))
    places = {(3, 0): (7, 1), (4, 0): (1, 0), (5, 2): (1, 1), (8, 1): (2, 0)}
    for (block, layer), (chunk, part) in places.items():
        assert scene.host(chunk, part, layer) == scene.layers[layer][block].numpy().tobytes()
    assert not any(scene.host(7, 1, 1))


def test_a_group_without_blocks_takes_no_chunk(opening: Opening) -> None:
    scene = opening(1, groups=((0, 2), (1,)))
    scene.worker.submit_store(1, GPULoadStoreSpec([8], [0, 1], [0, 0]), CPULoadStoreSpec([2]))
    assert scene.host(2, 0, 1) == scene.layers[1][8].numpy().tobytes()
    assert not any(scene.host(2, 0, 0))
    assert [result.transfer_size for result in scene.worker.get_finished()] == [PAGES[1]]


def store(scene: Scene, job: int, block: int, chunk: int) -> None:
    assert scene.worker.submit_store(job, GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([chunk]))


def ended(scene: Scene) -> list[int]:
    return [result.job_id for result in scene.worker.get_finished()]


def test_the_region_goes_with_the_worker(opening: Opening) -> None:
    scene = opening(1)
    store(scene, 5, 1, 0)
    assert scene.path.exists()
    scene.view.release()
    scene.worker.shutdown()
    scene.worker.shutdown()
    assert not scene.path.exists()


def test_host_memory_that_a_launcher_holds_outlives_the_worker_and_takes_no_room_in_shared_memory() -> None:
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 20)
    stored = []
    for _ in range(2):
        files.prepare()
        scene = Scene(1, engine_id=files.engine_id)
        mapped = Path("/proc/self/maps").read_text()
        assert f"memfd:{files.engine_id}" in mapped
        assert f"/dev/shm/vllm_offload_{files.engine_id}" not in mapped
        if not stored:
            store(scene, 5, 1, 0)
        stored.append(scene.host(0, 0, 0))
        scene.close()
    assert any(stored[0])
    assert stored[1] == stored[0]
    files.remove()
    assert f"memfd:{files.engine_id}" not in Path("/proc/self/maps").read_text()


def test_a_store_is_made_when_it_is_requested_and_reported_once(opening: Opening) -> None:
    scene = opening(1)
    for job, block in enumerate([3, 4, 5]):
        store(scene, job, block, 2)  # as after a reset, which gives the chunk to another
        assert scene.host(2, 0, 0) == scene.layers[0][block].numpy().tobytes()
    scene.worker.wait({0, 1, 2, 77})
    assert ended(scene) == [0, 1, 2]
    assert ended(scene) == []
