"""Own a server: start it, say when it is ready, start it again if it dies, end it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import httpx

from ragcache_core.client.http.transport import Health
from ragcache_core.client.launch.activity import Activity
from ragcache_core.client.launch.process import GRACE_S, ServerProcess
from ragcache_core.client.launch.progress import LoadProgress
from ragcache_core.errors import EngineClosedError, EngineStartError
from ragcache_core.runtime.sessions import num_bytes_moved

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 5.0
_MAX_SLOW_CHECKS = 3
"""A server that is busy may be slow to say that it is well; so many times in a row it counts as dead."""


class Supervisor:
    """Keeps one server running; a :class:`~ragcache_core.client.http.transport.ServerWatch`.

    ``start_process`` starts a run of the server, each time at the same address with the same key, so that clients
    stay valid over a restart. It is restarted at most ``max_restarts`` times. All methods may be called by any thread.
    """

    def __init__(
        self,
        start_process: Callable[[], ServerProcess],
        health_url: str,
        *,
        max_restarts: int,
        startup_timeout_s: float,
        progress: LoadProgress,
        closing: threading.Event,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server and wait until it is ready. ``on_end`` is called when it will not be started again.

        Raises:
            EngineStartError: it ended, or made no progress for ``startup_timeout_s``.
            EngineClosedError: ``closing`` was set meanwhile.
        """
        self._start_process = start_process
        self._health_url = health_url
        self._max_restarts = max_restarts
        self._startup_timeout_s = startup_timeout_s
        self._closing = closing
        self._on_end = on_end
        self._owner_pid = os.getpid()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._health = Health.RESTARTING
        self._run = 0
        self._alive_at_s = 0.0
        self._suspected_at_s = 0.0
        self._why_gone = ""
        self._num_slow_checks = 0
        self._process: ServerProcess | None = None
        # Loopback: no proxy of the environment, no certificates.
        self._http = httpx.Client(transport=httpx.HTTPTransport(verify=False), timeout=_HEALTH_TIMEOUT_S)
        try:
            self._run_once(progress)
        except BaseException:
            self._http.close()
            on_end()
            raise
        self._thread = threading.Thread(target=self._watch, name="ragcache-supervisor", daemon=True)
        self._thread.start()

    @property
    def run(self) -> int:
        return self._run

    @property
    def num_restarts(self) -> int:
        return self._run - 1

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def health(self) -> Health:
        return self._health

    def why_gone(self) -> str:
        return self._why_gone

    def suspect(self, run: int) -> None:
        with self._lock:
            if run == self._run:
                self._suspected_at_s = time.monotonic()
        self._wake.set()

    def seen_alive_since(self, monotonic_s: float) -> bool:
        return self._alive_at_s > monotonic_s

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the server and everything it started. Idempotent; an interrupted call can be repeated.

        A fork of the owner does not own the server: there it does nothing.
        """
        if os.getpid() != self._owner_pid:
            return
        self._closing.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        assert self._process is not None
        try:
            self._process.stop(grace_s)
        finally:
            self._give_up("the engine was closed: launch or connect again")
            self._http.close()

    def _watch(self) -> None:
        try:
            while not self._closing.is_set() and self._health is not Health.GONE:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                if self._has_died() and not self._closing.is_set():
                    self._restart()
        except BaseException as error:  # whoever waits for a restart must hear that there is none
            self._give_up(f"the engine's supervisor failed ({type(error).__name__}: {error}): launch it again")
            raise

    def _has_died(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            return True
        with self._lock:
            suspected = self._suspected_at_s > self._alive_at_s
        return suspected and self._fails_its_check()

    def _fails_its_check(self) -> bool:
        try:
            return not self._answers()
        except httpx.TimeoutException:
            self._num_slow_checks += 1
            return self._num_slow_checks >= _MAX_SLOW_CHECKS

    def _answers(self) -> bool:
        """Return whether the server says that it is well; a slow one raises ``httpx.TimeoutException``."""
        asked_at_s = time.monotonic()
        try:
            alive = self._http.get(self._health_url).status_code == 200
        except httpx.TimeoutException:
            raise
        except (httpx.HTTPError, OSError):
            return False
        if alive:
            self._alive_at_s = asked_at_s
            self._num_slow_checks = 0
        return alive

    def _restart(self) -> None:
        assert self._process is not None
        self._health = Health.RESTARTING
        self._process.kill()
        died = f"the engine died (exit status {self._process.returncode}): {self._process.last_words()}"
        if self.num_restarts >= self._max_restarts:
            self._give_up(f"{died}. It was restarted {self.num_restarts} times, the limit: launch it again")
            return
        try:
            self._run_once(LoadProgress.silent())
        except (EngineStartError, EngineClosedError, OSError) as error:
            self._give_up(f"{died}. Its restart failed: {error}")

    def _give_up(self, why: str) -> None:
        self._why_gone = why
        self._health = Health.GONE
        self._on_end()

    def _run_once(self, progress: LoadProgress) -> None:
        """Start a run and wait until it is ready; on failure nothing of it is left."""
        process = self._process = self._start_process()
        try:
            with progress:
                self._wait_until_ready(process, progress)
        except BaseException:
            process.stop(grace_s=5.0)
            raise
        with self._lock:
            self._run += 1
            self._health = Health.READY

    def _is_ready(self) -> bool:
        try:
            return self._answers()
        except httpx.TimeoutException:
            return False

    def _wait_until_ready(self, process: ServerProcess, progress: LoadProgress) -> None:
        activity = Activity(lambda: num_bytes_moved(process.pid))
        while not self._is_ready():
            if process.returncode is not None:
                raise EngineStartError(
                    f"the engine ended with exit status {process.returncode} before it was ready: "
                    f"{process.last_words()}"
                )
            if self._closing.is_set():
                raise EngineClosedError("the engine was closed while it was starting")
            progress.update(log := process.log_text())
            if activity.is_stuck(log, self._startup_timeout_s):
                raise EngineStartError(
                    f"the engine was not ready, and had made no progress for {self._startup_timeout_s:g} s: raise "
                    f"startup_timeout_s. It said last: {process.last_words()}"
                )
            self._closing.wait(_POLL_S)
