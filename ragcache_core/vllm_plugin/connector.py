"""The engine's end of the wire: reads which tokens of a request are which document.

vLLM hands ``kv_transfer_params`` to a KV connector only, so this is one. It moves no KV: vLLM's own prefix cache
serves the documents. Metadata that contradicts the prompt is ignored for that request and logged once per reason,
never an error: it distorts what is kept at most, and correctness never depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ragcache_core.errors import ConfigError
from ragcache_core.types import PromptSegment
from ragcache_core.vllm_plugin.compat import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from ragcache_core.wire import decode_kv_transfer_params

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class DocumentConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the segments of every request that is in the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.segments: dict[str, tuple[PromptSegment, ...]] = {}
        self.num_ignored = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side

    def on_new_request(self, request: Request) -> None:
        """Read the request's documents."""
        try:
            segments = decode_kv_transfer_params(request.kv_transfer_params or {}, request.num_prompt_tokens)
        except ConfigError as error:
            self.num_ignored += 1
            logger.warning_once("Ignoring the documents of a request: %s", error)
            return
        self.segments[request.request_id] = segments

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.segments.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, [])

    # Worker side: nothing to move

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
