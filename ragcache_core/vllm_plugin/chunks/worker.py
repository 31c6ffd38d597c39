"""vLLM's worker, which also passes its model to RAGCache's connector for computing tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.connector import ChunkReuseConnector
from ragcache_core.vllm_plugin.compat import connector_of_this_worker, platform_worker
from ragcache_core.vllm_plugin.rendezvous import PrivateRendezvous
from ragcache_core.vllm_plugin.scheduler.seeded_prefill import EarlyRejection, SparingSeeds

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _Attaching:
    """The addition to a platform's worker; the class for ``--worker-cls`` is below."""

    model_runner: Any

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        connector = connector_of_this_worker()
        if not isinstance(connector, ChunkReuseConnector):
            raise ConfigError(
                "RAGCacheWorker needs a connector with chunk reuse: set --kv-transfer-config as Engine.launch does, or "
                "leave --worker-cls out"
            )
        connector.attach(self.model_runner)


class RAGCacheWorker(_Attaching, EarlyRejection, PrivateRendezvous, SparingSeeds, platform_worker()):  # type: ignore[misc]
    """A worker that can reuse chunks."""
