"""A local copy of which prefixes an engine has cached, so that choosing an order asks no server.

::

    GET /v1/ragcache/cached_paths      {"version": 1, "reset": true, "set": []}       what follows is a snapshot
                                       {"set": [[prefix, [document, ...], tokens], ...]}
                                       {"ready": true}                                the snapshot is complete
                                       {"set": [[prefix, [document, ...], 0]]}        what changes, as it does
                                       {}                                             nothing, every few seconds
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Sequence
from weakref import WeakSet

import httpx

from ragcache_core.client.http.background_loop import BackgroundLoop
from ragcache_core.ordering import CachedPaths, arrange
from ragcache_core.types import DocId

VERSION = 1
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
"""Silence for longer than several heartbeats is a dead connection."""
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0

_logger = logging.getLogger(__name__)
_all: WeakSet[CachedPrefixes] = WeakSet()


class _NothingToMirrorError(Exception):
    """The server does not tell what it has cached, and is not asked again."""


class CachedPrefixes:
    """Follows one server from the first question on, in a thread of its own, until :meth:`close`.

    While the connection is down nothing is known: what was cached before may be gone. A fork begins anew.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        """Ask nothing yet; ``base_url`` ends in ``/v1``."""
        self._url = f"{base_url}/ragcache/cached_paths"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._is_closed = False
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._paths = CachedPaths()
        self._is_current = False
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._thread: BackgroundLoop | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_current(self) -> bool:
        """Whether the engine's cache is known as it is now."""
        return self._is_current

    def __len__(self) -> int:
        """Return the number of paths that are cached."""
        return len(self._paths)

    def order(self, documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool) -> tuple[int, ...] | None:
        """Return the order whose prefix is cached the furthest; None where that is not known (yet).

        Never waits for the server. The first call begins to follow it.
        """
        if self._thread is None:
            self._start()
        if not self._is_current:
            return None
        with self._lock:
            return arrange(documents, "cache_aware", self._paths, prefix=prefix, keep_first=keep_first)

    def close(self) -> None:
        """End the thread and its connection. May be called again."""
        with self._starting:
            self._is_closed = True
        if self._thread is not None:
            self._thread.close()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._is_closed:
                thread = BackgroundLoop("ragcache-mirror", verify=self._url.startswith("https:"))
                thread.run(self._follow(thread.transport))
                self._thread = thread

    async def _follow(self, transport: httpx.AsyncBaseTransport) -> None:
        client = httpx.AsyncClient(transport=transport, timeout=_TIMEOUT, headers=self._headers)
        while True:
            try:
                await self._read(client)
                reason = "it ended"
            except _NothingToMirrorError as error:
                _logger.warning("Documents keep the order of retrieval instead of a cache-aware one: %s", error)
                return
            except Exception as error:  # a broken connection or line: what comes after a pause may be whole
                reason = f"{type(error).__name__}: {error}"
            finally:
                self._is_current = False
            _logger.debug("the mirror of the engine's cache lost %s: %s", self._url, reason)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    async def _read(self, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", self._url) as response:
            if response.status_code in (401, 403):
                raise _NothingToMirrorError(f"the server refused the API key for {self._url}")
            if response.status_code in (404, 405):
                raise _NothingToMirrorError(
                    f"there is no {self._url}; start the server with Engine.launch or `ragcache serve`, of this version"
                )
            response.raise_for_status()
            async for line in response.aiter_lines():
                self._take_in(json.loads(line))
                await asyncio.sleep(0)  # lets other threads run: a snapshot is long

    def _take_in(self, message: object) -> None:
        if not isinstance(message, dict):
            raise ValueError(f"{message!r:.80} is no message about cached documents")  # noqa: TRY004 (JSON of another)
        if (version := message.get("version", VERSION)) != VERSION:
            raise _NothingToMirrorError(f"the server tells of its cache in version {version!r}, this is {VERSION}")
        with self._lock:
            self._paths.apply(message)
        if message.get("ready"):
            self._is_current = True
            self._pause_s = _FIRST_PAUSE_S


def _start_all_anew() -> None:
    for mirror in _all:
        mirror._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
