"""Host and disk below the GPU: vLLM's tiering offload, with the knowledge tree's policy and our disk tier."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform

from ragcache_core.chunkstore.regrowing import regrow
from ragcache_core.errors import CacheTierError, ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.runtime.shared_memory import outlives_engine, sweep_shared_memory
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.build_context import current_context
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.cache.forgetting import OutOfReach, why_in_store, why_on_disk
from ragcache_core.vllm_plugin.compat import (
    CanonicalKVCaches,
    CPUOffloadingWorker,
    CPUPrimaryTierOffloadingManager,
    OffloadingConfig,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    SecondaryTierFactory,
    SecondaryTierManager,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    build_offloading_config,
)
from ragcache_core.vllm_plugin.identity import kv_identity
from ragcache_core.vllm_plugin.offload.cpu_worker import PlainCopies, copying_worker, worker_region
from ragcache_core.vllm_plugin.offload.device_copies import DeviceCopies
from ragcache_core.vllm_plugin.offload.host_index import HostIndex
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import can_load_by_layer
from ragcache_core.vllm_plugin.offload.layer_loads import LayerCopies, LayerLoadWorker, tensors_by_layer
from ragcache_core.vllm_plugin.offload.tiered_manager import TieredManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logger_of(__name__)


def why_no_host(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, worker_bytes: int | None = None) -> str | None:
    """Return why a host tier of default size is impossible, with a hint; None where it is possible.

    ``worker_bytes`` is what each worker has of a block there, where it is not what this one's blocks take.
    """
    assert vllm_config.kv_transfer_config is not None
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not extra_config.get("is_host_optional"):
        return None
    spec = TieringOffloadingSpec(_with_rows(build_offloading_config(vllm_config, kv_cache_config), worker_bytes))
    if _num_chunks(spec, kv_cache_config):
        return None
    return (
        f"its default size here is {extra_config['cpu_bytes_to_use']}, a block of KV of this model needs "
        f"{spec.kv_bytes_per_chunk}: set host_bytes, or free some memory"
    )


def _num_chunks(spec: TieringOffloadingSpec, kv_cache_config: KVCacheConfig) -> int:
    """Return how many offload blocks host memory holds; by default as many as the GPU KV cache, if they fit."""
    num_chunks: int = spec.num_chunks
    if (most_bytes := spec.extra_config.get("most_host_bytes")) is not None:
        in_engine = kv_cache_config.num_blocks // spec.blocks_per_chunk
        num_chunks = max(num_chunks, min(in_engine, int(most_bytes) // spec.kv_bytes_per_chunk))
    return num_chunks


def _with_rows(config: OffloadingConfig, worker_bytes: int | None) -> OffloadingConfig:
    return config if worker_bytes is None else replace(config, worker_kv_bytes_per_block=worker_bytes)


class RAGCacheSpec(TieringOffloadingSpec):
    """Builds the host tier, the disk tier below it, and the copying worker of a platform without a GPU.

    On the scheduler's side it also makes the :class:`CacheController`, which all of them share.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(_with_rows(config, current_context().worker_bytes))
        if current_context().groups is None:
            self.secondary_tier_configs: list[dict[str, Any]] = []
        self.offload_prompt_only = False  # each request says how much: CacheController.num_storable_tokens()
        self.num_chunks = _num_chunks(self, current_context().kv_cache_config)
        if self.num_chunks < 1:
            raise ConfigError(
                f"host_bytes is {self.extra_config['cpu_bytes_to_use']}, a block of KV of this model needs "
                f"{self.kv_bytes_per_chunk}: raise host_bytes, or leave host and disk out with host_bytes=0"
            )
        self.controller: CacheController | None = None
        self._tiers: TieredManager | None = None
        self._worker: OffloadingWorker | None = None
        self.layer_loads: LayerLoadWorker | None = None
        context = current_context()
        self.loads_by_layer = can_load_by_layer(context.settings, self, context.vllm_config, context.kv_cache_config)
        context.loads_by_layer = self.loads_by_layer
        self._engine = context.vllm_config, context.kv_cache_config

    def get_manager(self) -> OffloadingManager:
        if self._tiers is None:
            sweep_shared_memory(self.config.engine_id)
            report = TierReport(self.num_chunks * self.kv_bytes_per_chunk, self.kv_bytes_per_chunk)
            self.controller = current_context().make_controller(report)
            self._warn_of_little_memory(report)
            manager: TieredManager = self._build()
            self._tiers = manager
            host = manager.primary_tier
            if isinstance(host, HostTier):
                report.num_other_blocks = lambda: host.num_other_blocks
                self._restore_host(manager, host)
                if STARTED_AGAIN_ENV in os.environ:
                    host.rows.mark_all_written()
        return self._tiers

    def _warn_of_little_memory(self, host: TierReport) -> None:
        in_engine = current_context().kv_cache_config.num_blocks // self.blocks_per_chunk
        if host.num_blocks < in_engine // 2:
            logger.warning(
                "RC-HOST-SMALL: RAGCache's host memory has %.1f GiB, less than half of the %.1f GiB of KV that the GPU "
                "has, so evicted blocks are seldom found there: raise host_bytes",
                host.capacity_bytes / (1 << 30),
                in_engine * self.kv_bytes_per_chunk / (1 << 30),
            )

    def _build(self) -> TieredManager:
        """Return the tiers, without disk and shared store where an engine that served before has lost them."""
        assert self.controller is not None
        holders = self.controller.forgetting.holders
        try:
            return self._build_tiers()
        except (CacheTierError, ConfigError) as error:  # the latter where its key is gone
            if STARTED_AGAIN_ENV not in os.environ:
                raise
            disks = [tier for tier in self.secondary_tier_configs if "directory" in tier]
            what = "disk tier" if disks else "shared store"
            logger.error("RC-TIER-OFF: RAGCache's %s is out of service until the next start: %s", what, error)
        for holder in self.controller.forgetting.holders[len(holders) :]:  # they are shut down
            self.controller.forgetting.remove_holder(holder)
        self.controller.shared = None
        if disks:
            self.controller.tree.clear_tier(Tier.DISK)
            capacity_bytes = sum(int(tier["capacity_bytes"]) for tier in disks)
            self.controller.add_tier(Tier.DISK, TierReport(capacity_bytes, self.kv_bytes_per_chunk, is_enabled=False))
            self.controller.forgetting.add_holder(OutOfReach(why_on_disk(tier["directory"] for tier in disks)))
        for tier in self.secondary_tier_configs:
            if "url" in tier:
                self.controller.forgetting.add_holder(OutOfReach(why_in_store(tier["url"])))
        self.secondary_tier_configs = []
        return self._build_tiers()

    def _build_tiers(self) -> TieredManager:
        """Return host memory and what is below it; where one cannot be opened, those before it are closed."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=None,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        with ExitStack() as opened:
            primary = self._build_host(region)
            opened.callback(primary.shutdown)
            tiers: list[SecondaryTierManager] = []
            for config in self.secondary_tier_configs:
                tiers.append(SecondaryTierFactory.create_secondary_tier(config, primary.get_kv_memoryview(), self))
                opened.callback(tiers[-1].shutdown)
            manager = TieredManager(primary, tiers)
            opened.pop_all()
        return manager

    def _build_host(self, region: SharedOffloadRegion) -> HostTier | CPUPrimaryTierOffloadingManager:
        has_events = self.kv_events_config.enable_kv_cache_events
        if current_context().groups is None:
            return CPUPrimaryTierOffloadingManager(self.num_chunks, region, "lru", enable_events=has_events)
        assert self.controller is not None
        is_selective = self.controller.tree.policy.is_selective and not self.secondary_tier_configs
        return HostTier(self.num_chunks, self.controller, region, is_selective=is_selective, has_events=has_events)

    def _restore_host(self, manager: TieredManager, host: HostTier) -> None:
        """Take up what an engine that was killed left in host memory, and keep book for the next one.

        Not with a disk tier, which has it all.
        """
        if not outlives_engine(self.config.engine_id) or manager.secondary_tiers:
            return
        assert self.controller is not None
        view = host.get_kv_memoryview()
        rows = np.frombuffer(view, np.uint8).reshape(view.shape)
        try:
            journal = HostIndex.open(self.config.engine_id, rows, kv_identity(self.config))
        except (ConfigError, CacheTierError, OSError) as error:
            logger.warning("RC-HOST-NOT-KEPT: the host tier will not survive a crash of the engine: %s", error)
            return
        chunks = {entry.key: (chunk, entry) for chunk, entry in journal.restored}
        found, orphans = regrow(
            self.controller.tree,
            (entry for _, entry in chunks.values()),
            Tier.HOST,
            self.controller.tokens_per_block,
            host.groups.unit_of_entry,
        )
        journal.unseal([chunks[name][0] for name in orphans])
        host.adopt({OffloadKey(host.groups.key_of_name(name)): chunks[name][0] for name in found})
        host.journal = journal
        if found:
            logger.info("RAGCache found %d blocks of KV in host memory", len(found))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = worker = copying_worker(self, kv_caches)
            self.layer_loads = self._layer_loads(PlainCopies(worker), kv_caches)
        return self._worker

    def _layer_loads(self, copies: LayerCopies, kv_caches: CanonicalKVCaches) -> LayerLoadWorker | None:
        if not self.loads_by_layer:
            return None
        return LayerLoadWorker(copies, len(kv_caches.tensors), tensors_by_layer(*self._engine, kv_caches))

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        """Return vLLM's worker on a GPU, with :attr:`layer_loads` of the same memory beside it."""
        if not self.loads_by_layer:
            return super().create_worker(kv_caches)
        region = worker_region(self)
        try:
            worker = CPUOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
            first_byte = (region.rank or 0) * self.cpu_page_size_per_worker
            copies = DeviceCopies(kv_caches, region, row_bytes=self.kv_bytes_per_chunk, first_byte=first_byte)
            self.layer_loads = self._layer_loads(copies, kv_caches)
        except BaseException:
            region.cleanup()
            raise
        return worker
