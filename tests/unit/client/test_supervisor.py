"""The owner of a server: what it takes for dead or hanging, and how often it starts it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ragcache_core.client.http.attempt import Health
from ragcache_core.client.launch import supervisor as module
from ragcache_core.client.launch.supervisor import LoadProgress, Supervisor
from ragcache_core.errors import EngineStartError
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import until

BUSY = "exec('while True: pass')"
IDLE = "import time; time.sleep(600)"


class FakeProcess:
    """A run of the server as its owner sees it: a process, which answers nothing itself."""

    log_path = Path("server.log")

    def __init__(self, work: str = IDLE) -> None:
        self._popen = subprocess.Popen([sys.executable, "-c", work])
        self.pid = self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def log_text(self) -> str:
        return ""

    def last_words(self) -> str:
        return "it said nothing"

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def stop(self, grace_s: float = 0.0) -> None:
        self.kill()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


Own = Callable[..., Supervisor]


@pytest.fixture
def own(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    monkeypatch.setattr(module, "_HEALTH_TIMEOUT_S", 0.2)
    owners: list[Supervisor] = []

    def own(
        start: Callable[[], Any] = FakeProcess,
        *,
        max_restarts: int = 1,
        window_s: float = 60.0,
        hang_s: float | None = 1.0,
    ) -> Supervisor:
        owner = Supervisor(
            start,
            f"{server.url}/health",
            max_restarts=max_restarts,
            restart_window_s=window_s,
            hang_timeout_s=hang_s,
            startup_timeout_s=30.0,
            progress=LoadProgress.silent(),
            closing=threading.Event(),
        )
        owners.append(owner)
        return owner

    yield own
    for owner in owners:
        owner.close()


def test_an_engine_that_hangs_by_its_servers_word_is_killed_and_started_again(own: Own, server: ScriptedServer) -> None:
    runs: list[FakeProcess] = []

    def start() -> FakeProcess:
        server.hang = None
        runs.append(FakeProcess())
        return runs[-1]

    owner = own(start)
    server.hang = "VLLM::Worker is stopped"
    assert until(lambda: owner.run == 2)
    assert runs[0].returncode == -signal.SIGKILL
    assert runs[1].returncode is None
    assert owner.health() is Health.READY
    server.hang = "VLLM::Worker is stopped again"
    assert until(lambda: owner.health() is Health.GONE)
    assert "the engine hung: VLLM::Worker is stopped again" in owner.exit_reason()
    assert "restarted 1 times, the limit" in owner.exit_reason()


@pytest.mark.parametrize("hang_s", [1.0, None])
def test_a_server_that_refuses_connections_while_its_process_lives_is_started_again(
    own: Own, server: ScriptedServer, hang_s: float | None
) -> None:
    runs: list[FakeProcess] = []
    with contextlib.ExitStack() as stack:

        def start() -> FakeProcess:
            if runs:
                stack.enter_context(ScriptedServer(port=urlsplit(server.url).port or 0))
            runs.append(FakeProcess())
            return runs[-1]

        owner = own(start, hang_s=hang_s)
        server.__exit__()
        assert until(lambda: owner.run == 2, 20), "its clients are other processes: no client here suspects it"
        assert owner.health() is Health.READY
        assert runs[0].returncode == -signal.SIGKILL
        owner.close()


def test_a_restart_that_fails_counts_as_one_and_the_next_one_waits(
    own: Own, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_S", 0.3)
    runs: list[float] = []
    processes: list[FakeProcess] = []

    def start() -> FakeProcess:
        runs.append(time.monotonic())
        if len(runs) in (2, 3):
            raise EngineStartError("no GPU memory is free yet")
        processes.append(FakeProcess())
        return processes[-1]

    owner = own(start, max_restarts=3)
    processes[-1].kill()
    assert until(lambda: owner.run == 2, 20)
    assert owner.health() is Health.READY
    assert len(runs) == 4
    assert runs[2] - runs[1] >= 0.3
    assert runs[3] - runs[2] >= 0.6
    assert until(lambda: "is ready again" in caplog.text)
    for told in ("restarting (attempt 1 of 3)", "(attempt 2 of 3): no GPU memory is free yet", "(attempt 3 of 3)"):
        assert caplog.text.count(told) == 1


def test_restarts_that_keep_failing_end_at_the_limit_whatever_the_window(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_S", 0.05)
    runs: list[FakeProcess] = []

    def start() -> FakeProcess:
        if runs:
            runs.append(runs[0])
            raise EngineStartError("no GPU memory is free yet")
        runs.append(FakeProcess())
        return runs[0]

    owner = own(start, max_restarts=3, window_s=0.01)
    runs[0].kill()
    assert until(lambda: owner.health() is Health.GONE, 20)
    assert len(runs) == 1 + 3
    for said in ("exit status -9", "restarted 3 times", "the last restart failed: no GPU memory is free yet"):
        assert said in owner.exit_reason()


def test_a_close_does_not_wait_for_the_next_restart(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_S", 600.0)
    runs: list[FakeProcess] = []

    def start() -> FakeProcess:
        runs.append(FakeProcess() if not runs else runs[0])
        if len(runs) > 1:
            raise EngineStartError("no GPU memory is free yet")
        return runs[0]

    owner = own(start, max_restarts=3)
    runs[0].kill()
    assert until(lambda: len(runs) == 2)
    closing = threading.Thread(target=owner.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_restarts_are_counted_within_a_window_and_not_for_ever(own: Own) -> None:
    runs: list[FakeProcess] = []

    def start() -> FakeProcess:
        runs.append(FakeProcess())
        return runs[-1]

    owner = own(start, max_restarts=1, window_s=0.5)
    for run in (2, 3, 4):
        runs[-1].kill()
        assert until(lambda run=run: owner.run == run)
        threading.Event().wait(0.6)  # the window passes
    assert owner.num_restarts == 3
    runs[-1].kill()
    assert until(lambda: owner.run == 5)
    runs[-1].kill()
    assert until(lambda: owner.health() is Health.GONE), "the second one within the window"
    assert "exit status -9" in owner.exit_reason()


def test_a_server_with_a_stopped_process_is_restarted(own: Own, server: ScriptedServer) -> None:
    def start() -> FakeProcess:
        server.health_wait_s = 0.0
        return FakeProcess()

    owner = own(start)
    os.kill(owner.pid, signal.SIGSTOP)
    server.health_wait_s = 60.0
    assert until(lambda: owner.run == 2, 20)


@pytest.mark.slow
def test_a_busy_server_that_is_slow_to_say_how_it_is_is_left_alone(own: Own, server: ScriptedServer) -> None:
    owner = own(lambda: FakeProcess(BUSY), hang_s=2.0)
    server.health_wait_s = 60.0
    assert not until(lambda: owner.run == 2 or owner.health() is Health.GONE, 4.0)
    server.health_wait_s = 0.0
    assert owner.health() is Health.READY


def test_a_server_that_rejects_requests_is_restarted_only_after_a_health_check_request(
    own: Own, server: ScriptedServer
) -> None:
    def start() -> FakeProcess:
        server.is_healthy = True
        return FakeProcess()

    owner = own(start)
    server.is_healthy = False
    assert not until(lambda: owner.run == 2, 1.0)
    owner.request_health_check(1)
    assert until(lambda: owner.run == 2, 20)
