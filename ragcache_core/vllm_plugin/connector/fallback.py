"""The connector for an unknown vLLM: it reads documents and reports statistics only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.connector.minimal import MinimalConnector, warn_alone

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class FallbackConnector(DocumentConnector):
    """A :class:`DocumentConnector`, or if that cannot be created a :class:`MinimalConnector`."""

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        try:
            made = DocumentConnector(vllm_config, role, kv_cache_config)
        except ConfigError:
            raise
        except Exception:  # something else that it needs is not there: an engine starts
            return MinimalConnector(vllm_config, role, kv_cache_config)
        warn_alone(role)
        return made
