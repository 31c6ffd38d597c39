"""Handles in both frameworks' objects: engine, connections, store."""

from __future__ import annotations

import threading
from typing import Any

from ragcache_core.client import Engine, EngineClient
from ragcache_core.errors import ConfigError, quoted


def check_engine(engine: object, address: str = "") -> None:
    """Reject a value that is no engine.

    Args:
        engine: what the caller passed as ``engine=``; ``None`` is no engine, which is allowed.
        address: the argument that takes an address in its place, if there is one: ``"base_url="``.

    Raises:
        ConfigError: it is something else.
    """
    if engine is not None and not isinstance(engine, EngineClient):
        otherwise = f", or {address} with an address" if address else ""
        raise ConfigError(f"engine is {quoted(engine)}: pass Engine.launch(...) or Engine.connect(...){otherwise}")


class Connections:
    """The connections of a model without an engine, shared by its copies."""

    def __init__(self) -> None:
        self._engines: dict[tuple[object, ...], EngineClient] = {}
        self._lock = threading.Lock()

    def open(self, url: str, **settings: Any) -> EngineClient:
        """Return the connection with these settings of ``Engine.connect``, opened at the first call."""
        with self._lock:
            key = (url, *settings.items())
            if key not in self._engines:
                self._engines[key] = Engine.connect(url, **settings)
            return self._engines[key]

    def close(self) -> None:
        """Close every connection, including those that copies of the model use."""
        with self._lock:
            engines = [*self._engines.values()]
        for engine in engines:
            engine.close()


class HoldsHandles:
    """Cannot be deep-copied or pickled; a shallow copy shares engine and store."""

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds an engine or an open store, and cannot be deep-copied or pickled: share it, "
            "or a shallow copy, within a process, and make one in each process that uses it"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        return self.__getstate__()
