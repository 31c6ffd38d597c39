"""Engines of a comparison: plain vLLM, vLLM with its own offloading, and RAGCache; other settings are identical."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMEviction, VLLMOffload
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.ordering import DocumentOrder

MAX_BATCHED_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all engines of a comparison share.

    Attributes:
        max_num_batched_tokens: the most tokens of a step.
        disk_bytes: of a disk tier, for engines with a host tier; 0 for none.
        vllm_args: further arguments of vLLM's server.
        scale: the factor of the trace's lengths.
    """

    model: str
    dtype: str
    kv_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    disk_bytes: int = 0
    vllm_args: tuple[str, ...] = ()
    scale: float = 1.0

    def launch_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Engine.launch`` that do not depend on the cache."""
        return {
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            "extra_args": self.vllm_args,
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """One kind of engine.

    Attributes:
        eviction: the policy of vLLM's own offloading to host memory; ``None`` without offloading.
        has_cache: it keeps KV from one request to another.
        order: the order in which prompts show their documents.
        chunk_reuse: settings of approximate reuse; ``None`` for exact answers.
    """

    name: str
    summary: str
    is_ragcache: bool = False
    eviction: VLLMEviction | None = None
    has_cache: bool = True
    order: DocumentOrder = "retrieval"
    chunk_reuse: ChunkReuse | None = None

    @property
    def uses_host(self) -> bool:
        """Whether it has a tier in host memory."""
        return self.is_ragcache or self.eviction is not None

    def opened(self, setup: Setup, host_bytes: int, folder: Path) -> AbstractContextManager[Engine]:
        """Return the engine as a context manager. It is not restarted, because a new one would have an empty cache.

        Args:
            setup: settings of the comparison.
            host_bytes: of the host tier, if it has one.
            folder: for its disk tier. vLLM's own disk tier has no limit.
        """
        return self.launch(setup, host_bytes, folder)

    def launch(self, setup: Setup, host_bytes: int, folder: Path, cache: VLLMOffload | None = None) -> Engine:
        """Return the engine. ``cache`` replaces the offloading of its settings."""
        arguments = setup.launch_arguments()
        config: CacheConfig | VLLMOffload | None = cache
        if self.is_ragcache:
            disk = {"disk_bytes": setup.disk_bytes, "directory": folder} if setup.disk_bytes else {}
            config = CacheConfig(
                kv_cache_bytes=setup.kv_bytes,
                block_size=setup.block_size,
                host_bytes=host_bytes,
                chunk_reuse=self.chunk_reuse,
                **disk,
            )
        else:
            arguments |= {"kv_cache_memory_bytes": setup.kv_bytes, "block_size": setup.block_size}
            arguments["enable_prefix_caching"] = self.has_cache
            if self.eviction is not None:
                config = VLLMOffload(host_bytes, self.eviction, folder if setup.disk_bytes else None)
        launched: Engine = Engine.launch(setup.model, cache=config, progress=False, max_restarts=0, **arguments)
        return launched


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("no-cache", "vLLM, prefix caching off", has_cache=False),
        Baseline("vllm", "vLLM, prefix caching in the GPU KV cache"),
        Baseline("vllm-host-lru", "vLLM, its own offloading to host memory, LRU", eviction="lru"),
        Baseline("vllm-host-arc", "vLLM, its own offloading to host memory, ARC", eviction="arc"),
        Baseline("ragcache", "RAGCache with default settings", is_ragcache=True),
        Baseline(
            "ragcache-cache-aware",
            "RAGCache, documents in the cache-aware order",
            is_ragcache=True,
            order="cache_aware",
        ),
        Baseline(
            "ragcache-chunks",
            "RAGCache with chunk reuse: answers are approximate",
            is_ragcache=True,
            chunk_reuse=ChunkReuse(),
        ),
    )
}
"""By the names of ``ragcache bench --compare``. ``benchmarks.compare`` adds others."""

EXACT = tuple(name for name, baseline in BASELINES.items() if baseline.chunk_reuse is None)
"""The default comparison: engines whose answers are those of vLLM."""


def cpu_time_s(pid: int | None) -> float | None:
    """Return the processor time of an engine's processes so far; ``None`` for an engine on another machine."""
    if pid is None:
        return None
    total_s = 0.0
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
