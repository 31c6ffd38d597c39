"""Run a store's service: in a thread, on an address of this machine, until it is closed."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from ragcache_core.errors import ConfigError, StoreError
from ragcache_core.retrieval.extra import extra_module
from ragcache_core.retrieval.store import DocumentStore
from ragcache_core.runtime.api_keys import ApiKeys

_EXTRA = "retrieval-server"
_KEEP_ALIVE_S = 60
"""Longer than clients keep a connection that they do not use."""
_BACKLOG = 2048
_LEAST_DRAIN_S = 0.2
"""Idle connections need a moment to close."""

_logger = logging.getLogger(__name__)


class StoreService:
    """A document store that others search over HTTP: by :class:`RemoteStore`, or any client that reads lines of JSON.

    ::

        with DocumentStore.open("docs.ragcache", read_only=True) as store, StoreService(store, port=8100) as service:
            service.wait()

    It answers from when it is made, in a thread of its own. What another process changes in a store that was opened
    ``read_only`` it takes up within ``refresh_s``; a search sees one state from its first stage to its last. The store
    stays its owner's, who closes it after the service.

    Args:
        store: a store that is open.
        host: the address to listen on.
        port: 0 takes a free one.
        api_key: what who asks has to send as a bearer token; without one everybody may ask.
        max_k: the most documents that a search may want.
        max_body_bytes: of a request.
        max_searches: that run at the same time; more are refused, and asked again by a :class:`RemoteStore`.
        search_timeout_s: the longest that a search may take.
        refresh_s: how often it is looked whether the store has changed.

    Raises:
        ConfigError: a setting that cannot work, a port that is taken, or the extra is not installed.
    """

    def __init__(
        self,
        store: DocumentStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        max_k: int = 1000,
        max_body_bytes: int = 1 << 20,
        max_searches: int = 64,
        search_timeout_s: float = 60.0,
        refresh_s: float = 1.0,
    ) -> None:
        uvicorn, _ = extra_module("uvicorn", _EXTRA), extra_module("starlette", _EXTRA)
        from ragcache_core.retrieval.service.app import Limits, StoreApp
        from ragcache_core.runtime.connections import HeadTimeoutProtocol

        if not isinstance(store, DocumentStore):
            raise ConfigError(f"{store!r:.80} is no DocumentStore: open one, and pass it")
        for name, value in (("search_timeout_s", search_timeout_s), ("refresh_s", refresh_s)):
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{name} is {value!r:.80}: give seconds above 0")
        limits = Limits(max_k, max_body_bytes, max_searches, search_timeout_s)
        keys = ApiKeys([] if api_key is None else [api_key])
        app = StoreApp(store, keys=keys, limits=limits, refresh_s=refresh_s)
        store.wait_until_prepared()
        self._socket = _listening(host, port)
        address, self._port = self._socket.getsockname()[:2]
        self._host = f"[{address}]" if ":" in address else address
        self._server: Any = uvicorn.Server(
            uvicorn.Config(
                app.asgi,
                http=HeadTimeoutProtocol,
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=None,
            )
        )
        self._thread = threading.Thread(target=self._run, name="ragcache-store-service", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise StoreError(f"the service of {store.path} did not start: its log says why")
            time.sleep(0.002)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException:
            _logger.exception("the service of a store ended")
        finally:
            self._socket.close()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self._host}:{self._port}"

    def wait(self) -> None:
        """Return when it has ended."""
        while self._thread.is_alive():  # a join without limit could not be interrupted everywhere
            self._thread.join(1.0)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, and end when those that run have ended, after ``drain_s`` at the latest.

        May be called twice; an interrupt, or a second call with less patience, ends it at once.
        """
        self._server.config.timeout_graceful_shutdown = max(drain_s, _LEAST_DRAIN_S)
        self._server.should_exit = True
        try:
            self.wait()
        except BaseException:
            self._server.force_exit = True
            self._thread.join()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the port is taken or none, the host is no address of this machine.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"port is {port!r:.40}: give a number from 0 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=False)
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be used ({error}): choose another port, or leave it out for a free one"
        ) from error
