"""The engines that are measured side by side: vLLM, vLLM with its own offloading, and ours; all else is alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ragcache_core.bench.compare.lmcache import CHUNK_TOKENS, lmcache_server
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMEviction, VLLMOffload
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.ordering import DocumentOrder

MAX_BATCHED_TOKENS = 1_024
"""Tokens that a step computes at most."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every engine gets: the same model, the same memory, the same batches."""

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
    """What lengths are times; LMCache's chunks are as well."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Engine.launch`` that say so."""
        return {
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            "extra_args": self.vllm_args,
        }


@dataclass(frozen=True, slots=True)
class Peer:
    """One kind of engine: ours, or vLLM, with its own offloading to host memory if it has an ``eviction``."""

    name: str
    summary: str
    is_ragcache: bool = False
    speculates: bool = False
    eviction: VLLMEviction | None = None
    is_lmcache: bool = False
    keeps_anything: bool = True
    order: DocumentOrder = "retrieval"
    chunk_reuse: ChunkReuse | None = None

    @property
    def uses_host(self) -> bool:
        """Whether it has a tier in host memory."""
        return self.is_ragcache or self.is_lmcache or self.eviction is not None

    @property
    def sends_documents(self) -> bool:
        """Whether requests say which of their tokens are which document; vLLM has no use for it."""
        return self.is_ragcache

    @contextmanager
    def opened(self, setup: Setup, host_bytes: int, folder: Path) -> Iterator[Engine]:
        """Have the engine, and what it needs beside it, while the context is open.

        Raises:
            ConfigError: it is not installed here.
        """
        with ExitStack() as stack:
            beside = None
            if self.is_lmcache:
                blocks = max(1, round(CHUNK_TOKENS * setup.scale / setup.block_size))
                server = lmcache_server(host_bytes, blocks * setup.block_size, folder, setup.disk_bytes)
                beside = stack.enter_context(server)
            yield stack.enter_context(self.launch(setup, host_bytes, folder, beside))

    def launch(self, setup: Setup, host_bytes: int, folder: Path, beside: VLLMOffload | None = None) -> Engine:
        """Return the engine, ready; it is not started again if it dies, for its successor would know nothing.

        ``folder`` is for a disk tier. vLLM's own has no limit. ``beside`` leads to a server that has the tiers.
        """
        cache: CacheConfig | VLLMOffload | None = beside
        arguments = setup.arguments()
        if self.is_ragcache:
            settings: dict[str, Any] = {"kv_cache_bytes": setup.kv_bytes, "block_size": setup.block_size}
            if setup.disk_bytes:
                settings |= {"disk_bytes": setup.disk_bytes, "directory": folder}
            cache = CacheConfig(host_bytes=host_bytes, chunk_reuse=self.chunk_reuse, **settings)
        else:
            arguments |= {"kv_cache_memory_bytes": setup.kv_bytes, "block_size": setup.block_size}
            arguments["enable_prefix_caching"] = self.keeps_anything
            if self.eviction is not None:
                cache = VLLMOffload(host_bytes, self.eviction, folder if setup.disk_bytes else None)
        launched: Engine = Engine.launch(setup.model, cache=cache, progress=False, max_restarts=0, **arguments)
        return launched


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("no-cache", "vLLM, prefix caching off", keeps_anything=False),
        Peer("vllm", "vLLM, its own prefix caching in KV memory"),
        Peer("vllm-host-lru", "vLLM, its own offloading to host memory, LRU", eviction="lru"),
        Peer("vllm-host-arc", "vLLM, its own offloading to host memory, ARC", eviction="arc"),
        Peer("lmcache", "vLLM with LMCache and its server, where it is installed", is_lmcache=True),
        Peer("ragcache", "RAGCache as it comes", is_ragcache=True),
        Peer(
            "ragcache-cache-aware",
            "RAGCache, documents shown in the order that is cached",
            is_ragcache=True,
            order="cache_aware",
        ),
        Peer(
            "ragcache-chunks",
            "RAGCache, documents reused behind others too: answers are approximate",
            is_ragcache=True,
            chunk_reuse=ChunkReuse(),
        ),
    )
}
"""By the names that ``ragcache bench --compare`` takes."""

USUAL = tuple(name for name, peer in PEERS.items() if peer.chunk_reuse is None and not peer.is_lmcache)
"""What is compared where nothing else is said: what is installed, and answers as vLLM does."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of an engine have used: processor time since they began, and memory that is theirs now.

    ``memory_bytes`` is the proportional set size: what several of them share counts once.
    """

    cpu_s: float
    memory_bytes: int


def usage(pid: int | None) -> Usage:
    """Return what an engine's process and all below it use; not a number for one of another machine."""
    if pid is None:
        return Usage(math.nan, 0)
    cpu_s, memory_bytes = 0.0, 0
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        try:
            times, memory = process.cpu_times(), process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
        memory_bytes += getattr(memory, "pss", memory.rss)
    return Usage(cpu_s, memory_bytes)
