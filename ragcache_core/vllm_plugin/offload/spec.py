"""Host tier and lower tiers: vLLM's offloading with the knowledge tree's policy and RAGCache's tiers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
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
    CPUOffloadingManager,
    CPUOffloadingWorker,
    OffloadingConfig,
    OffloadingManager,
    OffloadingWorker,
    SecondaryTierFactory,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    build_offloading_config,
)
from ragcache_core.vllm_plugin.identity import kv_identity
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.lower.stats import unreported_metrics
from ragcache_core.vllm_plugin.lower.vllm_tier import VLLMTier
from ragcache_core.vllm_plugin.offload.cpu_worker import PlainCopies, copying_worker, worker_region
from ragcache_core.vllm_plugin.offload.device_copies import DeviceCopies
from ragcache_core.vllm_plugin.offload.host_index import HostIndex
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import can_load_by_layer
from ragcache_core.vllm_plugin.offload.layer_loads import LayerCopies, LayerLoadWorker, tensors_by_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ragcache_core.vllm_plugin.lower.tier import LowerTier

logger = logger_of(__name__)


def why_no_host(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, worker_bytes: int | None = None) -> str | None:
    """Return why a host tier of default size is impossible, with a hint; ``None`` if it is possible.

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
    """Return the number of offload blocks in host memory; by default as many as the GPU KV cache, if they fit."""
    num_chunks: int = spec.num_chunks
    if (most_bytes := spec.extra_config.get("most_host_bytes")) is not None:
        in_engine = kv_cache_config.num_blocks // spec.blocks_per_chunk
        num_chunks = max(num_chunks, min(in_engine, int(most_bytes) // spec.kv_bytes_per_chunk))
    return num_chunks


def _with_rows(config: OffloadingConfig, worker_bytes: int | None) -> OffloadingConfig:
    return config if worker_bytes is None else replace(config, worker_kv_bytes_per_block=worker_bytes)


def _is_own(config: Mapping[str, Any]) -> bool:
    """Return whether a lower tier is RAGCache's, not vLLM's."""
    return str(config.get("module_path", "")).startswith("ragcache_core.")


class VLLMHost(CPUOffloadingManager):
    """vLLM's host memory manager with LRU order, for models that the tree does not support."""

    def __init__(self, num_rows: int, region: SharedOffloadRegion, *, has_events: bool) -> None:
        super().__init__(num_rows, enable_events=has_events)
        self._region = region

    def shutdown(self) -> None:
        """Unmap host memory."""
        super().shutdown()
        self._region.cleanup()


class RAGCacheSpec(TieringOffloadingSpec):
    """Builds the host tier, the lower tiers, and the transfer worker without a GPU.

    On the scheduler's side it also makes the :class:`CacheController`, which all of them share.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of host memory and lower tiers, including vLLM's own ones in use."""
        of_vllm = [config for config in extra_config.get("secondary_tiers", []) if not _is_own(config)]
        metrics = super().build_metric_definitions({**extra_config, "secondary_tiers": of_vllm})
        return {name: metric for name, metric in metrics.items() if name not in unreported_metrics()}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """Return no labels for the info metric of vLLM 0.33, as RAGCache's own has the settings."""
        return ()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(_with_rows(config, current_context().worker_bytes))
        if current_context().groups is None:
            self.secondary_tier_configs: list[dict[str, Any]] = []
        if current_context().groups is not None and self.blocks_per_chunk != 1:
            raise ConfigError(
                f"blocks_per_chunk or block_size of kv_connector_extra_config asks for {self.blocks_per_chunk} blocks "
                "of KV in a block of host memory, which has one: leave both out"
            )
        self.offload_prompt_only = False  # each request says how much: CacheController.num_storable_tokens()
        self.num_chunks = _num_chunks(self, current_context().kv_cache_config)
        if self.num_chunks < 1:
            raise ConfigError(
                f"host_bytes is {self.extra_config['cpu_bytes_to_use']}, a block of KV of this model needs "
                f"{self.kv_bytes_per_chunk}: raise host_bytes, or leave host and disk out with host_bytes=0"
            )
        self.controller: CacheController | None = None
        self._tiers: TierManager | None = None
        self._copying_worker: OffloadingWorker | None = None
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
            manager: TierManager = self._build()
            self._tiers = manager
            host = manager.host
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
                "RC-HOST-SMALL: RAGCache's host memory has %.1f MiB, less than half of the %.1f MiB of KV that the GPU "
                "has, so evicted blocks are seldom found there: raise host_bytes",
                host.capacity_bytes / (1 << 20),
                in_engine * self.kv_bytes_per_chunk / (1 << 20),
            )

    def _build(self) -> TierManager:
        """Return the tiers; a restarted engine continues without a disk or shared store that cannot be opened."""
        assert self.controller is not None
        holders = self.controller.forgetting.holders
        try:
            return self._build_tiers()
        except (CacheTierError, ConfigError) as error:  # a missing key; a disk that cannot be opened is retried
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

    def _build_tiers(self) -> TierManager:
        """Return host memory and lower tiers; if one cannot be opened, close the others."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=None,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        with ExitStack() as opened:
            host = self._build_host(region)
            opened.callback(host.shutdown)
            lower: list[LowerTier] = []
            for config in self.secondary_tier_configs:
                assert isinstance(host, HostTier)
                lower.append(self._build_tier(config, host.get_kv_memoryview()))
                opened.callback(lower[-1].shutdown)
            manager = TierManager(host, lower, self.kv_bytes_per_chunk)
            opened.pop_all()
        return manager

    def _build_tier(self, config: Mapping[str, Any], host_memory: memoryview) -> LowerTier:
        """Open a lower tier, RAGCache's or one of vLLM's by name."""
        assert self.controller is not None
        if not _is_own(config):
            VLLMTier.check(config["type"], SecondaryTierFactory.get_tier_class(dict(config)))
            tier = SecondaryTierFactory.create_secondary_tier(dict(config), host_memory, self)
            return VLLMTier(tier, self.controller.groups, self.controller.forgetting)
        kind = getattr(import_module(config["module_path"]), config["type"])
        settings = {name: config[name] for name in config.keys() - {"type", "module_path", "backpressure"}}
        opened: LowerTier = kind(self, host_memory, **settings)
        return opened

    def _build_host(self, region: SharedOffloadRegion) -> HostTier | VLLMHost:
        has_events = self.kv_events_config.enable_kv_cache_events
        if current_context().groups is None:
            return VLLMHost(self.num_chunks, region, has_events=has_events)
        assert self.controller is not None
        is_selective = self.controller.tree.policy.is_selective and not self.secondary_tier_configs
        return HostTier(self.num_chunks, self.controller, region, is_selective=is_selective, has_events=has_events)

    def _restore_host(self, manager: TierManager, host: HostTier) -> None:
        """Restore host memory from a killed engine, and keep the index for the next one.

        Not with a disk tier, which has it all.
        """
        if not outlives_engine(self.config.engine_id) or manager.lower:
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
        journal.remove([chunks[key][0] for key in orphans])
        host.adopt({key: chunks[key][0] for key in found})
        host.journal = journal
        if found:
            logger.info("RAGCache found %d blocks of KV in host memory", len(found))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._copying_worker is None:
            self._copying_worker = worker = copying_worker(self, kv_caches)
            self.layer_loads = self._layer_loads(PlainCopies(worker), kv_caches)
        return self._copying_worker

    def _layer_loads(self, copies: LayerCopies, kv_caches: CanonicalKVCaches) -> LayerLoadWorker | None:
        if not self.loads_by_layer:
            return None
        return LayerLoadWorker(copies, len(kv_caches.tensors), tensors_by_layer(*self._engine, kv_caches))

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        """Return vLLM's worker on a GPU, with :attr:`layer_loads` on the same memory."""
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
