"""The KV connectors by the names that vLLM's settings have, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {"DocumentConnector": "gpu_connector", "RAGCacheConnector": "tiered_connector"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_MODULES)}")
