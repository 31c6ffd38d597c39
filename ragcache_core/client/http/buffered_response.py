"""A response that arrives in one thread and is read in another one, or in any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import httpx

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The status of a response and its headers as they were sent."""

    status_code: int
    headers: RawHeaders


class BufferedResponse:
    """A response that one thread writes; threads and event loops read it, from its beginning, and wait for more.

    It keeps all its bytes until it is dropped itself: ``max_tokens`` bounds them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._is_ended = False
        self._error: Exception | None = None
        self._waiters: set[_Waiter] = set()

    # The one who writes

    def begin(self, head: ResponseHead) -> None:
        """Note status and headers. They are handed on with the first bytes."""
        self._head = head

    def append(self, part: bytes) -> None:
        """Add ``part`` to the body."""
        with self._changed:
            self._parts.append(part)
            self._notify_readers()

    def end(self, error: Exception | None = None) -> None:
        """End the body: it is whole, or ``error`` cut it off. Only the first call counts."""
        with self._changed:
            if not self._is_ended:
                self._is_ended, self._error = True, error
                self._notify_readers()

    # Those who read

    @property
    def has_bytes(self) -> bool:
        return bool(self._parts)

    def last_bytes(self) -> bytes:
        """Return what arrived last in one piece; nothing if nothing arrived."""
        return self._parts[-1] if self._parts else b""

    def head(self) -> ResponseHead:
        """Return status and headers of a response whose first bytes are there."""
        assert self._head is not None, "the first bytes were not awaited"
        return self._head

    def read(self, position: int, timeout_s: float | None) -> list[bytes]:
        """Wait for the parts from number ``position`` on; an empty list is the end.

        Raises:
            httpx.ReadTimeout: nothing came within ``timeout_s`` seconds.
            Exception: the error that cut the response off, once every part before it was read.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ready(position), timeout_s):
                raise _timed_out(timeout_s)
            return self._parts_from(position)

    async def aread(self, position: int, timeout_s: float | None) -> list[bytes]:
        """Do :meth:`read` without blocking the event loop."""
        waiter = _Waiter()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with self._changed:
                        if self._is_ready(position):
                            return self._parts_from(position)
                        self._waiters.add(waiter)
                    await waiter.wait()
        except TimeoutError as error:
            raise _timed_out(timeout_s) from error
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    def _is_ready(self, position: int) -> bool:
        return self._is_ended or len(self._parts) > position

    def _parts_from(self, position: int) -> list[bytes]:
        parts = self._parts[position:]
        if not parts and self._error is not None:
            raise self._error
        return parts

    def _notify_readers(self) -> None:
        self._changed.notify_all()
        for waiter in self._waiters:
            waiter.wake()


class BufferedBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a :class:`BufferedResponse` for one reader. Closing it early calls ``on_close``."""

    def __init__(self, response: BufferedResponse, timeout_s: float | None, on_close: Callable[[], None]) -> None:
        self._response = response
        self._timeout_s = timeout_s
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        while parts := self._response.read(position, self._timeout_s):
            position += len(parts)
            yield b"".join(parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        position = 0
        while parts := await self._response.aread(position, self._timeout_s):
            position += len(parts)
            yield b"".join(parts)

    def close(self) -> None:
        self._on_close()

    async def aclose(self) -> None:
        self._on_close()


class _Waiter:
    """A task that waits in its event loop until another thread wakes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile: no reader is left there
            self._loop.call_soon_threadsafe(self._event.set)


def _timed_out(timeout_s: float | None) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"the engine sent nothing for {timeout_s:g} s")
