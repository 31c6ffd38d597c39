"""Check the vLLM version. With an unknown one only the connector works, after one log line.

Alone means: vLLM's own scheduler and worker, no tier below the GPU, no chunk reuse and no speculation. Documents are
read and statistics are told, and answers are vLLM's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.settings import PluginSettings

SUPPORTED_VLLM = ("0.32", "0.33")
_missing: list[str] = []
"""Names that a file of ours imports and this vLLM does not have."""


@cache
def unsupported_reason() -> str | None:
    """Return the difference from the supported vLLM, with a hint; ``None`` if it is supported."""
    from vllm import __version__ as version

    is_known = ".".join(version.split(".")[:2]) in SUPPORTED_VLLM
    missing = _missing_facts()
    if is_known and not missing:
        return None
    what = "; ".join(missing[:3]) or "every fact that it checks is there, but answers were never compared"
    return (
        f"this is vLLM {version}, RAGCache knows {' and '.join(SUPPORTED_VLLM)} ({what}). Install one of those, or a "
        "newer ragcache"
    )


def settings_in_force(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Return the settings in a connector's ``kv_connector_extra_config`` that need only a connector.

    Raises:
        ConfigError: a name or a value that this version does not know.
    """
    settings = PluginSettings.from_extra_config(extra_config)
    if unsupported_reason() is None:
        return settings
    if settings.max_age is not None:
        raise ConfigError(
            f"CacheConfig.max_age is {settings.max_age:g}, which needs RAGCache's own scheduler, and this vLLM is not "
            "one that it knows: leave max_age out, or install the vLLM that docs/reference/support.md names"
        )
    return settings.model_copy(update={"queue": "fifo", "max_prefill_bs": 0, "chunk_reuse": None})


def put_stand_ins(source: str) -> None:
    """Define a placeholder for each name that the file ``source`` imports from vLLM and that is missing.

    So it can be imported with any vLLM. Only its existing names are used then: see :func:`unsupported_reason`.
    """
    for statement in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "vllm":
            for alias in statement.names:
                _put_stand_in(str(statement.module), alias.name)


def _put_stand_in(module_name: str, name: str) -> None:
    try:
        module = import_module(module_name)
    except ImportError:
        module = sys.modules[module_name] = ModuleType(module_name)
    try:
        found = hasattr(module, name) or import_module(f"{module_name}.{name}")
    except ImportError:
        found = None
    if not found:
        _missing.append(f"{module_name} has no {name}")
        setattr(module, name, type(name, (), {}))


def _missing_facts() -> list[str]:
    try:
        from ragcache_core.vllm_plugin.facts import missing_facts

        return _missing + missing_facts()
    except Exception as error:  # whatever it is, an engine starts
        return [*_missing, f"{type(error).__name__}: {error}"]
