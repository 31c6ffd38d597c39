"""The workers by their names in vLLM's settings, each imported at first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ragcache_core.vllm_plugin.release import unsupported_reason

_MODULES = {"SeededWorker": "scheduler.seeded_prefill", "RAGCacheWorker": "chunks.worker"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_MODULES)}")
    if unsupported_reason() is None:
        return getattr(import_module(f"ragcache_core.vllm_plugin.{_MODULES[name]}"), name)
    return import_module("ragcache_core.vllm_plugin.compat").platform_worker()
