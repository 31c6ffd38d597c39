"""vLLM's door to the tiers: the connector of an engine with host memory, over vLLM's own offloading."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    OffloadingConnector,
    OffloadingWorkerMetadata,
    RequestStatus,
    bytes_of_stages,
    kv_bytes_per_block,
)
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentAware, DocumentConnector
from ragcache_core.vllm_plugin.disk.prefetcher import DiskPrefetcher
from ragcache_core.vllm_plugin.offload.compat import (
    NoOffloading,
    fence_blocks,
    needs_steps,
    num_copies_of_blocks,
    rows_in_copies,
    spoil_stores,
    stop_storing,
    store_at_most,
)
from ragcache_core.vllm_plugin.offload.host_tier import ADAPTED, HostTier
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import LayerLoads
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadMetadata, calls_each_layer
from ragcache_core.vllm_plugin.offload.spec import why_no_host
from ragcache_core.vllm_plugin.offload.storing import StoringRequests
from ragcache_core.vllm_plugin.offload.worker_memory import Rank, WorkerMemory, why_apart, why_uneven

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.compat import OffloadingConnectorMetadata
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


class RAGCacheConnector(DocumentAware, OffloadingConnector):
    """GPU, host and disk, over vLLM's offloading with :class:`~ragcache_core.vllm_plugin.offload.spec.RAGCacheSpec`.

    Where the host tier has its default size and holds no block, a :class:`DocumentConnector` is made instead; so it is
    on workers whose parts of a block do not fit into its row, and then the scheduler's side keeps nothing below the GPU
    (:class:`~ragcache_core.vllm_plugin.offload.compat.NoOffloading`).
    """

    _worker_bytes: int | None = None
    _prefetcher: DiskPrefetcher | None = None
    _layer_loads: LayerLoads | None = None
    _layer_worker: LayerLoadWorker | None = None
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
        """Return the connector for the GPU tier alone."""
        return DocumentConnector

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._host: HostTier | None = None
        self._prefetched: set[str] = set()
        self._late_copies: dict[int, tuple[int, list[int]]] = {}
        self._worker_block_bytes = kv_bytes_per_block(kv_cache_config)
        with building(vllm_config, kv_cache_config) as context:
            context.worker_bytes = self._worker_bytes
            super().__init__(vllm_config, role, kv_cache_config)
        self._storing = None if context.controller is None else StoringRequests(self)
        events = vllm_config.kv_events_config
        self._tells_events = events is not None and events.enable_kv_cache_events
        if context.controller is not None:
            host = self.scheduler.manager.host
            self._host = host if isinstance(host, HostTier) else None
            self._begin(context.controller)
            context.controller.forgetting.store_at_most = partial(store_at_most, self)
            if self._host is not None and context.loads_by_layer:
                self._layer_loads = LayerLoads(
                    self, context.controller, num_workers=vllm_config.parallel_config.world_size
                )
            if self._host is not None and self.scheduler.manager.lower:
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
        """Check the memory of all workers, and drop the tiers that cannot work with it."""
        assert self._vllm_config.kv_transfer_config is not None
        engine_id = str(self._vllm_config.kv_transfer_config.engine_id)
        workers = {rank: said for rank, said in sorted(metadata.items()) if isinstance(said, WorkerMemory)}
        if why := why_uneven([worker.block_bytes for worker in workers.values()]):
            logger.warning("RC-TIERS-OFF: RAGCache keeps nothing below the GPU: %s", why)
            self._give_up_tiers(engine_id)
        elif why := why_apart(workers, region_place(engine_id)):
            logger.warning(
                "RC-WORKERS-APART: RAGCache keeps nothing on disk, nor in host memory after a crash: %s", why
            )
            self._give_up_reading()

    def _give_up_tiers(self, engine_id: str) -> None:
        """Go on with GPU memory alone."""
        assert self.controller is not None
        self._close_journal()
        OffloadingConnector.shutdown(self)
        empty_region(engine_id)
        for tier in (Tier.HOST, Tier.DISK):
            self.controller.remove_tier(tier)
        self.controller.forgetting.remove_holder(self.scheduler.manager.host)
        self._leave_stores()
        self._prefetcher = self._host = self._storing = self._layer_loads = None
        self.connector_scheduler = NoOffloading()

    def _give_up_reading(self) -> None:
        """Go on without what reads in this process what workers have in host memory: disk, shared store and journal."""
        assert self.controller is not None
        manager = self.scheduler.manager
        for tier in manager.lower:
            tier.shutdown()
        self._leave_stores()
        manager.lower.clear()
        self.controller.remove_tier(Tier.DISK)
        OffloadingConnector.reset_cache(self)

    def _leave_stores(self) -> None:
        """Have what is forgotten from now on say that disks and stores may have it from earlier starts."""
        assert self.controller is not None
        for tier in self.scheduler.manager.lower:
            self.controller.forgetting.remove_holder(tier, why_left=tier.why_left_behind)
        self.controller.shared = None

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._prefetcher is not None:
            self._prefetcher.add(request)

    def prefetch(self, request: Request) -> bool:
        if self._prefetcher is None or not self._prefetcher.reads(request):
            return False
        OffloadingConnector.on_new_request(self, request)
        self._prefetcher.add_prompt(request)
        return True

    def _end_prefetch(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        self._forget_promises(request)
        OffloadingConnector.request_finished_all_groups(self, request, ())
        self._prefetched.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what workers have to copy, and count what they store."""
        if self._prefetched:  # other connectors do not know these requests
            ended, self._prefetched = self._prefetched, set()
            scheduler_output = replace(scheduler_output, finished_req_ids=scheduler_output.finished_req_ids | ended)
        if self._prefetcher is not None:
            self._prefetcher.begin_reads()  # with which vLLM's offloading goes on below
        if self._host is not None:
            self._host.note_names()
        if self._storing is None:  # the tiers were given up
            nothing: KVConnectorMetadata = super().build_connector_meta(scheduler_output)
            return nothing
        assert self.controller is not None
        scheduler_output = self._storing.only_changes(scheduler_output)
        metadata: OffloadingConnectorMetadata = super().build_connector_meta(scheduler_output)
        self._storing.on_shown(scheduler_output)
        for job in metadata.store_jobs.values():
            self.controller.on_stored(job.req_id, len(job.src_spec.block_ids) * self._block_bytes)
        return metadata if self._layer_loads is None else self._layer_loads.with_new(metadata)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.controller is not None
        if (meta := connector_output.kv_connector_worker_meta) is not None:
            if self._late_copies:
                self._end_late_copies(meta.completed_jobs)
            if self._layer_loads is not None:
                self._layer_loads.end(meta.completed_jobs)
                self._layer_loads.on_loaded(meta.transfer_stats.load.bytes, meta.transfer_stats.load.time)
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self.controller.on_load_ended(request_id, time.monotonic())
        if connector_output.invalid_block_ids:
            # What another connector failed to load in this step is being stored under the hash of what it should be.
            spoil_stores(self)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return super().take_events() if self._tells_events else ()  # else vLLM asks each tier in each step

    def has_pending_push_work(self) -> bool:
        """Return whether an engine without requests goes on stepping; for a disk that is slow only some time."""
        assert self.controller is not None
        self.controller.forgetting.sweep()
        if needs_steps(self) or self._late_copies or self._prefetched or self._layer_loads:
            return True
        if self._prefetcher is not None and self._prefetcher.is_prefetching:
            return True
        manager = self.scheduler.manager
        if self._tells_events and manager.has_events:
            return True
        newest, now_s = manager.newest_store, time.monotonic()
        if newest != self._waits_for:
            self._waits_for, self._waits_since_s = newest, now_s
        return newest is not None and now_s - self._waits_since_s < _STEPS_FOR_DISK_S

    def reset_cache(self) -> bool | None:
        if self._host is not None:
            self._late_copies |= rows_in_copies(self, self._host)
        if self._layer_loads is not None:
            self._late_copies |= self._layer_loads.reset()
        is_reset: bool | None = OffloadingConnector.reset_cache(self)
        if self._storing is not None and self.controller is not None:
            self._storing.on_reset(self.controller.request_ids())
            if self.controller.groups.others:  # whose blocks may be gone from the request that vLLM would store again
                stop_storing(self)
        if self._host is not None:  # else a read from disk gets a row before it is read or written for the last time
            self._host.rows.reset([row for _, rows in self._late_copies.values() for row in rows])
        self._on_reset()
        return is_reset

    def _end_late_copies(self, ended: Mapping[int, int]) -> None:
        """Free the rows of copies from before a reset that no worker uses any more.

        ``ended`` has how many workers ended a copy, by its job.
        """
        assert self._host is not None
        for job in self._late_copies.keys() & ended.keys():
            num_pending, rows = self._late_copies.pop(job)
            if num_pending > ended[job]:
                self._late_copies[job] = num_pending - ended[job], rows
            else:
                used = {row for _, others in self._late_copies.values() for row in others}
                self._host.rows.free([row for row in rows if row not in used])

    def forget_weights(self) -> None:
        for tier in self.scheduler.manager.lower:
            tier.clear()

    @property
    def _block_bytes(self) -> int:
        assert self.controller is not None
        return self.controller.block_bytes

    def _limit_storing(self, request: Request) -> None:
        if self._storing is None:
            return
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
        if not num_tokens or self._layer_loads is None or self._is_beside:
            return num_tokens, is_async
        num_loaded = self._layer_loads.choose(request, num_computed_tokens, num_tokens)
        return (num_loaded, False) if num_loaded else (num_tokens, is_async)

    def _look_up_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._host is not None:
            self._host.begin_lookup(request.request_id, num_computed_tokens)
        try:
            matched: tuple[int | None, bool] = OffloadingConnector.get_num_new_matched_tokens(
                self, request, num_computed_tokens
            )
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
            OffloadingConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        self._forget_promises(request)
        if not num_external_tokens:
            if self._is_beside:  # what another connector loads into them comes before a step that vLLM tells of
                new = (block for group in blocks.blocks for block in group if block.block_hash is None)
                fence_blocks(self, [block.block_id for block in new if not block.is_null])
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
        outcome: tuple[bool, dict[str, Any] | None] = OffloadingConnector.request_finished_all_groups(
            self, request, block_ids
        )
        return outcome

    def _stats_below(self) -> KVConnectorStats | None:
        return OffloadingConnector.get_kv_connector_stats(self)

    def _num_copies(self) -> int:
        num_layer_loads = 0 if self._layer_loads is None else len(self._layer_loads)
        return num_copies_of_blocks(self) + num_layer_loads + int(self.scheduler.manager.num_open_jobs)

    # On a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._layer_worker = self.connector_worker.spec.layer_loads

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._layer_worker is not None and isinstance(self._connector_metadata, LayerLoadMetadata):
            loads = self._connector_metadata.layer_loads
            self._layer_worker.start(loads, waits_by_layer=calls_each_layer(forward_context))
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Have a layer wait for its KV, which comes from host memory while the layers before it are computed."""
        if self._layer_worker is not None:
            self._layer_worker.wait(layer_name)

    def wait_for_save(self) -> None:
        if self._layer_worker is not None:
            self._layer_worker.end_step()
        super().wait_for_save()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta: OffloadingWorkerMetadata | None = super().build_connector_worker_meta()
        for finished in () if self._layer_worker is None else self._layer_worker.take_finished():
            meta = OffloadingWorkerMetadata() if meta is None else meta
            for number in finished.numbers:
                meta.mark_completed(number)
            meta.transfer_stats.load.record(finished.num_bytes, finished.seconds)
        return meta
