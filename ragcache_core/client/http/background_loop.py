"""An event loop in a thread of its own, for requests that no caller waits for yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any

import httpx

from ragcache_core.client.http.waiting import async_patient_transport

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=2.0)
"""Nothing is sent again here, so an idle connection has to end before the server ends it."""


class BackgroundLoop:
    """A thread that runs an event loop, and the connections that live there. :meth:`close` ends both.

    ``transport`` is for the work that :meth:`run` is given; it sends nothing again.
    """

    def __init__(self, name: str, *, verify: bool) -> None:
        """Start the thread. ``verify``: whether the server has a certificate to check."""
        self.transport = async_patient_transport(_LIMITS, httpx.create_ssl_context(verify=verify))
        self._loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run ``work`` there, with no context of its caller; return its future."""
        return Context().run(asyncio.run_coroutine_threadsafe, work, self._loop)

    def close(self) -> None:
        """Cancel what runs there, and end the thread. May be called again."""
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
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.transport.aclose()
