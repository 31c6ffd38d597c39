"""Facts about vLLM that RAGCache relies on, checked at an engine's start in milliseconds.

The tests in ``tests/vllm_facts/`` pin more, and say what each is for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine.core import EngineCore

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.offload.cpu_worker import CopyingWorker
from ragcache_core.vllm_plugin.offload.spec import RAGCacheSpec
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeBlockPool, TreeFreeBlockQueue
from ragcache_core.vllm_plugin.scheduler.request_queue import CacheAwareRequestQueue
from ragcache_core.vllm_plugin.scheduler.scheduler import AsyncTreeScheduler, SyncTreeScheduler
from ragcache_core.vllm_plugin.server.metrics.prometheus import RAGCachePromMetrics

HOOKS: tuple[tuple[type, type], ...] = (
    (DocumentConnector, compat.KVConnectorBase_V1),
    (RAGCacheConnector, compat.KVConnectorBase_V1),
    (RAGCacheSpec, compat.TieringOffloadingSpec),
    (TierManager, compat.OffloadingManager),
    (CopyingWorker, compat.OffloadingWorker),
    (SyncTreeScheduler, compat.Scheduler),
    (AsyncTreeScheduler, compat.AsyncScheduler),
    (CacheAwareRequestQueue, compat.RequestQueue),
    (TreeFreeBlockQueue, compat.FreeKVCacheBlockQueue),
    (TreeBlockPool, compat.BlockPool),
    (RAGCachePromMetrics, compat.KVConnectorPromMetrics),
)
"""RAGCache's functions, and the functions of vLLM that they replace."""

PRIVATE: dict[Any, tuple[str, ...]] = {
    BlockHashToBlockMap: ("_cache",),
    compat.BlockPool: ("_remove_cached_block_hashes",),
    EngineCore: ("_reset_caches",),
    compat.Scheduler: (
        *("_inflight_prefills", "_preempt_request", "_free_request_blocks", "_handle_blocked_waiting_request"),
    ),
}
"""vLLM's names with an underscore, and whose they are. What an engine starts without is pinned by tests alone."""


def missing_facts() -> list[str]:
    """Return the missing or different parts of vLLM."""
    return [*_hooks_that_changed(), *_private_names_that_are_gone(), *_pools_that_are_fixed()]


def _hooks_that_changed() -> Iterator[str]:
    for ours, theirs in HOOKS:
        if new := sorted(getattr(ours, "__abstractmethods__", ())):
            yield f"{theirs.__name__} asks for {', '.join(new)}"
        for name in _overridden(ours, theirs):
            if not _accepts(getattr(ours, name), getattr(theirs, name)):
                parameters = ", ".join(inspect.signature(getattr(theirs, name)).parameters)
                yield f"{theirs.__name__}.{name} takes {parameters}"


def _overridden(ours: type, theirs: type) -> Iterator[str]:
    for name in dir(theirs):
        method = inspect.getattr_static(ours, name, None)
        is_overridden = inspect.isfunction(method) and method.__module__.startswith("ragcache_core")
        if is_overridden and not name.startswith("__") and inspect.isfunction(inspect.getattr_static(theirs, name)):
            yield name


def _accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Return whether ``ours`` accepts the calls of ``theirs``, with and without optional arguments."""
    parameters = list(inspect.signature(theirs).parameters.values())
    placed = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    required = [each for each in placed if each.default is each.empty]
    try:
        inspect.signature(ours).bind(*placed, **named)
        inspect.signature(ours).bind(*required, **{n: p for n, p in named.items() if p.default is p.empty})
    except TypeError:
        return False
    return True


def _private_names_that_are_gone() -> Iterator[str]:
    for owner, names in PRIVATE.items():
        text = Path(inspect.getfile(owner)).read_text(encoding="utf-8")
        for name in names:
            if not hasattr(owner, name) and not re.search(rf"\bself\.{name}\b", text):
                yield f"{owner.__name__} has no {name}"


def _pools_that_are_fixed() -> Iterator[str]:
    if "self.block_pool = BlockPool(" not in inspect.getsource(kv_cache_coordinator):
        yield "kv_cache_coordinator makes no BlockPool"  # in whose place building_pools() puts ours
