"""An event loop in its own thread, for work that outlives its callers' loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any, TypeVar

_Result = TypeVar("_Result")

_CANCELLED_AGAIN_S = 0.5
"""Seconds after which a cancellation is repeated, as it may be lost with a simultaneous time-out."""


class EventLoopThread:
    """A thread that runs an event loop. :meth:`close` cancels its work and stops it."""

    def __init__(self, name: str, *, at_end: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the thread. ``at_end`` runs last, after all other work is cancelled."""
        self._at_end = at_end
        self._loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run ``work`` there without the caller's context; return its future, which can cancel it."""
        return Context().run(asyncio.run_coroutine_threadsafe, work, self._loop)

    def close(self) -> None:
        """Cancel the work there, and stop the thread. Idempotent."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        if not self._is_stopping:  # a second stop would interrupt _end
            self._is_stopping = True
            self._loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        tasks = running = asyncio.all_tasks() - {asyncio.current_task()}
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_CANCELLED_AGAIN_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._at_end is not None:
            await self._at_end()
