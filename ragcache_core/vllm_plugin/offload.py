"""Host and disk below the GPU: vLLM's tiering offload, with the knowledge tree's policy and our disk tier."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.platforms import current_platform

from ragcache_core.client.shared_memory import sweep_shared_memory
from ragcache_core.errors import ConfigError
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.compat import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingManager,
    OffloadingWorker,
    SharedOffloadRegion,
    TieringOffloadingManager,
    TieringOffloadingSpec,
    host_policy_of,
)
from ragcache_core.vllm_plugin.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.cpu_worker import CopyingWorker
from ragcache_core.vllm_plugin.settings import PluginSettings

logger = init_logger(f"vllm.{__name__}")


class RAGCacheSpec(TieringOffloadingSpec):
    """Builds the host tier, the disk tier below it, and the copying worker of a platform without a GPU.

    On the scheduler's side it also makes the :class:`CacheController`, which all of them share.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if len(config.groups) > 1:
            raise ConfigError(
                f"this model has {len(config.groups)} groups of KV caches, RAGCache's host and disk tiers are for one: "
                "set host_bytes=0 and leave disk_bytes out"
            )
        if self.num_chunks < 1:
            raise ConfigError(
                f"host_bytes is {self.extra_config['cpu_bytes_to_use']}, a block of KV of this model needs "
                f"{self.kv_bytes_per_chunk}: raise host_bytes, or set it to 0"
            )
        self.controller: CacheController | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            sweep_shared_memory(self._engine_id)
            settings = PluginSettings.from_extra_config(self.extra_config)
            self.controller = CacheController(
                settings,
                tokens_per_block=self.tokens_per_hash,
                shadow_blocks=self.num_chunks,
                prefill_cost=settings.prefill_cost(),
            )
            self.controller.tiers[Tier.HOST] = TierReport(
                self.num_chunks * self.kv_bytes_per_chunk, self.kv_bytes_per_chunk
            )
            manager = super().get_manager()
            assert isinstance(manager, TieringOffloadingManager)
            host_policy_of(manager).controller = self.controller
        assert self._manager is not None
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
            except BaseException:
                region.cleanup()
                raise
        return self._worker
