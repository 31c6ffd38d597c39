"""Own a server: start it, say when it is ready, start it again if it dies, end it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import httpx

from ragcache_core.client.http.attempt import Health
from ragcache_core.client.http.errors import hang_of
from ragcache_core.client.launch.process import GRACE_S, ServerProcess, unprefixed
from ragcache_core.errors import EngineClosedError, EngineStartError
from ragcache_core.log import logger_of
from ragcache_core.runtime.hangs import HangDetector, read_use
from ragcache_core.runtime.sessions import num_bytes_moved, other_listener
from ragcache_core.runtime.terminal import Bar

_MOVED_BYTES = 16 << 20
"""A server that hangs writes its log, and little else."""
STAGES = (
    ("starting", ""),
    ("reading the model's configuration", "Resolved architecture"),
    ("starting the engine", "Initializing a V1 LLM engine"),
    ("loading weights", "Starting to load model"),
    ("allocating the KV cache", "GPU KV cache size"),
    ("starting the server", "Starting vLLM server"),
)
"""Stages of a start, each with the words that vLLM logs when it begins. A word that moves costs a label only."""
_POLL_S = 0.1
_LOOK_S = 1.0
"""Between two checks of a server that is not suspected."""
_HEALTH_TIMEOUT_S = 5.0
_MAX_SLOW_CHECKS = 3
"""Slow answers in a row after which a suspected server counts as dead; a busy one may be slow to answer."""
_MAX_REFUSED = 3
"""Checks in a row whose connection is refused: a server that listens no more counts as dead, suspected or not."""
_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
logger = logger_of(__name__)


class Activity:
    """Looks at a server's log, and at what it reads and writes, for signs of progress.

    ``num_bytes_moved`` is what its processes have read from and written to storage so far. What a server that waits
    for something says again and again is no progress.
    """

    def __init__(self, num_bytes_moved: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes_moved = num_bytes_moved
        self._clock = clock
        self._moved_at_s = clock()
        self._num_bytes = 0
        self._log_size = 0
        self._logged_lines: set[str] = set()

    def is_stuck(self, log: str, timeout_s: float) -> bool:
        """Return whether there was no progress for ``timeout_s`` seconds; ``log`` is what was logged so far."""
        if self._has_new_lines(log):
            self._moved_at_s = self._clock()
        if self._clock() - self._moved_at_s <= timeout_s:
            return False
        num_bytes = self._num_bytes_moved()
        if num_bytes - self._num_bytes < _MOVED_BYTES:
            return True
        self._num_bytes, self._moved_at_s = num_bytes, self._clock()
        return False

    def _has_new_lines(self, log: str) -> bool:
        if len(log) == self._log_size:
            return False
        self._log_size, num_lines = len(log), len(self._logged_lines)
        self._logged_lines.update(unprefixed(line.strip()) for line in log.splitlines())
        return len(self._logged_lines) > num_lines


class LoadProgress:
    """A progress bar over the stages of a start; a context manager.

    ``on_stage`` is told each new stage instead of a bar being drawn.
    """

    def __init__(self, *, enabled: bool | None, on_stage: Callable[[str], None] | None = None) -> None:
        self._bar = Bar("engine", len(STAGES), "stages", enabled=enabled, is_kept=True, has_remaining=False)
        self._on_stage = on_stage
        self._stage = -1

    @classmethod
    def of(cls, progress: bool | Callable[[str], None] | None) -> LoadProgress:
        """Return what a user's ``progress`` means: a function, yes, no, or (``None``) yes on a terminal."""
        if callable(progress):
            return cls(enabled=False, on_stage=progress)
        return cls(enabled=progress)

    @classmethod
    def silent(cls) -> LoadProgress:
        return cls(enabled=False)

    def __enter__(self) -> LoadProgress:
        self._bar.__enter__()
        return self

    def update(self, log: str) -> None:
        """Move to the last stage that ``log`` tells of."""
        reached = max((i for i, (_, sign) in enumerate(STAGES) if sign in log), default=0)
        if reached > self._stage:
            self._bar.show(f"engine: {STAGES[reached][0]}")
            self._bar.move_to(reached)
            if self._on_stage is not None:
                self._on_stage(STAGES[reached][0])
            self._stage = reached

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._bar.show("engine: ready")
            self._bar.move_to(len(STAGES))
        self._bar.__exit__(kind, error, tb)


class Supervisor:
    """Keeps one server running; a :class:`~ragcache_core.client.http.attempt.ServerWatch`.

    ``start_process`` starts a run of the server, each time at the same address with the same key, so that clients
    stay valid over a restart. It is restarted when it dies or hangs, at most ``max_restarts`` times within
    ``restart_window_s``. A restart that fails counts, and the next one waits: 1 s, 2 s, 4 s, up to a minute. Both ends
    of a restart are logged. All methods may be called by any thread.
    """

    retry_timeout_s = None

    def __init__(
        self,
        start_process: Callable[[], ServerProcess],
        health_url: str,
        *,
        max_restarts: int,
        restart_window_s: float,
        hang_timeout_s: float | None,
        startup_timeout_s: float,
        progress: LoadProgress,
        closing: threading.Event,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server and wait until it is ready. ``on_end`` is called when it will not be started again.

        The server is checked once a second. It is restarted when it refuses connections, when it reports that its
        engine hangs, and when it does not answer for ``hang_timeout_s`` seconds and uses no processor time; with
        ``None`` it never hangs. Any other bad status counts only when a client suspects the server.

        Raises:
            EngineStartError: it ended, or made no progress for ``startup_timeout_s``.
            EngineClosedError: ``closing`` was set meanwhile.
        """
        self._start_process = start_process
        self._health_url = health_url
        self._max_restarts = max_restarts
        self._restart_window_s = restart_window_s
        self._restarted_s: deque[float] = deque()
        self._hang_timeout_s = hang_timeout_s
        self._detector: HangDetector | None = None
        self._hang: str | None = None
        self._startup_timeout_s = startup_timeout_s
        self._closing = closing
        self._on_end = on_end
        self._owner_pid = os.getpid()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._health = Health.RESTARTING
        self._run = 0
        self._alive_at_s = self._checked_at_s = 0.0
        self._suspected_at_s = 0.0
        self._exit_reason = ""
        self._num_slow_checks = self._num_refused = 0
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

    def stall_reason(self) -> str | None:
        return None  # what hangs is killed, which ends every read

    def exit_reason(self) -> str:
        return self._exit_reason

    def request_health_check(self, run: int) -> None:
        with self._lock:
            if run == self._run:
                self._suspected_at_s = time.monotonic()
        self._wake.set()

    def healthy_since(self, monotonic_s: float) -> bool:
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
            self._stop_supervising("the engine was closed: launch or connect again")
            self._http.close()

    def _watch(self) -> None:
        try:
            while not self._closing.is_set() and self._health is not Health.GONE:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                if self._has_died() and not self._closing.is_set():
                    self._restart()
        except BaseException as error:  # requests that wait for a restart must be told that there is none
            self._stop_supervising(f"the engine's supervisor failed ({type(error).__name__}: {error}): launch it again")
            raise

    def _has_died(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            return True
        with self._lock:
            is_suspected = self._suspected_at_s > self._alive_at_s
        is_due = time.monotonic() - self._checked_at_s >= _LOOK_S
        return (is_suspected or is_due) and self._fails_its_check(is_suspected)

    def _fails_its_check(self, is_suspected: bool) -> bool:
        try:
            is_alive = self._answers()
        except httpx.TimeoutException:
            self._num_slow_checks += 1
            return self._hangs() or (is_suspected and self._num_slow_checks >= _MAX_SLOW_CHECKS)
        except (httpx.HTTPError, OSError):
            self._num_refused += 1
            return is_suspected or self._num_refused >= _MAX_REFUSED
        hangs = self._hang is not None and self._hang_timeout_s is not None
        return not is_alive and (is_suspected or hangs)

    def _hangs(self) -> bool:
        """Return whether the server's own process stands still, since it was slow to answer."""
        if self._hang_timeout_s is None:
            return False
        if self._detector is None:
            self._detector = HangDetector(limit_s=self._hang_timeout_s, look_s=_HEALTH_TIMEOUT_S + _POLL_S)
        self._hang = self._detector.look(time.monotonic(), read_use(self.pid))
        return self._hang is not None

    def _answers(self) -> bool:
        """Return whether the server says that it is well.

        Raises:
            httpx.TimeoutException: it is slow. httpx.HTTPError, OSError: it accepts no connection, or cuts it.
        """
        self._checked_at_s = checked_at_s = time.monotonic()
        answer = self._http.get(self._health_url)
        self._num_slow_checks, self._num_refused, self._detector = 0, 0, None
        self._hang = hang_of(answer)
        if is_alive := answer.status_code == 200:
            self._alive_at_s = checked_at_s
        return is_alive

    def _restart(self) -> None:
        """Start the server again, until it is ready or the limit of restarts is reached."""
        process = self._process
        assert process is not None
        self._health = Health.RESTARTING
        process.kill()
        died, why = (
            (f"died (exit status {process.returncode})", process.last_words())
            if self._hang is None
            else ("hung", f"{self._hang} (log: {process.log_path})")
        )
        address, began_s = self._health_url.removesuffix("/health"), time.monotonic()
        while self._restarted_s and began_s - self._restarted_s[0] > self._restart_window_s:
            self._restarted_s.popleft()
        event, failure, pause_s = died, "", 0.0
        while len(self._restarted_s) < self._max_restarts:
            self._restarted_s.append(time.monotonic())
            when = f" in {pause_s:g} s" if pause_s else ""
            attempt = f"attempt {len(self._restarted_s)} of {self._max_restarts}"
            logger.warning(
                "RC-ENGINE-RESTARTS: engine at %s %s, restarting%s (%s): %s",
                address,
                event,
                when,
                attempt,
                failure or why,
            )
            try:
                self._closing.wait(pause_s)
                self._run_once(LoadProgress.silent())
            except EngineClosedError as error:
                self._stop_supervising(str(error))
                return
            except (EngineStartError, OSError) as error:
                event, failure = "did not start", str(error)
                pause_s = min(2 * pause_s or _BACKOFF_S, _MAX_BACKOFF_S)
            else:
                logger.warning(
                    "RC-ENGINE-READY: engine at %s is ready again after %.0f s", address, time.monotonic() - began_s
                )
                return
        last = f"; the last restart failed: {failure}" if failure else ""
        self._stop_supervising(
            f"the engine {died}: {why}. It was restarted {len(self._restarted_s)} times, the limit in "
            f"{self._restart_window_s:g} s or in one series of failures{last}. Launch it again"
        )

    def _stop_supervising(self, why: str) -> None:
        self._exit_reason = why
        self._health = Health.GONE
        self._on_end()

    def _run_once(self, progress: LoadProgress) -> None:
        """Start a run and wait until it is ready; on failure nothing of it is left."""
        if self._closing.is_set():
            raise EngineClosedError("the engine was closed while it was starting")
        self._hang = self._detector = None
        self._num_slow_checks = self._num_refused = 0
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
        except (httpx.HTTPError, OSError):
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
        port = httpx.URL(self._health_url).port
        if port is not None and (other := other_listener(process.pid, port)) is not None:
            raise EngineStartError(
                f"process {other} has served port {port} since this engine began to load: choose another port, or "
                "leave it out for a free one"
            )
