"""The connector with host memory, through which vLLM uses the tiers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from ragcache_core.log import logger_of
from ragcache_core.runtime.shared_memory import empty_region, region_place
from ragcache_core.types import Origin, Tier
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    OffloadingSpecFactory,
    OffloadingWorkerMetadata,
    RequestStatus,
    build_offloading_config,
    bytes_of_stages,
    kv_bytes_per_block,
)
from ragcache_core.vllm_plugin.connector.forwarding import ForwardingConnector
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentAware, DocumentConnector
from ragcache_core.vllm_plugin.connector.minimal import MinimalConnector
from ragcache_core.vllm_plugin.disk.prefetcher import DiskPrefetcher
from ragcache_core.vllm_plugin.offload.copy_scheduler import CopyScheduler
from ragcache_core.vllm_plugin.offload.host_tier import ADAPTED, HostTier
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import LayerLoads
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadMetadata, calls_each_layer
from ragcache_core.vllm_plugin.offload.spec import why_no_host
from ragcache_core.vllm_plugin.offload.worker_memory import Rank, WorkerMemory, why_apart, why_uneven

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.build_context import BuildContext
    from ragcache_core.vllm_plugin.cache.forgetting import Holder
    from ragcache_core.vllm_plugin.lower.manager import TierManager
    from ragcache_core.vllm_plugin.lower.tier import LowerTier
    from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadWorker

logger = logger_of(__name__)

_STEPS_FOR_DISK_S = 2.0
"""How long an idle engine steps for chunks that wait for the disk: the gauges of a usual disk settle by then."""
_ORIGIN_OF_SOURCE = {
    CacheHitSource.HOST: Origin.HOST,
    CacheHitSource.DISK: Origin.DISK,
    CacheHitSource.P2P: Origin.SHARED,
    CacheHitSource.EXTERNAL_UNSPECIFIED: Origin.SHARED,
}


class RAGCacheConnector(DocumentAware, ForwardingConnector):
    """The connector with GPU and host tier and the tiers below.

    Below it are a :class:`CopyScheduler` on the scheduler's side, and vLLM's offloading on a worker. Where the tree
    cannot follow the model's KV cache groups, vLLM's offloading is below on both sides, in its own order.

    Where the host tier has its default size and holds no block, a :class:`DocumentConnector` is made instead; so it is
    on workers whose parts of a block do not fit into its row, and then the scheduler's side keeps nothing below the
    GPU.
    """

    tiers: TierManager | None = None
    """On the scheduler's side where the tree orders them: host memory and the tiers below it."""
    copies: CopyScheduler | None = None
    """On the scheduler's side, beside ``tiers``."""
    _worker_bytes: int | None = None
    _prefetcher: DiskPrefetcher | None = None
    _layer_loads: LayerLoads | None = None
    _layer_worker: LayerLoadWorker | None = None
    _step: KVConnectorMetadata | None = None
    _waits_for: int | None = None
    _waits_since_s = 0.0

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        worker_bytes = None
        if role == KVConnectorRole.WORKER and vllm_config.parallel_config.pipeline_parallel_size > 1:
            block_bytes = bytes_of_stages(kv_bytes_per_block(kv_cache_config))
            worker_bytes = block_bytes[0]
            if why_uneven(block_bytes):
                return cls.without_host()(vllm_config, role, kv_cache_config)
        why = why_no_host(vllm_config, kv_cache_config, worker_bytes)
        if why is None:
            connector = super().__new__(cls)
            connector._worker_bytes = worker_bytes
            return connector
        if role == KVConnectorRole.SCHEDULER:
            logger.warning("RC-HOST-OFF: RAGCache keeps nothing in host memory: %s", why)
        return cls.without_host()(vllm_config, role, kv_cache_config)

    @classmethod
    def without_host(cls) -> type[DocumentConnector]:
        """Return the connector with the GPU tier only."""
        return DocumentConnector

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._kv_config = kv_cache_config
        self._host: HostTier | None = None
        self._worker_block_bytes = kv_bytes_per_block(kv_cache_config)
        events = vllm_config.kv_events_config
        self._emits_events = events is not None and events.enable_kv_cache_events
        with building(vllm_config, kv_cache_config) as context:
            context.worker_bytes = self._worker_bytes
            if role == KVConnectorRole.WORKER or context.groups is None:
                self.below = OffloadingConnector(vllm_config, role, kv_cache_config)
                copies = None
            else:
                spec = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, kv_cache_config))
                self.tiers = spec.get_manager()
                copies = self.below = CopyScheduler(spec, vllm_config, kv_cache_config, self.tiers)
        if context.controller is None:
            return
        self._begin(context.controller)
        if copies is not None:
            self._use(copies, context)

    def _use(self, copies: CopyScheduler, context: BuildContext) -> None:
        assert self.tiers is not None
        assert isinstance(self.tiers.host, HostTier)
        assert context.controller is not None
        self.copies, self._host = copies, self.tiers.host
        context.controller.forgetting.store_at_most = copies.store_at_most
        if context.loads_by_layer:
            self._layer_loads = LayerLoads(copies, context.controller)
        if self.tiers.lower:
            self._prefetcher = DiskPrefetcher(
                context.controller,
                self._host.promises,
                self._look_up_below,
                self._end_prefetch,
            )

    def shutdown(self) -> None:
        self._close_journal()
        super().shutdown()

    def _close_journal(self) -> None:
        if self._host is not None and self._host.journal is not None:
            self._host.journal.close()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, KVConnectorHandshakeMetadata]) -> None:
        """Check the memory of all workers, and remove tiers that cannot use it."""
        assert self.engine_config.kv_transfer_config is not None
        engine_id = str(self.engine_config.kv_transfer_config.engine_id)
        workers = {rank: said for rank, said in sorted(metadata.items()) if isinstance(said, WorkerMemory)}
        if why := why_uneven([worker.block_bytes for worker in workers.values()]):
            logger.warning("RC-TIERS-OFF: RAGCache keeps nothing below the GPU: %s", why)
            self._disable_tiers(engine_id)
        elif why := why_apart(workers, region_place(engine_id)):
            logger.warning(
                "RC-WORKERS-APART: RAGCache keeps nothing on disk, nor in host memory after a crash: %s", why
            )
            self._disable_lower_tiers()

    def _disable_tiers(self, engine_id: str) -> None:
        """Continue with the GPU tier only."""
        assert self.controller is not None
        self._close_journal()
        self.below.shutdown()
        empty_region(engine_id)
        for tier in (Tier.HOST, Tier.DISK):
            self.controller.remove_tier(tier)
        if self._host is not None:
            self.controller.forgetting.remove_holder(self._host)
        self._leave_stores()
        self.controller.forgetting.store_at_most = None
        self._prefetcher = self._host = self._layer_loads = self.tiers = self.copies = None
        self.below = MinimalConnector(self.engine_config, self.role, self._kv_config)

    def _disable_lower_tiers(self) -> None:
        """Continue without tiers that read the workers' host memory in this process: disk, shared store, journal."""
        assert self.controller is not None
        for tier in self._lower:
            tier.shutdown()
        self._leave_stores()
        self._lower.clear()
        self.controller.remove_tier(Tier.DISK)
        self.below.reset_cache()

    def _leave_stores(self) -> None:
        """Let later deletions report that disks and stores may have KV of earlier starts."""
        assert self.controller is not None
        for tier in self._lower:
            self.controller.forgetting.remove_holder(cast("Holder", tier), deletion_problem=tier.undeleted_reason)
        self.controller.shared = None

    @property
    def _lower(self) -> list[LowerTier]:
        return [] if self.tiers is None else self.tiers.lower

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._prefetcher is not None and not self.is_audit(request):
            self._prefetcher.add(request)

    def prefetch(self, request: Request) -> bool:
        if self._prefetcher is None or not self._prefetcher.reads(request):
            return False
        self.below.on_new_request(request)
        self._prefetcher.add_prompt(request)
        return True

    def _end_prefetch(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        self._forget_promises(request)
        self.below.request_finished_all_groups(request, ())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the workers' copies, and count the stores."""
        assert self.controller is not None
        if self._prefetcher is not None:
            self._prefetcher.begin_reads()
        if self._host is not None:
            self._host.note_names()
        metadata = super().build_connector_meta(scheduler_output)
        if isinstance(metadata, OffloadingConnectorMetadata):
            for job in metadata.store_jobs.values():
                self.controller.on_stored(job.req_id, len(job.src_spec.block_ids) * self._block_bytes)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.controller is not None
        meta = connector_output.kv_connector_worker_meta
        if self._layer_loads is not None and isinstance(meta, OffloadingWorkerMetadata):
            self._layer_loads.on_loaded(meta.transfer_stats.load.bytes, meta.transfer_stats.load.time)
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self.controller.on_load_ended(request_id, time.monotonic())
        if connector_output.invalid_block_ids and self.copies is not None:
            # What another connector failed to load in this step is being stored under the hash of what it should be.
            self.copies.spoil_stores()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return super().take_events() if self._emits_events else ()  # otherwise vLLM calls each tier in each step

    def has_pending_push_work(self) -> bool:
        """Return whether an engine without requests continues stepping; for a slow disk only for some time."""
        assert self.controller is not None
        self.controller.forgetting.sweep()
        if self.below.has_pending_push_work():
            return True
        if self._prefetcher is not None and self._prefetcher.is_prefetching:
            return True
        if self.tiers is None:
            return False
        if self._emits_events and self.tiers.has_events:
            return True
        newest, now_s = self.tiers.newest_store, time.monotonic()
        if newest != self._waits_for:
            self._waits_for, self._waits_since_s = newest, now_s
        return newest is not None and now_s - self._waits_since_s < _STEPS_FOR_DISK_S

    def reset_cache(self) -> bool | None:
        if self._layer_loads is not None:
            self._layer_loads.reset()
        is_reset: bool | None = self.below.reset_cache()
        self._on_reset()
        return is_reset

    def forget_weights(self) -> None:
        for tier in self._lower:
            tier.clear()

    @property
    def _block_bytes(self) -> int:
        assert self.controller is not None
        return self.controller.block_bytes

    def _limit_storing(self, request: Request) -> None:
        assert self.controller is not None
        params = dict(request.kv_transfer_params or {})
        limit = self.controller.num_storable_tokens(request.request_id)
        if limit is not None:
            asked = params.get("max_offload_tokens")
            params["max_offload_tokens"] = min(limit, asked) if type(asked) is int and asked >= 0 else limit
        if request.lora_request is not None:
            params[ADAPTED] = True
        if params:
            request.kv_transfer_params = params

    def _match_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._host is not None and self._host.promises.is_awaited(request.request_id, num_computed_tokens):
            return None, False
        num_tokens, is_async = self._look_up_below(request, num_computed_tokens)
        if not num_tokens or self._layer_loads is None or self._has_other_connectors:
            return num_tokens, is_async
        num_loaded = self._layer_loads.choose(request, num_computed_tokens, num_tokens)
        return (num_loaded, False) if num_loaded else (num_tokens, is_async)

    def _look_up_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._host is not None:
            self._host.begin_lookup(request.request_id, num_computed_tokens)
        try:
            matched: tuple[int | None, bool] = self.below.get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            if self._host is not None:
                self._host.end_lookup()
        if matched[0] == 0:
            self._forget_promises(request)
        return matched

    def _forget_promises(self, request: Request) -> None:
        if self._host is not None:
            self._host.drop_promises(request.request_id)
        if self._prefetcher is not None:
            self._prefetcher.remove(request.request_id)

    def _load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> dict[Origin, int]:
        if self._layer_loads is None or not self._layer_loads.begin(request, blocks, num_external_tokens):
            self.below.update_state_after_alloc(request, blocks, num_external_tokens)
        self._forget_promises(request)
        if not num_external_tokens:
            if self._has_other_connectors and self.copies is not None:
                # Another connector may load into any of them, before this step or in it.
                self.copies.fence([block_id for group in blocks.get_block_ids() for block_id in group])
            return {}
        assert self.controller is not None
        num_blocks = -(-num_external_tokens // self.controller.tokens_per_block)
        self.controller.on_loaded(request.request_id, num_blocks * self._block_bytes)
        by_origin: dict[Origin, int] = {}
        for source, num_tokens in self.get_external_cache_hit_sources(request, num_external_tokens).items():
            origin = _ORIGIN_OF_SOURCE.get(source, Origin.HOST)
            by_origin[origin] = by_origin.get(origin, 0) + num_tokens
        return by_origin

    def _finish_below(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._forget_promises(request)
        if self._layer_loads is not None:
            self._layer_loads.drop(request.request_id)
        outcome: tuple[bool, dict[str, Any] | None] = self.below.request_finished_all_groups(request, block_ids)
        return outcome

    def _stats_below(self) -> KVConnectorStats | None:
        stats: KVConnectorStats | None = self.below.get_kv_connector_stats()
        return stats

    def _num_copies(self) -> int:
        if self.tiers is None or self.copies is None:
            return 0
        return self.copies.num_jobs + self.tiers.num_open_jobs

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        layout: str | None = OffloadingConnector.get_required_kvcache_layout(vllm_config)
        return layout

    # On a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._layer_worker = self.below.connector_worker.spec.layer_loads

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._layer_worker is not None and isinstance(self._step, LayerLoadMetadata):
            self._layer_worker.start(self._step.layer_loads, waits_by_layer=calls_each_layer(forward_context))
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let a layer wait for its KV, which is loaded from host memory while earlier layers are computed."""
        if self._layer_worker is not None:
            self._layer_worker.wait(layer_name)

    def wait_for_save(self) -> None:
        if self._layer_worker is not None:
            self._layer_worker.end_step()
        super().wait_for_save()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        for finished in () if self._layer_worker is None else self._layer_worker.take_finished():
            if meta is None:
                meta = OffloadingWorkerMetadata()
            assert isinstance(meta, OffloadingWorkerMetadata)
            for number in finished.numbers:
                meta.mark_completed(number)
            meta.transfer_stats.load.record(finished.num_bytes, finished.seconds)
        return meta
