"""HTTP transports of a fleet: each request goes to a chosen replica, on every attempt.

They lie under those that send requests again (:mod:`ragcache_core.client.http.transport`), so what one replica failed
to answer is sent to another one, and a greedy answer that was cut goes on there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import httpx

from ragcache_core.client.http.network import AsyncNetwork, with_further_abort_check
from ragcache_core.runtime.event_loop_thread import EventLoopThread

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=2.0)
"""Requests are not resent here, so an idle connection must end before the server ends it."""


class Sending(Protocol):
    """A request and the replica that was chosen for it."""

    @property
    def request(self) -> httpx.Request:
        """The request with the replica's address."""
        ...

    def check(self) -> None:
        """Raise if this replica will not answer; called during waits."""
        ...

    def answered(self, response: httpx.Response) -> None:
        """Read the head of the response.

        Raises:
            httpx.ConnectError: it takes no requests now, and another replica does.
        """
        ...

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        """Read the first bytes of the response."""
        ...

    def failed(self, error: BaseException) -> BaseException:
        """Record the failure, and return the exception to raise."""
        ...

    def end(self) -> None:
        """Record that the answer is over. Idempotent; the garbage collector may call it."""
        ...


class Replicas(Protocol):
    """Chooses the replica of each request. Thread-safe."""

    def send(self, request: httpx.Request) -> Sending:
        """Choose a replica; the caller must call :meth:`Sending.end`.

        Raises:
            httpx.ConnectError: none is there.
        """
        ...


class AsyncRoutedTransport(httpx.AsyncBaseTransport):
    """Sends each request through ``inner`` to the chosen replica."""

    def __init__(self, replicas: Replicas, inner: httpx.AsyncBaseTransport) -> None:
        self._replicas = replicas
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sending = self._replicas.send(request)
        try:
            with with_further_abort_check(sending.check):
                response = await self._inner.handle_async_request(sending.request)
            try:
                sending.answered(response)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                response.stream = _RoutedBody(sending, response, response.stream)
            except BaseException:
                await response.aclose()
                raise
        except BaseException as error:
            raise sending.failed(error) from error.__cause__
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _RoutedBody(httpx.AsyncByteStream):
    def __init__(self, sending: Sending, response: httpx.Response, body: httpx.AsyncByteStream) -> None:
        self._sending, self._response, self._body = sending, response, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts, is_first = aiter(self._body), True
        try:
            while True:
                try:
                    with with_further_abort_check(self._sending.check):
                        part = await anext(parts, None)
                except BaseException as error:
                    raise self._sending.failed(error) from error.__cause__
                if part is None:
                    return
                if is_first:
                    self._sending.begun(self._response, part)
                    is_first = False
                yield part
        finally:  # also of a body that is left without closing it
            self._sending.end()

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            self._sending.end()


class BackgroundLoop(EventLoopThread):
    """A thread that runs an event loop and its connections. :meth:`close` ends both.

    ``transport`` is for the work that :meth:`run` is given; it sends nothing again.
    """

    def __init__(self, name: str, *, verify: bool, replicas: Replicas | None = None) -> None:
        """Start the thread. ``verify``: whether to check the server's certificate.

        With ``replicas`` each request goes to the one that is chosen for it.
        """
        inner = AsyncNetwork(_LIMITS, httpx.create_ssl_context(verify=verify))
        self.transport: httpx.AsyncBaseTransport = inner if replicas is None else AsyncRoutedTransport(replicas, inner)
        super().__init__(name, at_end=self.transport.aclose)
