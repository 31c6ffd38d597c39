"""One replica on Ray Serve: it owns an engine's server on its node, hands requests to it, and ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ragcache_core.client.engine import Engine
from ragcache_core.client.fleet.fleet import served_model_identity
from ragcache_core.client.launch.ranks import own_folder, own_log
from ragcache_core.client.ray_serve.known_replicas import BAD_GATEWAY, HOP_BY_HOP_HEADERS, Head, ReplicaRequest
from ragcache_core.errors import EngineDiedError, EngineError

_HEALTH_TIMEOUT_S = 10.0
_FIGURES_TIMEOUT_S = 5.0
_ORDER_TIMEOUT_S = 120.0
"""For so long all replicas' answer waits for one: for its figures, and until it has done what all are told to do."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class EngineReplica:
    """An engine as Ray Serve asks it; it ends with this."""

    def __init__(self, engine: Engine, name: str) -> None:
        """``name`` is Serve's for this replica."""
        self._name = name
        self._engine = engine
        self._root = httpx.URL(engine.base_url.removesuffix("/v1"))
        # The caller knows how long to wait.
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=_LIMITS), timeout=None)  # noqa: S113

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what those that ask know of this replica: its server and the key, and what must be the same in all."""
        return {
            "url": self._engine.base_url,
            "api_key": self._engine.api_key,
            "serves": served_model_identity(self._engine),
        }

    async def ask(self, ask: ReplicaRequest) -> AsyncIterator[Head | bytes]:
        """Yield status and headers of the server's answer, then its body as it arrives.

        Raises:
            EngineDiedError: the answer was cut.
        """
        headers = [(name, value) for name, value in ask.headers if name.lower() not in HOP_BY_HOP_HEADERS]
        url = self._root.copy_with(raw_path=ask.path.encode())  # whatever it says, it names no other server
        request = httpx.Request(ask.method, url, headers=headers, content=ask.body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.ConnectError:
            yield BAD_GATEWAY, []
            return
        except httpx.HTTPError as error:
            raise EngineDiedError(f"replica {self._name} did not answer: {error}") from None
        try:
            named = [
                (name, value) for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP_HEADERS
            ]
            yield response.status_code, named
            async for part in response.aiter_raw():
                yield part
        except httpx.HTTPError as error:
            raise EngineDiedError(f"the answer of replica {self._name} was cut: {error}") from None
        finally:
            await response.aclose()

    async def send_whole(self, ask: ReplicaRequest, cursors: Mapping[str, str] | None) -> tuple[str, Head, bytes]:
        """Return this replica's name, and the server's whole answer.

        ``cursors``, of a question about the mirror, are where it goes on: from the beginning, where it is in none.

        Raises:
            EngineDiedError: there is none, or it takes too long; the others' are used without it.
        """
        if cursors is not None:
            ask.path = f"{ask.path.partition('?')[0]}?cursor={cursors.get(self._name, '')}"
        timeout_s = _FIGURES_TIMEOUT_S if ask.method == "GET" else _ORDER_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                head, *parts = [part async for part in self.ask(ask)]
        except TimeoutError:
            raise EngineDiedError(f"replica {self._name} did not answer within {timeout_s:g} s") from None
        assert not isinstance(head, bytes)
        return self._name, head, b"".join(part for part in parts if isinstance(part, bytes))

    async def check_health(self) -> None:
        """Raise unless the engine makes progress: Serve then starts another replica in the place of this one."""
        self._engine.num_restarts()
        try:
            answer = await self._http.get(self._root.copy_with(path="/health"), timeout=_HEALTH_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise EngineError(f"replica {self._name} does not say how it is: {type(error).__name__} {error}") from None
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"replica {self._name} is not well: {answer.status_code} {answer.text:.400}")

    def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


class LaunchedReplica(EngineReplica):
    """What Ray Serve runs ``num_replicas`` times. Its server ends with it, also when it is killed.

    The server listens on the node's address, so that the processes that ask follow what it has cached.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        """Start the server; ``settings`` are those of ``Engine.launch``.

        Raises:
            EngineStartError, ConfigError: it cannot start; Serve tries again, and then says so.
        """
        from ray import serve
        from ray.util import get_node_ip_address

        context = serve.get_replica_context()
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        settings = own_settings(settings, context.rank.rank)
        super().__init__(
            Engine.launch(model, host=host, max_restarts=0, progress=False, **settings), context.replica_tag
        )


def own_settings(settings: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return settings whose disk and log no other replica on the same machine has, but the next one of this number."""
    name, log = f"replica-{rank}", settings.get("log_path")
    log_path = own_log(None if log is None else Path(log), name)
    return {**settings, "cache": own_folder(settings.get("cache"), name), "log_path": log_path}
