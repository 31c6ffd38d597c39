"""Waiting for a server that can be given up: a check is made every so often while nothing arrives.

A blocking read ends with its time-out or with the connection, and nothing else ends it. So the connections made here
read in slices, and between two of them call what :func:`checking` names, in the thread or task that waits.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import httpcore
import httpx

_SLICE_S = 0.25
_check: ContextVar[Callable[[], None] | None] = ContextVar("ragcache_check", default=None)


@contextmanager
def checking(check: Callable[[], None]) -> Iterator[None]:
    """Have reads in this context call ``check`` while they wait; what it raises ends them, and the connection."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def also_checking(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Do :func:`checking`, besides what is checked in this context already."""
    outer = _check.get()

    def both() -> None:
        if outer is not None:
            outer()
        check()

    return checking(both)


def patient_transport(limits: httpx.Limits, tls: ssl.SSLContext) -> httpx.HTTPTransport:
    """Return a blocking transport whose reads can be given up."""
    transport = httpx.HTTPTransport(limits=limits, verify=tls)
    transport._pool._network_backend = _Backend()
    return transport


def async_patient_transport(limits: httpx.Limits, tls: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    """Return an asynchronous transport whose reads can be given up."""
    transport = httpx.AsyncHTTPTransport(limits=limits, verify=tls)
    transport._pool._network_backend = _AsyncBackend()
    return transport


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
