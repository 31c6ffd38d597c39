"""vLLM's own offloading of KV to host memory, as a peer to measure RAGCache against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ragcache_core.errors import ConfigError

VLLMEviction = Literal["lru", "arc"]
"""Which chunk vLLM's host tier gives up: the one least recently used, or the one that ARC chooses."""


@dataclass(frozen=True, slots=True)
class VLLMOffload:
    """What ``Engine.launch(cache=VLLMOffload(...))`` runs: vLLM with its own tiering, scheduler and policies.

    Of RAGCache it has what copies blocks on a machine without a GPU, where vLLM has nothing, and no more. KV memory
    and block size are vLLM's own arguments, ``kv_cache_memory_bytes`` and ``block_size``.

    Raises:
        ConfigError: no host memory, or no such policy.
    """

    host_bytes: int
    eviction: VLLMEviction = "lru"
    directory: Path | None = None
    """Where vLLM's own file tier lies, which has no limit; ``None`` is no such tier."""

    def __post_init__(self) -> None:
        if self.host_bytes <= 0:
            raise ConfigError(f"VLLMOffload.host_bytes is {self.host_bytes}: give a size above 0, or cache=None")
        if self.eviction not in get_args(VLLMEviction):
            known = ", ".join(get_args(VLLMEviction))
            raise ConfigError(f"VLLMOffload.eviction is {self.eviction!r:.80}: vLLM has {known}")

    def transfer_config(self, engine_id: str) -> dict[str, object]:
        """Return vLLM's ``kv_transfer_config``; ``engine_id`` names the region of shared memory."""
        extra: dict[str, object] = {
            "cpu_bytes_to_use": self.host_bytes,
            "spec_name": "VLLMSpec",
            "spec_module_path": "ragcache_core.vllm_plugin.offload.vllm_spec",
            "eviction_policy": self.eviction,
        }
        if self.directory is not None:
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(self.directory)}]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": engine_id,
            "kv_connector_extra_config": extra,
        }
