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
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from ragcache_core.client.http.attempt import CONNECTION_ERRORS, Attempt, RetryPolicy, ServerWatch, engine_died
from ragcache_core.client.http.network import (
    AsyncNetwork,
    Blocking,
    BlockingNetwork,
    Unblocked,
    unblocked,
    with_abort_check,
)
from ragcache_core.client.http.resume import ResumedAnswers
from ragcache_core.client.http.routing import AsyncRoutedTransport, Replicas
from ragcache_core.client.speculation.speculation import SpeculationManager
from ragcache_core.client.tracing import RequestTrace, RequestTraces, ended_by_errors
from ragcache_core.errors import EngineClosedError, EngineDiedError
from ragcache_core.runtime.handle import OneProcess

_POLL_S = 0.05
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5.0)
_ASYNC_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""An idle connection would outlive its event loop, and could not be closed then; a new one costs 0.2 ms on loopback."""
_FAILED = (*CONNECTION_ERRORS, httpx.ReadTimeout)


class AsyncRetryingTransport(httpx.AsyncBaseTransport):
    """The asynchronous transport, good for any event loop. ``watch`` is the server's owner.

    Without a ``watch`` nothing is sent again. With ``replicas`` each request goes to the one that is chosen for it.
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
        self._process = OneProcess()
        self._inner: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncBaseTransport] = WeakKeyDictionary()
        self._tls = httpx.create_ssl_context()  # takes milliseconds to make: once, not per event loop
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._process.check()
        await request.aread()
        began_ns = time.time_ns()
        attempt = Attempt(self._watch, request, self._policy, self._resumed)
        joined = await self._join(request) if not self._closed else None
        trace = self._traces.begin(attempt.request, began_ns, joined)
        with ended_by_errors(trace):
            response = await self.open(attempt, attempt.request) if joined is None else joined
        attempt.answered(response)
        if trace is not None and response.status_code >= 400:
            trace.refused(response.status_code)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _WholeBody(self, attempt, response.stream, trace)
        return response

    async def open(self, attempt: Attempt, request: httpx.Request, error: Exception | None = None) -> httpx.Response:
        """Return the answer to ``request`` once its first bytes are there; after ``error``, when the server is back."""
        while True:
            if error is not None:
                attempt.failed(error)
                while not self._closed and not attempt.may_retry():
                    await self._sleep(_POLL_S)  # its watch is in no loop
            if self._closed:
                raise EngineClosedError("the engine was closed: launch or connect again")
            attempt.begin()
            try:
                with with_abort_check(attempt.check_first):
                    response = await self._transport().handle_async_request(request)
                    try:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        rest = aiter(response.stream)
                        first = await anext(rest, b"")
                        if engine_died(response, first):
                            raise httpx.RemoteProtocolError("the engine died before the first token")
                    except BaseException:
                        await response.aclose()
                        raise
                response.stream = _BegunBody(first, rest, response.stream)
                return response
            except _FAILED as failure:
                error = failure

    async def decode(self, attempt: Attempt, error: Exception, token_ids: list[int]) -> str | None:
        """Return the text of tokens of an answer that ``error`` cut, once the server is back; ``None`` if unknown."""
        original = attempt.request
        headers = {name: value for name, value in original.headers.items() if name == "authorization"}
        body = {"model": json.loads(original.content).get("model"), "tokens": token_ids}
        url = f"{str(original.url).partition('/v1/')[0]}/detokenize"
        request = httpx.Request("POST", url, headers=headers, json=body, extensions=original.extensions)
        own = Attempt(self._watch, request, self._policy, self._resumed)
        response = await self.open(own, request, error)
        try:
            text = json.loads(await response.aread()).get("prompt") if response.status_code == 200 else None
        except ValueError:
            return None
        finally:
            await response.aclose()
        return text if isinstance(text, str) else None

    async def _join(self, request: httpx.Request) -> httpx.Response | None:
        return None if self._speculations is None else await self._speculations.ajoin(request)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _transport(self) -> httpx.AsyncBaseTransport:
        loop = asyncio.get_running_loop()
        if (inner := self._inner.get(loop)) is None:
            inner = self._inner[loop] = self._routed(AsyncNetwork(_ASYNC_LIMITS, self._tls))
        return inner

    def _routed(self, network: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
        return network if self._replicas is None else AsyncRoutedTransport(self._replicas, network)

    def close(self) -> None:
        """Refuse further requests. There are no idle connections to close."""
        self._closed = True

    async def aclose(self) -> None:
        self.close()


class RetryingTransport(Blocking):
    """The blocking transport."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        """Take the arguments of :class:`AsyncRetryingTransport`."""
        super().__init__(_UnsuspendedTransport(*settings, **named))


class _UnsuspendedTransport(AsyncRetryingTransport):
    """Blocks where the asynchronous transport would be suspended, and keeps idle connections."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._blocking = self._routed(Unblocked(BlockingNetwork(_LIMITS, self._tls)))

    def _transport(self) -> httpx.AsyncBaseTransport:
        return self._blocking

    async def _join(self, request: httpx.Request) -> httpx.Response | None:
        joined = None if self._speculations is None else self._speculations.join(request)
        return None if joined is None else unblocked(joined)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (nothing else runs in its thread)

    async def aclose(self) -> None:
        self.close()
        await self._blocking.aclose()


class _BegunBody(httpx.AsyncByteStream):
    """A body whose first bytes were read already."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], whole: httpx.AsyncByteStream) -> None:
        self._first, self._rest, self._whole = first, rest, whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for part in self._rest:
            yield part

    async def aclose(self) -> None:
        await self._whole.aclose()


class _WholeBody(httpx.AsyncByteStream):
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
                    with with_abort_check(self._attempt.check):
                        part = await anext(parts, None)
                    if part is None:
                        break
                    if part := part if stream is None else stream.read(part):
                        if self._trace is not None:
                            self._trace.read(part)
                        yield part
                if stream is None or stream.is_finished:
                    if self._trace is not None:
                        self._trace.answered()
                    return
                raise httpx.RemoteProtocolError("the engine's answer ended in the middle")
            except CONNECTION_ERRORS as error:
                with ended_by_errors(self._trace):
                    await self._body.aclose()
                    request = await self._attempt.rest(error, partial(self._transport.decode, self._attempt, error))
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
