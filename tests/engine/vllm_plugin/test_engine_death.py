"""The server's process while its engine core dies, or clients keep connections open: it answers, and it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.tasks import GENERATION_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from ragcache_core.client.http.errors import reports_engine_death
from ragcache_core.vllm_plugin.server import middleware, routes

DEADLINE_S = 20.0


class DyingEngine:
    """An engine client as the server sees it, whose core never answers and may die."""

    def __init__(self) -> None:
        self.errored = False
        self.dead_error = EngineDeadError()
        self.engine_core = SimpleNamespace(call_utility_all_async=self._never)
        self.num_calls = 0
        self.vllm_config = SimpleNamespace(
            shutdown_timeout=0, parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
        )

    @property
    def is_running(self) -> bool:
        return not self.errored

    async def is_sleeping(self) -> bool:
        return await self._never()

    async def _never(self, *_: object) -> Any:
        self.num_calls += 1
        await asyncio.Event().wait()


@pytest.fixture
def engine() -> DyingEngine:
    return DyingEngine()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, engine: DyingEngine) -> FastAPI:
    """vLLM's server with our routes, in front of an engine that never answers."""
    monkeypatch.setenv("VLLM_PLUGINS", "ragcache")
    monkeypatch.setattr(routes.received, "engine", dict)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app = build_app(args, GENERATION_TASKS)
    app.state.engine_client = app.state.ragcache_engine_client = engine
    app.state.log_stats = False
    app.state.ragcache_max_body_bytes = 10_000
    return app


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (a poll)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[tuple[asyncio.Task[Any], str]]:
    """Serve as vLLM does; give the task that ends with the server, and its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    task = asyncio.create_task(serve_http(app, listening, port=listening.getsockname()[1], log_level="critical"))
    try:
        await until(lambda: hasattr(app.state, "server") and app.state.server.started)
        server = app.state.server
        yield task, url
        server.should_exit = server.force_exit = True
        await (await asyncio.wait_for(task, DEADLINE_S))
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/ragcache/cached_paths", None),
        ("GET", "/v1/ragcache/tree", None),
        ("GET", "/v1/ragcache/requests", None),
        ("POST", "/v1/ragcache/speculations/one/confirm", None),
        ("POST", "/v1/ragcache/documents/forget", {"ids": ["a"]}),
        ("POST", "/v1/ragcache/documents/pin", {"ids": ["a"]}),
        ("POST", "/v1/ragcache/cache/purge", {}),
    ],
)
async def test_a_route_in_flight_fails_when_the_engine_dies_and_the_server_ends(
    app: FastAPI, engine: DyingEngine, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with serving(app) as (server, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.request(method, path, json=body))
        await until(lambda: engine.num_calls)
        engine.errored = True
        answer = await asking
        assert answer.status_code == 500
        assert reports_engine_death(answer.text), "a client of ours waits for the restart"
        await asyncio.wait_for(asyncio.shield(server), DEADLINE_S)


async def test_an_answer_that_never_comes_does_not_keep_a_server_from_ending(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_SHUTDOWN_S", 0.2)
    begun = asyncio.Event()

    @app.get("/stuck")
    async def stuck() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with serving(app) as (server, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.get("/stuck"))
        await begun.wait()
        app.state.server.should_exit = True
        await asyncio.wait_for(asyncio.shield(server), DEADLINE_S)
        await asyncio.wait([asking], timeout=DEADLINE_S)
        assert asking.done(), "its connection is closed, too"


# Clients that send half a request


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("sent", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le"])
async def test_connections_without_a_whole_request_head_are_closed(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.middleware.HEAD_S", 0.2)
    async with serving(app) as (_, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        address = httpx.URL(url)
        half = [socket.create_connection((address.host, address.port or 0)) for _ in range(20)]
        for connection in half:
            connection.sendall(sent)
        await until(lambda: all(map(is_closed, half)))
        for connection in half:
            connection.close()
        assert (await client.get("/version")).status_code == 200


async def test_a_body_that_stops_is_answered_with_408(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_BODY_PAUSE_S", 0.2)

    async with serving(app) as (_, url):
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
        line = await asyncio.wait_for(reader.readline(), DEADLINE_S)
        assert line.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_slow_answer_and_an_idle_connection_are_left_alone(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.middleware.HEAD_S", 0.1)

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(0.8)
        return "done"

    async with serving(app) as (_, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        for _ in range(2):
            assert (await client.get("/slow")).status_code == 200
            await asyncio.sleep(0.5)
