"""Watch a server that runs elsewhere: while requests wait for it, ask for its health.

Its owner may start it again, at the same address. RAGCache's server says on ``/health`` that its engine hangs
(``vllm_plugin/server/progress.py``); vLLM's own knows only whether the engine's process is there.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import httpcore
import httpx

from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout, Health, check_first_token_timeout, check_seconds
from ragcache_core.client.http.errors import hang_of
from ragcache_core.client.http.network import BlockingNetwork, with_abort_check
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of

RESTART_TIMEOUT_S = 300.0
"""Default seconds that a completion waits for a server to come back. Large models load for minutes."""
HANG_TIMEOUT_S = 30.0
"""Default seconds without any answer after which a server hangs."""
_LOOK_S = 1.0
_SUSPICIOUS_LOOK_S = 0.2
_WANTED_S = 5.0
"""Seconds for which it is checked after a request waited."""
_TIMEOUT_S = 5.0
logger = logger_of(__name__)


def recovery_settings(*, has_engine: bool, **timeouts: FirstTokenTimeout) -> dict[str, Any]:
    """Return the arguments of ``Engine.connect`` that say how long its requests wait for a server.

    Args:
        has_engine: whether the caller has an engine already, whose own settings hold.
        **timeouts: ``restart_timeout_s``, ``hang_timeout_s`` and ``first_token_timeout_s``.

    Raises:
        ConfigError: a time that cannot work, or one that was set together with an engine.
    """
    for name, value in timeouts.items():
        if name == "first_token_timeout_s":
            check_first_token_timeout(value)
        else:
            check_seconds(name, (value or None) if name == "restart_timeout_s" else value)
        if has_engine and value != _DEFAULTS[name]:
            raise ConfigError(f"engine= and {name}= were both given: pass {name}= to Engine.connect or Engine.launch")
    return dict(timeouts)


_DEFAULTS: dict[str, FirstTokenTimeout] = {
    "restart_timeout_s": RESTART_TIMEOUT_S,
    "hang_timeout_s": HANG_TIMEOUT_S,
    "first_token_timeout_s": AUTO,
}


class RemoteServerMonitor:
    """A :class:`~ragcache_core.client.http.attempt.ServerWatch` of a server with another owner.

    Its thread runs while requests wait. All methods may be called by any thread; a fork begins with no thread.
    """

    run = 1

    def __init__(self, health_url: str, *, retry_timeout_s: float | None, hang_timeout_s: float | None) -> None:
        """``retry_timeout_s``: how long a request waits for a server that is gone.

        One that says nothing for ``hang_timeout_s`` seconds, not even how it is, hangs.
        """
        self.retry_timeout_s = retry_timeout_s
        self._url = health_url
        self._hang_timeout_s = hang_timeout_s
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted_until_s = 0.0
        self._is_suspected = False
        self._alive_at_s = 0.0
        self._hang: str | None = None
        self._out_since_s: float | None = None

    def health(self) -> Health:
        return Health.READY

    def request_health_check(self, run: int) -> None:
        self._is_suspected = True
        self._wake.set()
        self._look()

    def healthy_since(self, monotonic_s: float) -> bool:
        self._look()
        return self._alive_at_s > monotonic_s

    def stall_reason(self) -> str | None:
        self._look()
        return self._hang

    def exit_reason(self) -> str:
        raise AssertionError("only its owner knows that a server does not come back")

    def close(self, grace_s: float = 0.0) -> None:
        """End the thread; the server is its owner's. May be called again."""
        self._closed.set()
        self._wake.set()
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def _look(self) -> None:
        """Have the thread look at the server for a while."""
        self._wanted_until_s = time.monotonic() + _WANTED_S
        if (thread := self._thread) is not None and thread.is_alive():
            return
        if not self._closed.is_set() and self._starting.acquire(blocking=False):  # else another one does
            self._hang = None
            self._thread = threading.Thread(target=self._watch, name="ragcache-joined-server", daemon=True)
            self._thread.start()
            self._starting.release()

    def _watch(self) -> None:
        silent_s = 0.0
        tls = httpx.create_ssl_context(verify=self._url.startswith("https"))
        with httpx.Client(transport=BlockingNetwork(httpx.Limits(), tls), timeout=_TIMEOUT_S) as http:
            while not self._closed.is_set() and time.monotonic() < self._wanted_until_s:
                self._wake.clear()
                checked_at_s = time.monotonic()
                try:
                    with with_abort_check(self._check_open):
                        answer = http.get(self._url)
                    failure = f"status {answer.status_code}"
                except httpx.ReadTimeout:
                    silent_s += _TIMEOUT_S
                    if self._hang_timeout_s is not None and silent_s >= self._hang_timeout_s:
                        self._hang = f"the engine at {self._url} has not said for {silent_s:g} s how it is"
                    continue
                except httpx.HTTPError as error:
                    answer, failure = None, f"{type(error).__name__}: {error}"
                silent_s = 0.0
                self._hang = None if answer is None else hang_of(answer)
                is_alive = answer is not None and answer.status_code < 500  # a proxy may not pass /health on
                self._log(failure, checked_at_s, is_alive=is_alive)
                if is_alive:
                    self._alive_at_s, self._is_suspected = checked_at_s, False
                self._wake.wait(_SUSPICIOUS_LOOK_S if self._is_suspected else _LOOK_S)
        self._out_since_s = None

    def _log(self, failure: str, now_s: float, *, is_alive: bool) -> None:
        """Log once that requests begin to wait for the server, and once that it is back."""
        address = self._url.removesuffix("/health")
        if is_alive and self._out_since_s is not None:
            logger.warning(
                "RC-ENGINE-BACK: engine at %s answers again after %.0f s", address, now_s - self._out_since_s
            )
            self._out_since_s = None
        elif not is_alive and self._is_suspected and self._out_since_s is None and self.retry_timeout_s != 0:
            self._out_since_s = now_s
            limit = (
                "as long as their answers may take"
                if self.retry_timeout_s is None
                else f"up to {self.retry_timeout_s:g} s"
            )
            logger.warning(
                "RC-ENGINE-AWAY: engine at %s does not answer (%s): its completions wait for it, %s "
                "(restart_timeout_s)",
                address,
                failure,
                limit,
            )

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise httpcore.ReadError("the watch was closed")
