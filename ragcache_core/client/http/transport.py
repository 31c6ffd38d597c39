"""HTTP transports that survive the death of the engine: a request is sent again until its first token has arrived.

They sit below every client (the OpenAI SDK, LangChain, LlamaIndex), so all of them recover in the same way. A
response is handed on only when its first bytes are there; until then the caller has seen nothing, and the
request can be sent to the restarted server. Afterwards the answer fails with
:class:`~ragcache_core.errors.EngineDiedError` (RAGCache §6: before the first token a request is recomputed).

A request that was speculated is not sent: it joins the speculation's answer, and is sent if that failed.
"""

from __future__ import annotations

import asyncio
import enum
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import httpx

from ragcache_core.client.http.errors import says_engine_died
from ragcache_core.client.speculation.manager import SpeculationManager
from ragcache_core.errors import EngineClosedError, EngineDiedError

_POLL_S = 0.05
_MAX_RETRIES = 3
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5.0)
_ASYNC_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""An idle connection would outlive its event loop, and could not be closed then; a new one costs 0.2 ms on loopback."""
SENT_ONCE = {"ragcache_sent_once": True}
"""Extensions of a request that is worth one try: it is not sent again, waits for no restart, and raises no suspicion
that the server has died."""
_all: WeakSet[RetryingTransport] = WeakSet()
_BROKEN = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Health(enum.Enum):
    """The state of a server, as its supervisor knows it."""

    READY = enum.auto()
    RESTARTING = enum.auto()
    GONE = enum.auto()


class ServerWatch(Protocol):
    """The owner of a server, as a transport sees it. Its methods return at once and may be called by any thread."""

    @property
    def run(self) -> int:
        """Number of the server's current run; it grows with each restart."""
        ...

    def health(self) -> Health: ...

    def suspect(self, run: int) -> None:
        """Ask for a check of the server: its run number ``run`` did not answer as it should."""
        ...

    def seen_alive_since(self, monotonic_s: float) -> bool:
        """Return whether a check that was asked for after ``monotonic_s`` found the server alive."""
        ...

    def why_gone(self) -> str: ...


class _Attempt:
    """Decides, for one request, whether it may be sent again. Holds no connection."""

    def __init__(self, watch: ServerWatch | None, request: httpx.Request) -> None:
        self._watch = watch = None if SENT_ONCE.keys() <= request.extensions.keys() else watch
        self._run = watch.run if watch else 0
        self._failed_at_s = 0.0
        self._retries_left = _MAX_RETRIES

    def failed(self, error: Exception) -> None:
        """Note a failure before the first token; raise it if the server has no supervisor, or keeps failing."""
        if self._watch is None or self._retries_left == 0:
            raise error
        self._retries_left -= 1
        self._failed_at_s = time.monotonic()
        self._watch.suspect(self._run)

    def check_time(self, request: httpx.Request) -> None:
        """Give up waiting for a restart when the request's own read timeout is over."""
        timeout_s = request.extensions.get("timeout", {}).get("read")
        if timeout_s is not None and time.monotonic() - self._failed_at_s > timeout_s:
            raise httpx.ReadTimeout(f"the engine was not back after {timeout_s:g} s", request=request)

    def may_retry(self) -> bool:
        """Return whether the server answers (again); raise if it will not be restarted."""
        assert self._watch is not None
        health = self._watch.health()
        if health is Health.GONE:
            raise EngineDiedError(self._watch.why_gone())
        restarted = self._watch.run != self._run
        if health is Health.READY and (restarted or self._watch.seen_alive_since(self._failed_at_s)):
            self._run = self._watch.run
            return True
        return False


def _engine_died(response: httpx.Response, first_bytes: bytes) -> bool:
    streamed = "text/event-stream" in response.headers.get("content-type", "")
    failed = response.status_code >= 500 or (streamed and b'"error"' in first_bytes)
    return failed and says_engine_died(first_bytes.decode(errors="replace"))


def _died_early() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError("the engine died before the first token")


class RetryingTransport(httpx.BaseTransport):
    """The blocking transport. ``watch`` is the server's owner; without one nothing is sent again.

    A fork starts with connections of its own: on a shared one, two processes would read each other's answers.
    """

    def __init__(self, watch: ServerWatch | None = None, speculations: SpeculationManager | None = None) -> None:
        self._watch = watch
        self._speculations = speculations
        self._tls = httpx.create_ssl_context()  # takes milliseconds to make: once, not per fork
        self._inner: httpx.HTTPTransport | None = self._new_inner()
        _all.add(self)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._inner is None:
            raise EngineClosedError("the engine was closed: launch or connect again")
        request.read()
        if self._speculations is not None and (joined := self._speculations.join(request)) is not None:
            return joined
        attempt = _Attempt(self._watch, request)
        while True:
            try:
                response = self._inner.handle_request(request)
                try:
                    assert isinstance(response.stream, httpx.SyncByteStream)
                    rest = iter(response.stream)
                    first = next(rest, b"")
                    if _engine_died(response, first):
                        raise _died_early()
                except BaseException:
                    response.close()
                    raise
                response.stream = _SyncBody(first, rest, response.stream)
                return response
            except _BROKEN as error:
                attempt.failed(error)
            while not attempt.may_retry():
                attempt.check_time(request)
                time.sleep(_POLL_S)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _new_inner(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(limits=_LIMITS, verify=self._tls)

    def _start_anew(self) -> None:
        # The parent's connections are not closed here: that takes locks, which another of its threads may have held.
        if self._inner is not None:
            self._inner = self._new_inner()


class AsyncRetryingTransport(httpx.AsyncBaseTransport):
    """The asynchronous transport; one instance serves any number of event loops and keeps no idle connection."""

    def __init__(self, watch: ServerWatch | None = None, speculations: SpeculationManager | None = None) -> None:
        self._watch = watch
        self._speculations = speculations
        self._inner: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncHTTPTransport] = WeakKeyDictionary()
        self._tls = httpx.create_ssl_context()  # takes milliseconds to make: once, not per event loop
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._closed:
            raise EngineClosedError("the engine was closed: launch or connect again")
        loop = asyncio.get_running_loop()
        inner = self._inner.get(loop)
        if inner is None:
            inner = self._inner[loop] = httpx.AsyncHTTPTransport(limits=_ASYNC_LIMITS, verify=self._tls)
        await request.aread()
        if self._speculations is not None and (joined := await self._speculations.ajoin(request)) is not None:
            return joined
        attempt = _Attempt(self._watch, request)
        while True:
            try:
                response = await inner.handle_async_request(request)
                try:
                    assert isinstance(response.stream, httpx.AsyncByteStream)
                    rest = aiter(response.stream)
                    first = await anext(rest, b"")
                    if _engine_died(response, first):
                        raise _died_early()
                except BaseException:
                    await response.aclose()
                    raise
                response.stream = _AsyncBody(first, rest, response.stream)
                return response
            except _BROKEN as error:
                attempt.failed(error)
            while not attempt.may_retry():
                attempt.check_time(request)
                await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Refuse further requests. There are no idle connections to close."""
        self._closed = True

    async def aclose(self) -> None:
        self.close()


class _SyncBody(httpx.SyncByteStream):
    """A body whose first bytes were read already."""

    def __init__(self, first: bytes, rest: Iterator[bytes], whole: httpx.SyncByteStream) -> None:
        self._first, self._rest, self._whole = first, rest, whole

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        yield from self._rest

    def close(self) -> None:
        self._whole.close()


class _AsyncBody(httpx.AsyncByteStream):
    """A body whose first bytes were read already."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], whole: httpx.AsyncByteStream) -> None:
        self._first, self._rest, self._whole = first, rest, whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for part in self._rest:
            yield part

    async def aclose(self) -> None:
        await self._whole.aclose()


def _start_all_anew() -> None:
    for transport in list(_all):
        transport._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
