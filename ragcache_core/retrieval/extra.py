"""The libraries of extras, imported when they are first used; one that lacks is asked for by name."""

from __future__ import annotations

import importlib
from typing import Any

from ragcache_core.errors import ConfigError

_NEEDED_BY = {
    "retrieval": "document stores and their search need",
    "qdrant": "stages of a Qdrant collection need",
    "pgvector": "stages of a Postgres table need",
}


def extra_module(name: str, extra: str = "retrieval") -> Any:
    """Return a module of an extra.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{(error.name or name).partition('.')[0]} is not installed, which {_NEEDED_BY[extra]}: "
            f'pip install "ragcache[{extra}]"'
        ) from error


class _Faiss:
    """The module ``faiss``, imported when something of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(extra_module("faiss"), name)


faiss: Any = _Faiss()
