"""The scheduler by its name in vLLM's settings, imported at first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ragcache_core.vllm_plugin.release import unsupported_reason


def __getattr__(name: str) -> Any:
    if name != "RAGCacheScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has RAGCacheScheduler")
    if unsupported_reason() is None:
        return import_module(f"{__name__}.scheduler").RAGCacheScheduler
    return import_module(f"{__name__}.own").own_scheduler
