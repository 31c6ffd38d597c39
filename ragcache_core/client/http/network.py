"""The connections under every transport, and how blocking transports run the code of the asynchronous ones.

A blocking read ends with its time-out or with the connection, and nothing else ends it. So the connections made here
read in slices, and between two of them call what :func:`with_abort_check` names, in the thread or task that waits.

What the client does with requests is written once, as coroutines over an :class:`httpx.AsyncBaseTransport`. Blocking
code runs the same coroutines: below them is an :class:`Unblocked` transport, which blocks and never suspends, and
above them a :class:`Blocking` one, which runs each coroutine to its end::

    httpx.Client       ->  Blocking  ->  coroutines  ->  Unblocked  ->  BlockingNetwork
    httpx.AsyncClient  ---------------->  coroutines  --------------->  AsyncNetwork
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import httpcore
import httpx

_SLICE_S = 0.25
_T = TypeVar("_T")
_check: ContextVar[Callable[[], None] | None] = ContextVar("ragcache_check", default=None)


@contextmanager
def with_abort_check(check: Callable[[], None]) -> Iterator[None]:
    """Have reads in this context call ``check`` while they wait; what it raises ends them, and the connection."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def with_further_abort_check(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Do :func:`with_abort_check`, besides what is checked in this context already."""
    outer = _check.get()

    def both() -> None:
        if outer is not None:
            outer()
        check()

    return with_abort_check(both)


def finish(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine that is never suspended comes to; what it does blocks the caller."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast("_T", done.value)
    work.close()
    raise AssertionError("code that blocks was suspended")


class Blocking(httpx.BaseTransport):
    """A blocking transport of an asynchronous one over an :class:`Unblocked`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = finish(self._inner.handle_async_request(request))
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _BlockingBody(response.stream)
        return response

    def close(self) -> None:
        finish(self._inner.aclose())


class Unblocked(httpx.AsyncBaseTransport):
    """An asynchronous transport of a blocking one, which is never suspended: for code that :func:`finish` runs."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return unblocked(self._inner.handle_request(request))

    async def aclose(self) -> None:
        self._inner.close()


def unblocked(response: httpx.Response) -> httpx.Response:
    """Return a response with a body that blocks as one whose asynchronous body is never suspended."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _UnblockedBody(response.stream)
    return response


class _BlockingBody(httpx.SyncByteStream):
    def __init__(self, body: httpx.AsyncByteStream) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        parts = cast("AsyncGenerator[bytes, None]", aiter(self._body))
        try:
            while (part := finish(_next(parts))) is not None:
                yield part
        finally:  # also of an iterator that is left
            finish(_close(parts))

    def close(self) -> None:
        finish(self._body.aclose())


class _UnblockedBody(httpx.AsyncByteStream):
    def __init__(self, body: httpx.SyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._body:
            yield part

    async def aclose(self) -> None:
        self._body.close()


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


async def _close(parts: AsyncGenerator[bytes, None]) -> None:
    await parts.aclose()


class BlockingNetwork(httpx.BaseTransport):
    """Connections whose reads can be ended by :func:`with_abort_check`."""

    def __init__(self, limits: httpx.Limits, tls: ssl.SSLContext) -> None:
        self._pool = httpcore.ConnectionPool(**_settings(limits, tls), network_backend=_Backend())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _errors_of_httpx():
            answer = self._pool.handle_request(_of_httpcore(request))
        return _of_httpx(answer, _Body(answer))

    def close(self) -> None:
        self._pool.close()


class AsyncNetwork(httpx.AsyncBaseTransport):
    """Connections of one event loop whose reads can be ended by :func:`with_abort_check`."""

    def __init__(self, limits: httpx.Limits, tls: ssl.SSLContext) -> None:
        self._pool = httpcore.AsyncConnectionPool(**_settings(limits, tls), network_backend=_AsyncBackend())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _errors_of_httpx():
            answer = await self._pool.handle_async_request(_of_httpcore(request))
        return _of_httpx(answer, _AsyncBody(answer))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        with _errors_of_httpx():
            yield from cast("Iterable[bytes]", self._answer.stream)

    def close(self) -> None:
        self._answer.close()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for part in cast("AsyncIterator[bytes]", self._answer.stream):
                yield part

    async def aclose(self) -> None:
        await self._answer.aclose()


def _settings(limits: httpx.Limits, tls: ssl.SSLContext) -> dict[str, Any]:
    return {
        "ssl_context": tls,
        "max_connections": limits.max_connections,
        "max_keepalive_connections": limits.max_keepalive_connections,
        "keepalive_expiry": limits.keepalive_expiry,
    }


def _of_httpcore(request: httpx.Request) -> httpcore.Request:
    url = request.url
    target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    return httpcore.Request(
        request.method, target, headers=request.headers.raw, content=request.stream, extensions=request.extensions
    )


def _of_httpx(answer: httpcore.Response, body: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
    return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    """Raise errors of httpcore as those of httpx, which have the same names; the cause tells which check raised it."""
    try:
        yield
    except Exception as error:
        for kind in type(error).__mro__:
            if kind.__module__.startswith("httpcore") and kind.__name__ in httpx.__all__:
                raise getattr(httpx, kind.__name__)(str(error)) from error
        raise


def _slices(timeout_s: float | None) -> Iterator[tuple[float, bool]]:
    """Yield the time-outs of reads to make, and whether each is the last one; make the check between two of them."""
    ends_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    check = _check.get()
    while True:
        left_s = ends_s - time.monotonic()
        if check is None or left_s <= _SLICE_S:
            yield max(left_s, 0.001), True
            return
        yield _SLICE_S, False
        check()


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if _check.get() is None:
            return self._inner.read(max_bytes, timeout)
        for slice_s, is_last in _slices(timeout):
            try:
                return self._inner.read(max_bytes, slice_s)
            except httpcore.ReadTimeout:
                if is_last:
                    raise
        raise AssertionError("the last slice returns or raises")

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _AsyncStream(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 (httpcore's)
        if _check.get() is None:
            return await self._inner.read(max_bytes, timeout)
        for slice_s, is_last in _slices(timeout):
            try:
                return await self._inner.read(max_bytes, slice_s)
            except httpcore.ReadTimeout:
                if is_last:
                    raise
        raise AssertionError("the last slice returns or raises")

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        return _AsyncStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(host, port, timeout, local_address, socket_options))


class _AsyncBackend(httpcore.AnyIOBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _AsyncStream(await super().connect_tcp(host, port, timeout, local_address, socket_options))
