"""Build the parts of chunk reuse for an engine, on the scheduler's and the workers' side."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.chunkstore.encryption import load_keys
from ragcache_core.chunkstore.old_namespaces import delete_unused
from ragcache_core.errors import CacheTierError, ConfigError
from ragcache_core.log import logger_of
from ragcache_core.policy import make_policy
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.tree import KnowledgeTree
from ragcache_core.vllm_plugin.chunks.compute.executor import ChunkExecutor
from ragcache_core.vllm_plugin.chunks.compute.scattered_attention import ScatteredRows, warm_up_kernels
from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import PartialPrefill
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.model.attention_layers import attention_layers
from ragcache_core.vllm_plugin.chunks.page_layout import LayerShape, aligned_bytes, num_pages_within
from ragcache_core.vllm_plugin.chunks.scheduler import ChunkScheduling
from ragcache_core.vllm_plugin.chunks.storage.disk import ChunkDisk
from ragcache_core.vllm_plugin.chunks.storage.host_pool import ChunkMemory, PagesPlace
from ragcache_core.vllm_plugin.compat import kv_bytes_per_block
from ragcache_core.vllm_plugin.identity import MATCH_KEYS, chunk_identity
from ragcache_core.vllm_plugin.scheduler.scheduler import RAGCacheScheduler
from ragcache_core.vllm_plugin.settings import PluginSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logger_of(__name__)

_RUN_TOKENS = 16
"""On a GPU, vLLM's attention reads the keys of a prompt once for each run of selected tokens."""


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Reject an engine that chunk reuse does not support.

    Raises:
        ConfigError: with what stands against it.
    """
    parallel = vllm_config.parallel_config
    reasons = {
        "several groups of KV caches (hybrid attention)": len(kv_cache_config.kv_cache_groups) != 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA adapters (layers apply those of vLLM's step to any tokens)": vllm_config.lora_config is not None,
        "prefill that is not chunked": not vllm_config.scheduler_config.enable_chunked_prefill,
        "prefix caching switched off": not vllm_config.cache_config.enable_prefix_caching,
        "another scheduler than RAGCacheScheduler, which keeps approximate blocks apart": (
            vllm_config.scheduler_config.get_scheduler_cls() is not RAGCacheScheduler
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"chunk reuse does not work with {reason}: leave CacheConfig.chunk_reuse out")


def build_scheduling(
    settings: PluginSettings,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    order: Callable[[Iterable[str]], list[str]],
    is_guess: Callable[[str], bool],
) -> ChunkScheduling:
    """Return the scheduler's side; see :class:`ChunkScheduling`.

    Raises:
        ConfigError: its memory does not hold a page.
    """
    page_bytes = kv_bytes_per_block(kv_cache_config)
    num_workers = vllm_config.parallel_config.world_size
    host_bytes, _ = settings.for_chunks()
    assert settings.chunk_reuse is not None
    prefill_cost = settings.prefill_cost()
    tree = KnowledgeTree(
        make_policy(settings.policy, prefill_cost),
        ghost_size=settings.ghost_size,
        keeps_frequency=settings.keeps_frequency,
    )
    library = ChunkManager(
        ChunkEviction(tree, prefill_cost),
        num_pages=num_pages_within(host_bytes, page_bytes * num_workers),
        tokens_per_page=vllm_config.cache_config.block_size,
        max_variants=settings.chunk_reuse.max_variants,
    )
    return ChunkScheduling(
        library,
        num_workers=num_workers,
        max_step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        prefill_cost=prefill_cost,
        max_step_runs=sys.maxsize if current_platform.is_cpu() else vllm_config.scheduler_config.max_num_seqs,
        run_tokens=1 if current_platform.is_cpu() else _RUN_TOKENS,
        is_eager=vllm_config.model_config.enforce_eager,
        order=order,
        is_guess=is_guess,
        page_bytes=page_bytes * num_workers,
    )


def open_disk(
    library: ChunkManager, places: Sequence[PagesPlace], settings: PluginSettings, vllm_config: VllmConfig
) -> None:
    """Store chunks on disk too, if configured, and load those that are there.

    Args:
        library: keeps book of them.
        places: the workers' pages, by rank.
        settings: the engine's.
        vllm_config: vLLM's.

    Raises:
        ConfigError, CacheTierError: the disk's share holds not a page, its key is gone, or it cannot be used, and this
            engine has not served before, which would go on without it.
    """
    _, disk_bytes = settings.for_chunks()
    if not disk_bytes:
        return
    assert settings.directory is not None
    parts = [part for place in places for part in place.map() or ()]
    if len(parts) < sum(len(place.part_bytes) for place in places):
        logger.warning(
            "RC-WORKERS-APART: RAGCache keeps no chunks on disk: a worker has its memory on another host or in another "
            "container: keep all workers of an engine on one host, or leave disk_bytes out"
        )
        return
    parallel, folder = vllm_config.parallel_config, settings.directory
    if parallel.data_parallel_index:
        folder /= f"engine-{parallel.data_parallel_index}"
    identity, disk = chunk_identity(vllm_config), None
    try:
        keys = load_keys(settings.disk_key_file)

        def open_store(holds: str, chunk_bytes: int, num_chunks: int) -> ChunkStore:
            return ChunkStore(
                folder,
                {**identity, "holds": holds},
                chunk_bytes=chunk_bytes,
                capacity_bytes=num_chunks * aligned_bytes(chunk_bytes),
                match_keys=MATCH_KEYS,
                keys=keys,
            )

        disk = ChunkDisk(open_store, disk_bytes, parts, vllm_config.cache_config.block_size)
        library.open_disk(disk)
    except (CacheTierError, ConfigError) as error:  # ConfigError: its key is missing
        if disk is not None:
            disk.close()
        if STARTED_AGAIN_ENV not in os.environ:
            raise
        logger.error("RC-TIER-OFF: RAGCache's disk of chunks is out of service until the next start: %s", error)
        library.open_disk(None)
    for outdated in settings.directory.glob("worker-*"):  # one worker's part of the chunks of several
        with suppress(CacheTierError):
            delete_unused(outdated, unused_s=0.0)


def build_execution(
    settings: PluginSettings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model_runner: Any
) -> tuple[ChunkExecutor, ChunkMemory]:
    """Return a worker's executor, and its memory; the caller closes them.

    Raises:
        ConfigError: the model is unsupported, or the memory does not hold a page.
    """
    model = model_runner.get_model()
    layers = attention_layers(model, vllm_config.compilation_config.static_forward_context)
    num_workers, tokens_per_block = vllm_config.parallel_config.world_size, vllm_config.cache_config.block_size
    groups = [group for groups in model_runner.attn_groups for group in groups]
    warm_up_kernels(layers)
    prefill = PartialPrefill(vllm_config, model, groups, layers, tokens_per_block)
    prefill.scattered = ScatteredRows.on_gpu(
        layers, tokens_per_block=tokens_per_block, max_runs=vllm_config.scheduler_config.max_num_seqs
    )
    host_bytes, _ = settings.for_chunks()
    memory = ChunkMemory(
        layers=[LayerShape(layer.kv.num_kv_heads, layer.kv.head_dim) for layer in layers],
        dtype=layers[0].kv.cache.dtype,
        tokens_per_page=tokens_per_block,
        num_pages=num_pages_within(host_bytes, kv_bytes_per_block(kv_cache_config) * num_workers),
        pin_memory=prefill.device.type == "cuda",
    )
    return ChunkExecutor(prefill, layers, memory), memory
