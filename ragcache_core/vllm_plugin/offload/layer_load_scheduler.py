"""Layer-wise loads on the scheduler's side: choose the requests that load this way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.compat import TieringOffloadingSpec
    from ragcache_core.vllm_plugin.offload.copy_scheduler import CopyScheduler
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


class LayerLoads:
    """Chooses a layer-wise or an asynchronous load for each request.

    An asynchronous load lets the engine compute other requests meanwhile, and costs its own request the load and the
    rest of the running step. A layer-wise load begins with the request's first step, and all requests of this step
    wait for what is not loaded in time. So a request loads layer by layer if the engine runs nothing else, and if its
    load is expected to take no longer than its own prefill.

    Args:
        copies: begins the loads.
        controller: knows how long a prefill takes.
    """

    def __init__(self, copies: CopyScheduler, controller: CacheController) -> None:
        self._copies = copies
        self._controller = controller
        self._tokens_per_block = controller.tokens_per_block
        self._first_token: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._bytes_per_s = 0.0

    def choose(self, request: Request, num_local_tokens: int, num_tokens: int) -> int:
        """Return how many of the tokens hit in host memory a request loads layer by layer; 0 for none.

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
        """Begin the chosen load of a request with allocated blocks; return whether there is one."""
        self._admitted.add(request.request_id)
        first_token = self._first_token.pop(request.request_id, None)
        if first_token is None or not num_tokens:
            return False
        self._copies.load_by_layer(request, blocks, first_token, num_tokens)
        return True

    def drop(self, request_id: str) -> None:
        """Remove an ended request."""
        self._admitted.discard(request_id)
        self._first_token.pop(request_id, None)

    def on_loaded(self, num_bytes: int, seconds: float) -> None:
        """Record the durations of loads of both kinds."""
        if seconds > 0:
            rate = num_bytes / seconds
            self._bytes_per_s += (rate - self._bytes_per_s) * (_RATE_WEIGHT if self._bytes_per_s else 1.0)

    def reset(self) -> None:
        """Drop all choices, as host memory is emptied."""
        self._first_token.clear()
