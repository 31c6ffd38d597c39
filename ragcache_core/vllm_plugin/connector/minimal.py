"""A connector without functions: the base of RAGCache's, and the last fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.release import unsupported_reason

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logger_of(__name__)


def warn_alone(role: KVConnectorRole, also: str = "") -> None:
    """Log once per engine that only the connector is active, with the reason."""
    if role == KVConnectorRole.SCHEDULER:
        logger.warning(
            "RC-CACHE-OFF: RAGCache leaves scheduling and caching to vLLM, without tiers, speculation and chunk "
            "reuse%s: %s",
            also,
            unsupported_reason(),
        )


class MinimalConnector(KVConnectorBase_V1, SupportsHMA):
    """Hits, loads and stores nothing.

    Attributes:
        engine_config: vLLM's configuration, as given.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine_config = vllm_config
        if type(self) is MinimalConnector and unsupported_reason() is not None:
            warn_alone(role, ", and without documents and statistics")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # Worker side

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
