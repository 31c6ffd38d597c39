"""The server asks its engine whether it makes progress, and says so on ``/health`` when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragcache_core.errors import ConfigError
from ragcache_core.runtime.environment import HANG_TIMEOUT_ENV
from ragcache_core.runtime.hangs import ProcessUse
from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys
from ragcache_core.vllm_plugin.server.middleware import AuthMiddleware, Work
from ragcache_core.vllm_plugin.server.progress import EngineProgress, hang_timeout_s
from ragcache_core.wire import HUNG

LIMIT_S = 0.2


class Core:
    """An engine core that answers at once, until it :attr:`owes` an answer; :attr:`works` while it does or not."""

    def __init__(self) -> None:
        self.owes = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.works = False
        self.is_dead = False
        self.num_submitted = 0
        self._cpu_s = 0.0

    async def ask(self) -> bool:
        self.num_submitted += 1
        if self.is_dead:
            raise RuntimeError("EngineCore died")
        if self.owes.is_set():
            await self.goes_on.wait()
        return False

    def read(self) -> dict[int, ProcessUse]:
        self._cpu_s += 0.01 if self.works else 0.0
        return {1: ProcessUse("VLLM::Worker", self._cpu_s)}


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (a poll: there is no event)
                await asyncio.sleep(0.01)
    return bool(condition())


@pytest.fixture
async def core() -> Core:
    return Core()


async def test_an_engine_that_owes_an_answer_and_does_nothing_hangs_until_it_goes_on(core: Core) -> None:
    progress = EngineProgress(core.ask, core.read, limit_s=LIMIT_S)
    watching = asyncio.create_task(progress.watch())
    assert await eventually(lambda: core.num_submitted > 2)
    assert progress.hang is None
    core.owes.set()
    assert await eventually(lambda: progress.hang is not None)
    assert "VLLM::Worker" in (progress.hang or "")
    core.owes.clear()
    core.goes_on.set()
    assert await eventually(lambda: progress.hang is None)
    watching.cancel()


async def test_an_engine_that_computes_for_long_does_not_hang(core: Core) -> None:
    core.works = True
    core.owes.set()
    progress = EngineProgress(core.ask, core.read, limit_s=LIMIT_S)
    watching = asyncio.create_task(progress.watch())
    assert not await eventually(lambda: progress.hang is not None, 5 * LIMIT_S)
    assert core.num_submitted == 1, "one question is enough"
    watching.cancel()


async def test_an_engine_whose_step_may_take_no_longer_hangs_though_it_is_busy(core: Core) -> None:
    core.works = True
    core.owes.set()
    progress = EngineProgress(core.ask, core.read, limit_s=LIMIT_S, step_limit_s=0.5)
    watching = asyncio.create_task(progress.watch())
    assert await eventually(lambda: progress.hang is not None)
    assert "step has not ended" in (progress.hang or "")
    watching.cancel()


async def test_a_dead_engine_is_reported_by_vllm(core: Core) -> None:
    core.is_dead = True
    progress = EngineProgress(core.ask, core.read, limit_s=LIMIT_S)
    await asyncio.wait_for(progress.watch(), 5)
    assert progress.hang is None


@pytest.mark.parametrize(("said", "seconds"), [(None, 30.0), ("", 30.0), ("2.5", 2.5), ("0", None)])
def test_the_environment_reports_how_long_is_too_long(said: str | None, seconds: float | None) -> None:
    assert hang_timeout_s({} if said is None else {HANG_TIMEOUT_ENV: said}) == seconds


@pytest.mark.parametrize("said", ["soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match=f"{HANG_TIMEOUT_ENV} is '{said}'; it must be a number of seconds"):
        hang_timeout_s({HANG_TIMEOUT_ENV: said})


def test_health_says_that_the_engine_hangs_and_other_routes_are_served() -> None:
    async def fine(request: Any) -> PlainTextResponse:
        return PlainTextResponse("fine")

    app = Starlette(routes=[Route(path, fine) for path in ("/health", "/ready", "/version")])
    app.add_middleware(AuthMiddleware, keys=AcceptedKeys(["secret"]), work=Work())
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        app.state.ragcache_progress = SimpleNamespace(hang=None)
        assert client.get("/health").status_code == 200
        app.state.ragcache_progress.hang = "VLLM::Worker (process 3) stands still"
        hung = client.get("/health")
        assert (hung.status_code, hung.json()["error"]["type"]) == (503, HUNG)
        assert "process 3" in hung.json()["error"]["message"]
        assert client.get("/ready").status_code == 503
        assert client.get("/version").text == "fine"
