"""Ray Serve's part of a request's way without Ray: a handle whose replicas are in this process, and a server."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ragcache_core.client.ray_serve.deployment import EngineReplica
from ragcache_core.client.ray_serve.front import Front
from ragcache_core.client.ray_serve.known_replicas import ReplicaRequest, ReplicaStates


class ScriptedHandle:
    """What a front has of Serve: chooses among ``replicas`` as Serve's router would, and gives their answers."""

    def __init__(self, replicas: dict[str, EngineReplica], known: ReplicaStates) -> None:
        self.replicas = replicas
        self.known = known
        self.ask = self
        self.dead: set[str] = set()
        """Replicas that are gone without Serve knowing."""
        self.answers: list[_Parts] = []
        """Those that were asked for, in this order."""

    def options(self, *, stream: bool) -> Self:
        assert stream
        return self

    def remote(self, ask: ReplicaRequest) -> _Parts:
        self.answers.append(_Parts(self._parts_of(ask)))
        return self.answers[-1]

    def _parts_of(self, ask: ReplicaRequest) -> AsyncIterator[Any]:
        if not self.replicas:
            return _never()
        self.known.update({name: replica.record_replica_metadata() for name, replica in self.replicas.items()})
        name, *_ = self.known.choose(list(self.replicas), ask)
        return self._answer(name, copy.copy(ask))

    async def _answer(self, name: str, ask: ReplicaRequest) -> AsyncIterator[Any]:
        if name in self.dead:
            raise RuntimeError(f"the actor of {name} died")
        async for part in self.replicas[name].ask(ask):
            yield part

    def broadcast(self, method: str, *arguments: object) -> _Results:
        return _Results(self, method, arguments)


async def _never() -> AsyncIterator[Any]:
    """Wait for a replica, as Serve does where there is none."""
    await asyncio.Event().wait()
    yield None


class _Parts:
    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts
        self.is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._parts)

    def cancel(self) -> None:
        """Note that Serve would be told to end it; the generator ends with its last reference."""
        self.is_cancelled = True


class _Results:
    def __init__(self, handle: ScriptedHandle, method: str, arguments: Sequence[object]) -> None:
        self._handle, self._method, self._arguments = handle, method, arguments

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return await asyncio.gather(*map(self._result, self._handle.replicas), return_exceptions=True)

    async def _result(self, name: str) -> Any:
        if name in self._handle.dead:
            raise RuntimeError(f"the actor of {name} died")
        arguments = [copy.copy(each) for each in self._arguments]  # as each replica gets its own
        return await getattr(self._handle.replicas[name], self._method)(*arguments)


class _ReportingServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def served(front: Front, prefix: str = "") -> Iterator[str]:
    """Give the address at which a front is asked, over real HTTP; ``prefix`` is its application's."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await front(Request({**scope, "root_path": prefix}, receive))
        await response(scope, receive, send)

    server = _ReportingServer(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
    thread = threading.Thread(target=server.run, name="front", daemon=True)
    thread.start()
    assert server.listens.wait(10)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
