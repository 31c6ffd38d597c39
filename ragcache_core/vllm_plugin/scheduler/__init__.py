"""The scheduler by the name that vLLM's settings have, imported when it is asked for."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "RAGCacheScheduler":
        from ragcache_core.vllm_plugin.scheduler.scheduler import RAGCacheScheduler

        return RAGCacheScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has RAGCacheScheduler")
