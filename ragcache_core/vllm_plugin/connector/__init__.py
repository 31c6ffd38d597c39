"""The KV connectors by their names in vLLM's settings, each imported at first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ragcache_core.vllm_plugin.release import unsupported_reason

_FOLDER = "ragcache_core.vllm_plugin"
_MODULES = {
    "DocumentConnector": f"{_FOLDER}.connector.gpu_connector",
    "RAGCacheConnector": f"{_FOLDER}.connector.tiered_connector",
    "ChunkDocumentConnector": f"{_FOLDER}.chunks.connector",
    "ChunkRAGCacheConnector": f"{_FOLDER}.chunks.connector",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_MODULES)}")
    if unsupported_reason() is None:
        return getattr(import_module(_MODULES[name]), name)
    try:
        return import_module(f"{__name__}.fallback").FallbackConnector
    except Exception:  # one of our modules needs what this vLLM does not have
        return import_module(f"{__name__}.minimal").MinimalConnector
