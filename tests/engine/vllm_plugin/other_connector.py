"""Another connector beside ours: it keeps prompts that ended, and offers what it has of them. The scheduler's side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

BLOCK = 16


@dataclass
class Loads(KVConnectorMetadata):
    """What a step loads: block -> the tokens up to its end, in layer 0; and whose load ends with it."""

    loads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps every other prompt; what it offers is loaded with the step, or with ``is_async`` before it."""

    kept: ClassVar[set[tuple[int, ...]]] = set()
    num_loaded: ClassVar[int] = 0
    finished: ClassVar[list[str]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.is_async = bool(self._kv_transfer_config.kv_connector_extra_config.get("is_async"))
        self._loads = Loads()
        self._first: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, end = tuple(request.prompt_token_ids), 0
        self._first[request.request_id] = num_computed_tokens
        while tokens[: end + BLOCK] in self.kept and end + BLOCK < len(tokens):
            end += BLOCK
        return max(end - num_computed_tokens, 0), self.is_async and end > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        type(self).num_loaded += num_external_tokens
        first, tokens = self._first[request.request_id], tuple(request.prompt_token_ids)
        (ids,) = blocks.get_block_ids()
        for i in range(first // BLOCK, (first + num_external_tokens) // BLOCK):
            self._loads.loads[ids[i]] = (0, *tokens[: (i + 1) * BLOCK])
        if self.is_async:
            self._loads.received.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        self.finished.append(request.request_id)
        tokens = tuple(request.prompt_token_ids)
        if request.num_computed_tokens >= len(tokens) and len(self.finished) % 2:
            self.kept.update(tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK))
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
