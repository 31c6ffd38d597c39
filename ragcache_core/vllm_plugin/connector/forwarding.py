"""A connector that forwards vLLM's calls to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from ragcache_core.vllm_plugin.connector.minimal import MinimalConnector

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ForwardingConnector(MinimalConnector):
    """Forwards calls to a connector, or to an object with its scheduler-side methods."""

    below: Any

    def shutdown(self) -> None:
        self.below.shutdown()

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.below, KVConnectorBase_V1):
            self.below.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.below.on_new_request(request)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = self.below.get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata: KVConnectorMetadata = self.below.build_connector_meta(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.below.update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        events: Iterable[KVCacheEvent] = self.below.take_events()
        return events

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.below.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.below.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.below.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.below.clear_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.below.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        self.below.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished: tuple[set[str] | None, set[str] | None] = self.below.get_finished(finished_req_ids)
        return finished

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        metadata: KVConnectorWorkerMetadata | None = self.below.build_connector_worker_meta()
        return metadata
