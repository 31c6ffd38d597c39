"""Speculative requests: sent before their documents are final, buffered, and joined by the real request.

A speculation is an ordinary request for a completion, marked with an id. It runs in a background event loop of the
engine's handle. The transports hand its answer to the first real request with the same URL, API key and body, and tell
the engine that it is real from then on; one that failed or was cancelled has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import httpx

from ragcache_core.client.http.attempt import ServerWatch, check_progress
from ragcache_core.client.http.background_loop import BackgroundLoop
from ragcache_core.client.http.buffered_response import BufferedBody
from ragcache_core.client.http.resume import ResumeStreams
from ragcache_core.client.http.routing import Replicas
from ragcache_core.client.http.waiting import checking
from ragcache_core.client.request_scope import current_scope
from ragcache_core.client.speculation.pending import Claims
from ragcache_core.client.speculation.request_capture import CapturedRequest, asks_completion, capture, request_key
from ragcache_core.client.speculation.routes import SpeculationRoutes, marked_request, receive
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.client.tracing import SPECULATION_EXTENSION
from ragcache_core.errors import EngineClosedError

_KEEP_S = 60.0
"""How long a finished answer is kept for the request that may join it (again)."""

_logger = logging.getLogger(__name__)
_all: WeakSet[SpeculationManager] = WeakSet()


class SpeculationManager:
    """The speculative requests of one engine's handle, and the thread that they run in.

    The thread starts with the first of them and ends in :meth:`close`. A fork starts without any. True while a real
    request may find one to join.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        watch: ServerWatch | None = None,
        *,
        resume_streams: ResumeStreams = "off",
        replicas: Replicas | None = None,
    ) -> None:
        """``base_url`` ends in ``/v1``, and ``watch`` knows whether its engine hangs. ``replicas`` are a fleet's.

        ``resume_streams``: the answers that a request which joins them continues after a cut.
        """
        self._home = f"{httpx.URL(base_url)}/"
        self._routes = SpeculationRoutes(base_url, api_key)
        self._check = (lambda: None) if watch is None else partial(check_progress, watch)
        self._resume_streams = resume_streams
        self._replicas = replicas
        self._has_certificate = base_url.startswith("https")
        self._closed = False
        self._start_anew()
        _all.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Speculation, None] = {}
        self._claims = Claims()
        self._background: BackgroundLoop | None = None

    def __bool__(self) -> bool:
        return bool(self._claims)

    def start(self, captured: CapturedRequest, *, is_claimable: bool = True, has_documents: bool = True) -> Speculation:
        """Send ``captured`` as a speculation and return at once. ``is_claimable``: whether its answer is of any use.

        Raises:
            ConfigError: its body is no JSON object.
            EngineClosedError: the engine's handle was closed.
        """
        speculation = Speculation(self, captured, is_claimable=is_claimable, has_documents=has_documents)
        request = marked_request(captured, speculation.id, resume_streams=self._resume_streams)
        if speculation.trace is not None:
            speculation.trace.inject(request)
        with self._lock:
            self._live[speculation] = None
        if is_claimable:
            self._claims.add(speculation)
        try:
            speculation._work = self._run(self._send(speculation, request))
        except BaseException:
            self._forget(speculation)
            raise
        if speculation.is_done:  # it was ended before there was work to cancel
            speculation._work.cancel()
        return speculation

    def claim(self, key: bytes) -> Speculation | None:
        """Return the speculation that a request with this key gets, and confirm it; see :meth:`Claims.take`."""
        speculation = self._claims.take(key, current_scope())
        if speculation is not None:
            speculation.confirm()
        return speculation

    def join(self, request: httpx.Request) -> httpx.Response | None:
        """Return the answer of a speculation that is ``request`` once its first bytes are there; ``None``: send it.

        Closing the response early cancels the speculation, as interrupting this call does. In a rehearsal of this
        request, it ends that.
        """
        if self._is_ours(request):
            capture(request, self)
        if self._claims and (speculation := self._claim_for(request)) is not None:
            with self._joining(speculation):
                if speculation.response.read(0, timeout_s := _read_timeout_s(request)):
                    return _joined(speculation, timeout_s)
        return None

    async def ajoin(self, request: httpx.Request) -> httpx.Response | None:
        """Do :meth:`join` without blocking the event loop."""
        if self._is_ours(request):
            capture(request, self)
        if self._claims and (speculation := self._claim_for(request)) is not None:
            with self._joining(speculation):
                if await speculation.response.aread(0, timeout_s := _read_timeout_s(request)):
                    return _joined(speculation, timeout_s)
        return None

    @contextmanager
    def _joining(self, speculation: Speculation) -> Iterator[None]:
        """Send a request that joins ``speculation`` itself if that failed; cancel that if the request is given up."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, Exception) and speculation.is_done):
                speculation.abort()
                raise
            if self._closed:
                raise _closed_error() from error

    def _is_ours(self, request: httpx.Request) -> bool:
        """Return whether ``request`` goes to this handle's server; its client may be used to ask another one."""
        return str(request.url).startswith(self._home)

    def _claim_for(self, request: httpx.Request) -> Speculation | None:
        return self.claim(request_key(request)) if asks_completion(request) else None

    def close(self) -> None:
        """Cancel all, and end the thread. May be called again, also after an interruption."""
        with self._lock:
            self._closed = True
            self._claims.clear()
            live, background = list(self._live), self._background
        for speculation in live:
            speculation.abort()
        if background is not None:
            background.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run ``work`` in the background; return its future."""
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            if self._background is None:
                self._background = BackgroundLoop(
                    "ragcache-speculation", verify=self._has_certificate, replicas=self._replicas
                )
            return self._background.run(work)

    def _confirm(self, speculation: Speculation) -> None:
        with contextlib.suppress(EngineClosedError):
            self._run(self._send_confirmation(speculation))

    def _withdraw(self, speculation: Speculation) -> bool:
        """Make ``speculation`` impossible to claim; return whether it was unclaimed."""
        return self._claims.drop(speculation)

    def _forget(self, speculation: Speculation) -> None:
        """Make ``speculation`` impossible to claim, and forget it: nothing cancels it any more."""
        with self._lock:
            self._live.pop(speculation, None)
        self._claims.drop(speculation)
        if speculation.trace is not None:
            speculation.trace.forgotten()

    # In the background

    async def _send(self, speculation: Speculation, request: httpx.Request) -> None:
        noting = asyncio.create_task(self._note_wait(speculation))
        try:
            with checking(self._check):
                await receive(
                    self._transport(), request, speculation.response, is_promised=lambda: speculation.is_promised
                )
        except asyncio.CancelledError:
            noting.cancel()
            speculation.abort()
            raise
        except Exception as error:
            noting.cancel()
            _logger.debug("speculation %s failed: %s: %s", speculation.id, type(error).__name__, error)
            self._forget(speculation)
            speculation._end(error)
            return
        self._keep(speculation)
        speculation._end(None)
        await noting

    async def _note_wait(self, speculation: Speculation) -> None:
        def note(waited_s: float) -> None:
            speculation.started_s = speculation.sent_s + waited_s
            if speculation.trace is not None:
                speculation.trace.admitted(waited_s)

        await self._routes.follow_wait(self._transport(), speculation, note)

    async def _send_confirmation(self, speculation: Speculation) -> None:
        await self._routes.confirm(self._transport(), speculation)

    def _transport(self) -> httpx.AsyncBaseTransport:
        assert self._background is not None
        return self._background.transport

    def _keep(self, speculation: Speculation) -> None:
        """Keep a finished, unclaimed answer for a while: its real request may come later."""
        with self._lock:
            self._live.pop(speculation, None)
        if self._claims.keep(speculation):
            asyncio.get_running_loop().call_later(_KEEP_S, self._forget_kept, ref(speculation))

    def _forget_kept(self, kept: ref[Speculation]) -> None:
        """Drop it, unless it was dropped or claimed before: the timer must not keep its answer alive."""
        if (speculation := kept()) is not None:
            self._forget(speculation)


def _joined(speculation: Speculation, timeout_s: float | None) -> httpx.Response:
    head, body = speculation.response.head(), BufferedBody(speculation.response, timeout_s, speculation.leave)
    traced = {} if speculation.trace is None else {SPECULATION_EXTENSION: speculation.trace}
    return httpx.Response(head.status_code, headers=head.headers, stream=body, extensions=traced)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the engine was closed: launch or connect again")


def _read_timeout_s(request: httpx.Request) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s


def _start_all_anew() -> None:
    for speculations in list(_all):
        speculations._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
