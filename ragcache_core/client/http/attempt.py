"""Decide whether a request is sent again, from the server's state and the time left."""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

import httpcore
import httpx

from ragcache_core.client.http.errors import reports_engine_death
from ragcache_core.client.http.resume import Decode, ResumableStream, ResumedAnswers, ResumeStreams, is_streamed
from ragcache_core.client.speculation.request_capture import asks_completion, asks_prompt
from ragcache_core.errors import ConfigError, EngineDiedError, EngineHungError
from ragcache_core.log import logger_of
from ragcache_core.wire import DEFAULTS_HEADER

NO_RETRY = {"ragcache_sent_once": True}
"""Extensions of a request with one attempt: it is not resent, waits for no restart, and triggers no health check."""
CONNECTION_ERRORS = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""Errors of a connection whose server is gone."""
AUTO: Final = "auto"
FirstTokenTimeout = float | Literal["auto"] | None
"""Seconds that a streamed request waits for its first token; ``None``: no limit; ``auto``: see :class:`RetryPolicy`."""
_MAX_RETRIES = 3
_LONG_TIMEOUT_S = 600.0
# The default time-out of a request. With a shorter one the caller wants an error by then, for a fallback perhaps.
_BEFORE_TIMEOUT_S = 1.0

logger = logger_of(__name__)


class Health(enum.Enum):
    """State of a server."""

    READY = enum.auto()
    RESTARTING = enum.auto()
    GONE = enum.auto()


class ServerWatch(Protocol):
    """Monitors a server for a transport. Its methods do not block and are thread-safe."""

    @property
    def run(self) -> int:
        """Number of the server's current run; it grows with each restart."""
        ...

    @property
    def retry_timeout_s(self) -> float | None:
        """How long a completion, or the tokens of its prompt, wait for a server that is gone; other requests do not.
        ``None``: all of them wait, as long as for their answer."""
        ...

    def health(self) -> Health: ...

    def request_health_check(self, run: int) -> None:
        """Request a health check, as the server's run number ``run`` did not answer correctly."""
        ...

    def healthy_since(self, monotonic_s: float) -> bool:
        """Return whether a check requested after ``monotonic_s`` found the server alive."""
        ...

    def stall_reason(self) -> str | None:
        """Return why the server will not answer; ``None`` if it may. Waiting requests call this often."""
        ...

    def exit_reason(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Settings for retries and first-token timeouts of requests.

    Attributes:
        first_token_timeout_s: a streamed request without a token by then is cancelled and sent once more. With ``auto``
            that is one second before its own time-out, if this is at least 600 s: no request is cancelled that would
            still get an answer, because its time-out ends it anyway.
        resume_streams: the streamed answers that continue where a failure of their engine cut them.
        num_servers: servers that cannot be reached before the request counts as failed.
    """

    first_token_timeout_s: FirstTokenTimeout = AUTO
    resume_streams: ResumeStreams = "all"
    num_servers: int = 1

    def __post_init__(self) -> None:
        check_first_token_timeout(self.first_token_timeout_s)
        if self.resume_streams not in (known := get_args(ResumeStreams)):
            raise ConfigError(f"resume_streams is {self.resume_streams!r:.40}; it must be one of {', '.join(known)}")

    def first_token_limit_s(self, request: httpx.Request) -> float | None:
        """Return the seconds that ``request`` waits for its first token before it is resent; ``None``: no limit."""
        if not is_streamed(request):
            return None
        if self.first_token_timeout_s != AUTO:
            return self.first_token_timeout_s
        timeout_s = _read_timeout_s(request)
        return None if timeout_s is None or timeout_s < _LONG_TIMEOUT_S else timeout_s - _BEFORE_TIMEOUT_S


class Attempt:
    """One request over all of its attempts. Holds no connection.

    Attributes:
        request: what is sent first.
        stream: reads its answer, if that can go on after a cut.
    """

    def __init__(
        self, watch: ServerWatch | None, request: httpx.Request, policy: RetryPolicy, resumed: ResumedAnswers
    ) -> None:
        self._watch = None if NO_RETRY.keys() <= request.extensions.keys() else watch
        self._resumed = resumed
        which: ResumeStreams = "off" if self._watch is None else policy.resume_streams
        self.stream = ResumableStream.of(request, which)
        self.request = request if self.stream is None else self.stream.request()
        self._run = self._watch.run if self._watch else 0
        self._retry_timeout_s = self._watch.retry_timeout_s if self._watch else None
        if self._retry_timeout_s is not None and not (asks_completion(request) or asks_prompt(request)):
            self._retry_timeout_s = 0.0
        self._limit_s = policy.first_token_limit_s(request)
        self._away_limit_s = _read_timeout_s(request)
        if asks_prompt(request):  # its time-out is for a server that is there: this waits as the completion after it
            self._away_limit_s = _LONG_TIMEOUT_S if self._retry_timeout_s is None else None
        self._sent_s = self._failed_s = 0.0
        self._error: Exception | None = None
        self._retries_left = _MAX_RETRIES
        self._others_left = policy.num_servers - 1

    def begin(self) -> None:
        """Record the start of an attempt."""
        self._sent_s = time.monotonic()

    def answered(self, response: httpx.Response) -> None:
        """Record the kind of the response; only an event stream can be continued."""
        kind = response.headers.get("content-type", "")
        if response.status_code != 200 or "text/event-stream" not in kind or "content-encoding" in response.headers:
            self.stream = None
        if self.stream is not None:
            self.stream.set_defaults(response.headers.get(DEFAULTS_HEADER))

    def check(self) -> None:
        """Raise if the answer will not come. Called during waits."""
        if self._watch is not None:
            check_progress(self._watch)

    def check_first(self) -> None:
        """Do :meth:`check`, and raise once if the first token is late."""
        self.check()
        if self._limit_s is not None and time.monotonic() - self._sent_s > self._limit_s:
            raise _FirstTokenTimeoutError

    def failed(self, error: Exception) -> None:
        """Record a failure for :meth:`may_retry`; raise it if a retry cannot help, or after too many failures."""
        if is_first_token_timeout(error):
            logger.warning(
                "RC-REQUEST-RESENT: no first token after %g s: the request is cancelled and sent once more",
                self._limit_s,
            )
            self._limit_s = None
            return
        if isinstance(error.__cause__, _HungError):
            error = EngineHungError(str(error))
        is_unsent = isinstance(error, httpx.ConnectError) and self._others_left > 0
        if self._watch is None or isinstance(error, httpx.ReadTimeout) or not (is_unsent or self._retries_left):
            raise error
        self._error = error
        if is_unsent:
            self._others_left -= 1
        else:
            self._retries_left -= 1
        self._failed_s = time.monotonic()
        self._watch.request_health_check(self._run)

    def may_retry(self) -> bool:
        """Return whether the server answers again.

        Raises:
            EngineDiedError: it will not be restarted.
            httpx.ReadTimeout: the time that the request waits for its answer is over.
            Exception: what failed, because the server's owner has had its time.
        """
        if self._error is None:
            return True
        assert self._watch is not None
        if self._watch.health() is Health.GONE:
            raise EngineDiedError(self._watch.exit_reason())
        is_restarted = self._watch.run != self._run
        if self._watch.health() is Health.READY and (is_restarted or self._watch.healthy_since(self._failed_s)):
            self._run, self._error = self._watch.run, None
            return True
        waited_s = time.monotonic() - self._failed_s
        if self._retry_timeout_s is not None and waited_s >= self._retry_timeout_s:
            raise self._error
        if self._away_limit_s is not None and waited_s > self._away_limit_s:
            raise httpx.ReadTimeout(
                f"the engine did not answer again within {self._away_limit_s:g} s", request=self.request
            ) from self._error
        return False

    async def rest(self, error: Exception, decode: Decode) -> httpx.Request:
        """Return the request for the rest of an answer cut by ``error``; raise ``error`` if it cannot continue."""
        request = None if self.stream is None else await self.stream.rest(decode)
        if request is None:
            raise EngineHungError(str(error)) if isinstance(error.__cause__, _HungError) else error
        assert self.stream is not None
        if self.stream.num_resumes and self.stream.response_id is not None:
            self._resumed.add(self.stream.response_id, self.stream)
        return request


def is_first_token_timeout(error: BaseException) -> bool:
    """Return whether a request was cancelled because its first token was late."""
    return isinstance(error.__cause__, _FirstTokenTimeoutError)


def check_progress(watch: ServerWatch) -> None:
    """Raise if ``watch`` knows that no answer will come."""
    if (why := watch.stall_reason()) is not None:
        raise _HungError(why)


def check_first_token_timeout(value: object) -> None:
    """Reject an invalid first-token timeout.

    Raises:
        ConfigError: it is neither ``auto`` nor None nor a positive number of seconds.
    """
    if value != AUTO:
        check_seconds("first_token_timeout_s", value, or_else="None for no limit, or 'auto'")


def check_seconds(name: str, value: object, or_else: str = "None for no limit") -> None:
    """Reject an invalid number of seconds.

    Raises:
        ConfigError: it is not a positive number of seconds.
    """
    if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ConfigError(f"{name} is {value!r:.40}; it must be a number of seconds above 0, or {or_else}")


def _read_timeout_s(request: httpx.Request) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s


def engine_died(response: httpx.Response, first_bytes: bytes) -> bool:
    """Return whether a response reports a crashed engine in place of its first token."""
    is_stream = "text/event-stream" in response.headers.get("content-type", "")
    failed = response.status_code >= 500 or (is_stream and b'"error"' in first_bytes)
    return failed and reports_engine_death(first_bytes.decode(errors="replace"))


class _HungError(httpcore.ReadError):
    """Ends a read, as the server hangs."""


class _FirstTokenTimeoutError(httpcore.ReadTimeout):
    """Ends a read, as the first token is late."""
