"""The connectors of chunk reuse, which provide a prompt even if nothing of it is saved: a recompute fraction of 1."""

from __future__ import annotations

from typing import Any

from ragcache_core.vllm_plugin.chunk_connector import ChunkDocumentConnector, ChunkRAGCacheConnector
from ragcache_core.vllm_plugin.compat import KVConnectorRole


class EagerDocumentConnector(ChunkDocumentConnector):
    """The GPU tier alone."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling.plans.least_reused_tokens = 0


class EagerRAGCacheConnector(ChunkRAGCacheConnector):
    """GPU and host."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling.plans.least_reused_tokens = 0
