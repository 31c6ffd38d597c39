"""Layer-wise loads on the scheduler's side: which requests load this way, and which rows of host memory they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import CPULoadStoreSpec, FullAttentionSpec, OffloadingConnectorMetadata
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoad, LayerLoadMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.compat import OffloadingConnector, OffloadKey, ReqContext, TieringOffloadingSpec
    from ragcache_core.vllm_plugin.settings import PluginSettings

_RATE_WEIGHT = 0.2
"""Weight of the latest load in the measured rate: about the last ten loads count."""


def can_load_by_layer(
    settings: PluginSettings, spec: TieringOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> bool:
    """Return whether an engine's requests may load layer by layer.

    The model has one KV cache group of full attention, and a block of it is one row of host memory. Drafts of
    speculative decoding, context parallelism and two batches at once read KV in other places or streams.
    """
    is_on = settings.layerwise_loads
    if is_on is None:
        is_on = current_platform.is_cpu()
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    return (
        is_on
        and (current_platform.is_cpu() or current_platform.is_cuda_alike())
        and settings.chunk_reuse is None
        and len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and spec.blocks_per_chunk == 1
        and spec.tokens_per_hash == groups[0].kv_cache_spec.block_size
        and not spec.config.canonical_layout
        and vllm_config.speculative_config is None
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and not parallel.use_ubatching
    )


class _Job(NamedTuple):
    """A load that workers have not all ended."""

    keys: Sequence[OffloadKey]
    context: ReqContext
    rows: list[int]
    num_pending: int


class LayerLoads:
    """Chooses between a layer-wise and an asynchronous load for each request, and owns the layer-wise ones.

    An asynchronous load lets the engine compute other requests meanwhile, and costs its own request the load and the
    rest of the running step. A layer-wise load begins with the request's first step, and all requests of this step
    wait for what is not loaded in time. So a request loads layer by layer if the engine runs nothing else, and if its
    load is expected to take no longer than its own prefill.

    Args:
        connector: whose scheduler of copies knows the requests' keys.
        controller: knows how long a prefill takes.
        num_workers: each of them ends each load.
    """

    def __init__(self, connector: OffloadingConnector, controller: CacheController, *, num_workers: int) -> None:
        self._connector = connector
        self._controller = controller
        self._tokens_per_block = controller.tokens_per_block
        self._num_workers = num_workers
        self._first_token: dict[str, int] = {}
        self._new: list[LayerLoad] = []
        self._jobs: dict[int, _Job] = {}
        self._num_loads = 0
        self._admitted: set[str] = set()
        self._bytes_per_s = 0.0

    def __len__(self) -> int:
        """Return how many loads have not ended."""
        return len(self._jobs)

    def choose(self, request: Request, num_local_tokens: int, num_tokens: int) -> int:
        """Return how many of the tokens found in host memory a request loads layer by layer; 0 for none.

        At least one token of the prompt is left to compute. A layer-wise load leaves the whole last block to this
        step: its KV must not be loaded over what the step computes.

        Args:
            request: that was looked up.
            num_local_tokens: tokens found on the GPU, in whole blocks.
            num_tokens: tokens found below.
        """
        self._first_token.pop(request.request_id, None)
        most: int = (request.num_tokens - 1 - num_local_tokens) // self._tokens_per_block * self._tokens_per_block
        num_loaded = min(num_tokens, most)
        if num_loaded <= 0 or num_loaded % self._tokens_per_block:
            return 0
        if not self._is_better(request.request_id, num_local_tokens + num_loaded, num_loaded // self._tokens_per_block):
            return 0
        self._first_token[request.request_id] = num_local_tokens
        return num_loaded

    def _is_better(self, request_id: str, num_cached_tokens: int, num_blocks: int) -> bool:
        if len(self._admitted) == (request_id in self._admitted):
            return True
        if not (self._bytes_per_s and self._controller.is_profiled):
            return False
        load_s = num_blocks * self._controller.block_bytes / self._bytes_per_s
        return load_s <= self._controller.prefill_s(request_id, num_cached_tokens)

    def begin(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> bool:
        """Begin the load that was chosen for a request which has its blocks now; return whether there is one."""
        self._admitted.add(request.request_id)
        first_token = self._first_token.pop(request.request_id, None)
        if first_token is None or not num_tokens:
            return False
        offloading, size = self._connector.scheduler, self._tokens_per_block
        state = offloading._req_status[request.request_id]
        first, end = first_token // size, (first_token + num_tokens) // size
        group = state.group_states[0]
        keys = group.offload_keys[first:end]
        source = offloading.manager.prepare_load(keys, state.req_context)
        assert isinstance(source, CPULoadStoreSpec)
        targets = np.array([block.block_id for block in blocks.blocks[0][first:end]], np.int64)
        self._num_loads += 1
        load = LayerLoad(-self._num_loads, source.block_ids.astype(np.int64), targets)
        self._new.append(load)
        self._jobs[load.number] = _Job(keys, state.req_context, load.rows.tolist(), self._num_workers)
        group.next_stored_chunk_idx = max(group.next_stored_chunk_idx, end)
        state.load_key_ranges = [((first + i) * size, (first + i + 1) * size, key) for i, key in enumerate(keys)]
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request that ends."""
        self._admitted.discard(request_id)
        self._first_token.pop(request_id, None)

    def with_new(self, metadata: OffloadingConnectorMetadata) -> OffloadingConnectorMetadata:
        """Return a step's metadata with the loads that began since the last step."""
        if not self._new:
            return metadata
        new, self._new = self._new, []
        return LayerLoadMetadata(metadata.load_jobs, metadata.store_jobs, metadata.jobs_to_flush, new)

    def on_loaded(self, num_bytes: int, seconds: float) -> None:
        """Take in how long loads took, of both kinds."""
        if seconds > 0:
            rate = num_bytes / seconds
            self._bytes_per_s += (rate - self._bytes_per_s) * (_RATE_WEIGHT if self._bytes_per_s else 1.0)

    def end(self, completed_jobs: dict[int, int]) -> None:
        """Release the rows of ended loads, and take these out of what workers ended.

        Args:
            completed_jobs: how many workers ended a copy, by its number.
        """
        for number in [number for number in completed_jobs if number < 0]:
            num_ended = completed_jobs.pop(number)
            if (job := self._jobs.pop(number, None)) is None:
                continue  # from before a reset
            if job.num_pending > num_ended:
                self._jobs[number] = job._replace(num_pending=job.num_pending - num_ended)
            else:
                self._connector.scheduler.manager.complete_load(job.keys, job.context)

    def reset(self) -> Mapping[int, tuple[int, list[int]]]:
        """Forget all loads; return the rows that workers still read: number -> pending workers, rows."""
        jobs, self._jobs = self._jobs, {}
        self._first_token.clear()
        return {number: (job.num_pending, job.rows) for number, job in jobs.items()}
