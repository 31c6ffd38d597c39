"""Builds vLLM's scheduler with each of the connectors that are compared, without workers and without a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from ragcache_core.client.launch.arguments import transfer_config
from ragcache_core.config import CacheConfig as Tiers
from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.scheduler.scheduler import AsyncTreeScheduler

BLOCK_TOKENS = 16
MAX_REQUESTS = 256
_BLOCK_BYTES = 2 * BLOCK_TOKENS * 8 * 4
_ROW_BYTES = 4096  # the tiers give each block whole pages
_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
_ATTENTION: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
_SPECS: dict[str, KVCacheSpec] = {
    "full": FullAttentionSpec(**_ATTENTION),
    "window": SlidingWindowSpec(**_ATTENTION, sliding_window=512),
}

EngineName = Literal["vllm", "vllm-offload", "ragcache-gpu", "ragcache-host", "ragcache-disk"]
ENGINES: tuple[EngineName, ...] = ("vllm", "vllm-offload", "ragcache-gpu", "ragcache-host", "ragcache-disk")


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """The size and the KV cache groups of an engine.

    Args:
        num_blocks: GPU blocks of 16 tokens.
        groups: the attention of each KV cache group, ``full`` or ``window``.
        host_ratio: blocks of the host tier for each GPU block and group.
    """

    num_blocks: int
    groups: Sequence[str] = ("full",)
    host_ratio: float = 0.5


@contextmanager
def make_scheduler(engine: EngineName, spec: SchedulerSpec) -> Iterator[Any]:
    """Yield a scheduler as vLLM's engine core builds it, and free its host memory and its disk afterwards."""
    init_none_hash(sha256)
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 30)
    with tempfile.TemporaryDirectory(prefix="step-cost-") as folder:
        files.prepare()
        try:
            scheduler = _build(engine, spec, files.engine_id, Path(folder))
            yield scheduler
            scheduler.shutdown()
        finally:
            files.remove()


def tiers_of(engine: EngineName) -> tuple[Tier, ...]:
    """Return the tiers of an engine."""
    num_tiers = {"vllm": 1, "ragcache-gpu": 1, "vllm-offload": 2, "ragcache-host": 2, "ragcache-disk": 3}
    return tuple(Tier)[: num_tiers[engine]]


def is_ragcache(engine: EngineName) -> bool:
    """Return whether an engine runs RAGCache, which takes documents with each request."""
    return engine.startswith("ragcache")


def _build(engine: EngineName, spec: SchedulerSpec, engine_id: str, folder: Path) -> Any:
    num_bytes = _BLOCK_BYTES * spec.num_blocks
    host_bytes = int(spec.host_ratio * spec.num_blocks) * _ROW_BYTES * len(spec.groups)
    layers = {f"layer {i}": _SPECS[name] for i, name in enumerate(spec.groups)}
    kv_cache_config = KVCacheConfig(
        spec.num_blocks,
        [KVCacheTensor(num_bytes, [name], layer_stride=num_bytes, block_stride=_BLOCK_BYTES) for name in layers],
        [KVCacheGroupSpec([name], group) for name, group in layers.items()],
    )
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = spec.num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(_MODEL), dtype="float32", max_model_len=8192),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=True,
        ),
        kv_transfer_config=_transfer_config(engine, host_bytes, engine_id, folder),
    )
    cache.num_gpu_blocks = spec.num_blocks
    with set_current_vllm_config(config):
        kind = AsyncTreeScheduler if is_ragcache(engine) else AsyncScheduler
        return kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )


def _transfer_config(engine: EngineName, host_bytes: int, engine_id: str, folder: Path) -> KVTransferConfig | None:
    if engine == "vllm":
        return None
    if engine == "vllm-offload":
        extra = {"cpu_bytes_to_use": host_bytes, "spec_name": "TieringOffloadingSpec", "eviction_policy": "lru"}
        return KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config=extra,
        )
    tiers = Tiers(host_bytes=0 if engine == "ragcache-gpu" else host_bytes)
    if engine == "ragcache-disk":
        tiers = Tiers(host_bytes=host_bytes, disk_bytes=1 << 28, directory=folder / "kv", compression="lz4")
    return KVTransferConfig(**transfer_config(tiers.resolved(), engine_id, None, (), None))
