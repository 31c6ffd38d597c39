"""Copy blocks between the engine's KV memory and host memory without a GPU.

vLLM's own worker copies with CUDA streams, and is used on CUDA. Without a GPU this one replaces it, to run the whole
code path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ragcache_core.vllm_plugin.compat import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    TransferResult,
)
from ragcache_core.vllm_plugin.offload.layer_loads import PastEvent


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Blocks of one KV cache group: (block of the engine, offload block, part of it)."""

    group: int
    places: list[tuple[int, int, int]]


def worker_region(spec: TieringOffloadingSpec) -> SharedOffloadRegion:
    """Return host memory as mapped by a worker; workers with equal KV share one part of it."""
    return SharedOffloadRegion(
        engine_id=spec.config.engine_id,
        num_chunks=spec.num_chunks,
        rank=0 if spec.replicated_layout else spec.config.parallel.rank,
        kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
        cpu_page_size=spec.cpu_page_size_per_worker,
    )


def copying_worker(spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches) -> CopyingWorker:
    """Return the transfer worker of a host tier."""
    region = worker_region(spec)
    try:
        return CopyingWorker(kv_caches, spec.blocks_per_chunk, region)
    except BaseException:
        region.cleanup()
        raise


class CopyingWorker(OffloadingWorker):
    """Transfer worker that copies blocks synchronously.

    Page by page: torch's indexing of many pages at once takes 97 us a block of 128 KiB, NumPy's copy of each 7 us.

    ::

        engine   [num_blocks, page_bytes]                       one such tensor for each layer
        host     [num_chunks, blocks_per_chunk, page_bytes]     a strided view into the shared region for each
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region: SharedOffloadRegion | None = region
        self._blocks_per_chunk = blocks_per_chunk
        self._engine: list[np.ndarray] = []
        self._host: list[np.ndarray] = []
        self._groups = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            rows = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            self._engine.append(cache.tensor.numpy())
            self._host.append(
                rows.as_strided(
                    (rows.shape[0], blocks_per_chunk, page_bytes),
                    (rows.stride(0), page_bytes, 1),
                    rows.storage_offset(),
                ).numpy()
            )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks of the engine to host memory."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy blocks of host memory to the engine."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, as copies are synchronous."""

    def copy_in(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        """Copy rows of host memory into blocks of one KV tensor; return the bytes. A row has one block."""
        engine, host = self._engine[tensor], self._host[tensor]
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            engine[block] = host[row, 0]
        return len(blocks) * int(engine.shape[1])

    def shutdown(self) -> None:
        """Release the shared region."""
        self._engine.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, engine_spec: GPULoadStoreSpec, host_spec: LoadStoreSpec, *, is_store: bool) -> bool:
        started_s, num_bytes = time.perf_counter(), 0
        for move in self._transfers(engine_spec, host_spec):
            for engine, host in self._tensors(move.group):
                for block, chunk, part in move.places:
                    if is_store:
                        host[chunk, part] = engine[block]
                    else:
                        engine[block] = host[chunk, part]
                num_bytes += len(move.places) * engine.shape[1]
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - started_s))
        return True

    def _transfers(self, engine: GPULoadStoreSpec, host: LoadStoreSpec) -> Iterator[_Transfer]:
        """Yield each group's blocks with their places; the first may begin inside an offload block."""
        first_block = first_chunk = 0
        block_ids, chunk_ids = engine.block_ids.tolist(), host.block_ids.tolist()
        for group, (num_blocks, first_index) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not num_blocks:
                continue
            first_part = first_index % self._blocks_per_chunk
            places = []
            for i in range(num_blocks):
                chunk, part = divmod(first_part + i, self._blocks_per_chunk)
                places.append((block_ids[first_block + i], chunk_ids[first_chunk + chunk], part))
            yield _Transfer(group, places)
            first_block += num_blocks
            first_chunk += chunk + 1

    def _tensors(self, group: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ref in self._groups[group]:
            yield self._engine[ref.tensor_idx], self._host[ref.tensor_idx]


class PlainCopies:
    """The copy stream of a worker without a GPU: copies are synchronous."""

    def __init__(self, worker: CopyingWorker) -> None:
        self._worker = worker

    def begin(self) -> None:
        """Do nothing, as earlier work is done."""

    def copy(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        """Copy rows of host memory into blocks of a KV tensor; return the bytes."""
        return self._worker.copy_in(tensor, rows, blocks)

    def record(self) -> PastEvent:
        """Return the present time."""
        return PastEvent()
