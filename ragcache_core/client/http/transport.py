"""HTTP transports that survive the death of the engine: a request is sent again until its first token has arrived.

They sit below every client (the OpenAI SDK, LangChain, LlamaIndex), so all of them recover in the same way. A
response is handed on only when its first bytes are there; until then the caller has seen nothing, and the
request can be sent to the restarted server. Afterwards an answer continues where it was cut, and one that cannot fails
with :class:`~ragcache_core.errors.EngineDiedError` (RAGCache §6: before the first token a request is recomputed,
afterwards it continues from the KV that is stored).

A request that was speculated is not sent: it joins the speculation's answer, and is sent if that failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from weakref import WeakKeyDictionary, WeakSet

import httpx

from ragcache_core.client.http.attempt import BROKEN, Attempt, RetryPolicy, ServerWatch, engine_died
from ragcache_core.client.http.resume import ResumedAnswers
from ragcache_core.client.http.routing import AsyncRoutedTransport, Replicas, RoutedTransport
from ragcache_core.client.http.waiting import async_patient_transport, checking, patient_transport
from ragcache_core.client.speculation.speculation import SpeculationManager
from ragcache_core.client.tracing import RequestTrace, RequestTraces, ended_by_errors
from ragcache_core.errors import EngineClosedError, EngineDiedError

_POLL_S = 0.05
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5.0)
_ASYNC_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""An idle connection would outlive its event loop, and could not be closed then; a new one costs 0.2 ms on loopback."""
_all: WeakSet[RetryingTransport] = WeakSet()
_FAILED = (*BROKEN, httpx.ReadTimeout)


class RetryingTransport(httpx.BaseTransport):
    """The blocking transport. ``watch`` is the server's owner; without one nothing is sent again.

    With ``replicas`` each request goes to the one that is chosen for it.

    A fork starts with connections of its own: on a shared one, two processes would read each other's answers.
    """

    def __init__(
        self,
        watch: ServerWatch | None = None,
        speculations: SpeculationManager | None = None,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008 (frozen)
        traces: RequestTraces | None = None,
        replicas: Replicas | None = None,
        resumed: ResumedAnswers | None = None,
    ) -> None:
        self._watch = watch
        self._speculations = speculations
        self._policy = policy
        self._traces = traces or RequestTraces()
        self._replicas = replicas
        self._resumed = resumed or ResumedAnswers()
        self._tls = httpx.create_ssl_context()  # takes milliseconds to make: once, not per fork
        self._inner: httpx.BaseTransport | None = self._new_inner()
        _all.add(self)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        began_ns = time.time_ns()
        attempt = Attempt(self._watch, request, self._policy, self._resumed)
        is_open = self._inner is not None
        joined = self._speculations.join(request) if is_open and self._speculations is not None else None
        trace = self._traces.begin(attempt.request, began_ns, joined)
        with ended_by_errors(trace):
            response = self.open(attempt, attempt.request) if joined is None else joined
        attempt.answered(response)
        if trace is not None and response.status_code >= 400:
            trace.refused(response.status_code)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _SyncBody(self, attempt, response.stream, trace)
        return response

    def open(self, attempt: Attempt, request: httpx.Request, error: Exception | None = None) -> httpx.Response:
        """Return the answer to ``request`` once its first bytes are there; after ``error``, when the server is back."""
        while True:
            if error is not None:
                attempt.failed(error)
                while self._inner is not None and not attempt.may_retry():
                    time.sleep(_POLL_S)
            if self._inner is None:
                raise EngineClosedError("the engine was closed: launch or connect again")
            attempt.begin()
            try:
                with checking(attempt.check_first):
                    response = self._inner.handle_request(request)
                    try:
                        assert isinstance(response.stream, httpx.SyncByteStream)
                        rest = iter(response.stream)
                        first = next(rest, b"")
                        if engine_died(response, first):
                            raise _died_early()
                    except BaseException:
                        response.close()
                        raise
                response.stream = _Begun(first, rest, response.stream)
                return response
            except _FAILED as failure:
                error = failure

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _new_inner(self) -> httpx.BaseTransport:
        inner = patient_transport(_LIMITS, self._tls)
        return inner if self._replicas is None else RoutedTransport(self._replicas, inner)

    def _start_anew(self) -> None:
        # The parent's connections are not closed here: that takes locks, which another of its threads may have held.
        if self._inner is not None:
            self._inner = self._new_inner()


class AsyncRetryingTransport(httpx.AsyncBaseTransport):
    """The asynchronous transport; one instance serves any number of event loops and keeps no idle connection."""

    def __init__(
        self,
        watch: ServerWatch | None = None,
        speculations: SpeculationManager | None = None,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008 (frozen)
        traces: RequestTraces | None = None,
        replicas: Replicas | None = None,
        resumed: ResumedAnswers | None = None,
    ) -> None:
        self._watch = watch
        self._speculations = speculations
        self._policy = policy
        self._traces = traces or RequestTraces()
        self._replicas = replicas
        self._resumed = resumed or ResumedAnswers()
        self._inner: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncBaseTransport] = WeakKeyDictionary()
        self._tls = httpx.create_ssl_context()  # takes milliseconds to make: once, not per event loop
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        began_ns = time.time_ns()
        attempt = Attempt(self._watch, request, self._policy, self._resumed)
        is_open = not self._closed
        joined = await self._speculations.ajoin(request) if is_open and self._speculations is not None else None
        trace = self._traces.begin(attempt.request, began_ns, joined)
        with ended_by_errors(trace):
            response = await self.open(attempt, attempt.request) if joined is None else joined
        attempt.answered(response)
        if trace is not None and response.status_code >= 400:
            trace.refused(response.status_code)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _AsyncBody(self, attempt, response.stream, trace)
        return response

    async def open(self, attempt: Attempt, request: httpx.Request, error: Exception | None = None) -> httpx.Response:
        """Return the answer to ``request`` once its first bytes are there; after ``error``, when the server is back."""
        while True:
            if error is not None:
                attempt.failed(error)
                while not self._closed and not attempt.may_retry():  # noqa: ASYNC110 (its watch is in no loop)
                    await asyncio.sleep(_POLL_S)
            if self._closed:
                raise EngineClosedError("the engine was closed: launch or connect again")
            attempt.begin()
            try:
                with checking(attempt.check_first):
                    response = await self._transport().handle_async_request(request)
                    try:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        rest = aiter(response.stream)
                        first = await anext(rest, b"")
                        if engine_died(response, first):
                            raise _died_early()
                    except BaseException:
                        await response.aclose()
                        raise
                response.stream = _AsyncBegun(first, rest, response.stream)
                return response
            except _FAILED as failure:
                error = failure

    def _transport(self) -> httpx.AsyncBaseTransport:
        loop = asyncio.get_running_loop()
        if (inner := self._inner.get(loop)) is None:
            inner = async_patient_transport(_ASYNC_LIMITS, self._tls)
            if self._replicas is not None:
                inner = AsyncRoutedTransport(self._replicas, inner)
            self._inner[loop] = inner
        return inner

    def close(self) -> None:
        """Refuse further requests. There are no idle connections to close."""
        self._closed = True

    async def aclose(self) -> None:
        self.close()


class _Begun(httpx.SyncByteStream):
    """A body whose first bytes were read already."""

    def __init__(self, first: bytes, rest: Iterator[bytes], whole: httpx.SyncByteStream) -> None:
        self._first, self._rest, self._whole = first, rest, whole

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        yield from self._rest

    def close(self) -> None:
        self._whole.close()


class _AsyncBegun(httpx.AsyncByteStream):
    """A body whose first bytes were read already."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], whole: httpx.AsyncByteStream) -> None:
        self._first, self._rest, self._whole = first, rest, whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for part in self._rest:
            yield part

    async def aclose(self) -> None:
        await self._whole.aclose()


class _SyncBody(httpx.SyncByteStream):
    """What the caller gets of an answer: all of it, from several servers if one of them dies."""

    def __init__(
        self, transport: RetryingTransport, attempt: Attempt, body: httpx.SyncByteStream, trace: RequestTrace | None
    ) -> None:
        self._transport, self._attempt, self._body, self._trace = transport, attempt, body, trace

    def __iter__(self) -> Iterator[bytes]:
        stream = self._attempt.stream
        while True:
            try:
                parts = iter(self._body)
                while True:
                    with checking(self._attempt.check):
                        part = next(parts, None)
                    if part is None:
                        break
                    if part := part if stream is None else stream.read(part):
                        if self._trace is not None:
                            self._trace.read(part)
                        yield part
                if stream is None or stream.is_over:
                    if self._trace is not None:
                        self._trace.answered()
                    return
                raise httpx.RemoteProtocolError("the engine's answer ended in the middle")
            except BROKEN as error:
                with ended_by_errors(self._trace):
                    request = self._attempt.rest(error)
                    self._body.close()
                    response = self._transport.open(self._attempt, request, error)
                    assert isinstance(response.stream, httpx.SyncByteStream)
                    self._body = response.stream
                    _check_rest(response)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.closed()
        self._body.close()


class _AsyncBody(httpx.AsyncByteStream):
    """What the caller gets of an answer: all of it, from several servers if one of them dies."""

    def __init__(
        self,
        transport: AsyncRetryingTransport,
        attempt: Attempt,
        body: httpx.AsyncByteStream,
        trace: RequestTrace | None,
    ) -> None:
        self._transport, self._attempt, self._body, self._trace = transport, attempt, body, trace

    async def __aiter__(self) -> AsyncIterator[bytes]:
        stream = self._attempt.stream
        while True:
            try:
                parts = aiter(self._body)
                while True:
                    with checking(self._attempt.check):
                        part = await anext(parts, None)
                    if part is None:
                        break
                    if part := part if stream is None else stream.read(part):
                        if self._trace is not None:
                            self._trace.read(part)
                        yield part
                if stream is None or stream.is_over:
                    if self._trace is not None:
                        self._trace.answered()
                    return
                raise httpx.RemoteProtocolError("the engine's answer ended in the middle")
            except BROKEN as error:
                with ended_by_errors(self._trace):
                    request = self._attempt.rest(error)
                    await self._body.aclose()
                    response = await self._transport.open(self._attempt, request, error)
                    assert isinstance(response.stream, httpx.AsyncByteStream)
                    self._body = response.stream
                    _check_rest(response)

    async def aclose(self) -> None:
        if self._trace is not None:
            self._trace.closed()
        await self._body.aclose()


def _check_rest(response: httpx.Response) -> None:
    """Raise if a server does not go on with an answer; the caller closes it."""
    if response.status_code != 200:
        raise EngineDiedError(
            f"the engine died during an answer, and its successor answered {response.status_code} when it was to go "
            "on: ask again"
        )


def _died_early() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError("the engine died before the first token")


def _start_all_anew() -> None:
    for transport in list(_all):
        transport._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
