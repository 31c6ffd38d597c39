"""HTTP transports of a fleet: each request goes to the replica that is chosen for it, whenever it is sent.

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
"""Nothing is sent again here, so an idle connection has to end before the server ends it."""


class Sending(Protocol):
    """A request on its way to the replica that was chosen for it."""

    @property
    def request(self) -> httpx.Request:
        """What is sent, to that replica's address."""
        ...

    def check(self) -> None:
        """End a read for an answer that this replica will not give; called while one waits."""
        ...

    def answered(self, response: httpx.Response) -> None:
        """Look at the head of its answer.

        Raises:
            httpx.ConnectError: it takes no requests now, and another replica does.
        """
        ...

    def begun(self, response: httpx.Response, first_bytes: bytes) -> None:
        """Look at what its answer begins with."""
        ...

    def failed(self, error: BaseException) -> BaseException:
        """Note what broke it, and return what to raise."""
        ...

    def end(self) -> None:
        """Note that its answer is over. May be called again, and wherever Python collects an answer that was left."""
        ...


class Replicas(Protocol):
    """Knows who gets a request. May be used by any thread."""

    def send(self, request: httpx.Request) -> Sending:
        """Choose a replica; :meth:`Sending.end` is the caller's.

        Raises:
            httpx.ConnectError: none is there.
        """
        ...


class AsyncRoutedTransport(httpx.AsyncBaseTransport):
    """Sends by ``inner`` to the replica that is chosen."""

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
    """A thread that runs an event loop, and the connections that live there. :meth:`close` ends both.

    ``transport`` is for the work that :meth:`run` is given; it sends nothing again.
    """

    def __init__(self, name: str, *, verify: bool, replicas: Replicas | None = None) -> None:
        """Start the thread. ``verify``: whether the server has a certificate to check.

        With ``replicas`` each request goes to the one that is chosen for it.
        """
        inner = AsyncNetwork(_LIMITS, httpx.create_ssl_context(verify=verify))
        self.transport: httpx.AsyncBaseTransport = inner if replicas is None else AsyncRoutedTransport(replicas, inner)
        super().__init__(name, at_end=self.transport.aclose)
