"""Speculative requests: sent before their documents are final, buffered, and joined by the real request.

A speculation is an ordinary request for a completion, marked with an id. It runs in a background event loop of the
engine's handle. The transports hand its answer to the first real request with the same URL, API key and body, and tell
the engine that it is real from then on; a speculation that failed or was cancelled is as if it had never been.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import httpx

from ragcache_core.client.asker import current_asker
from ragcache_core.client.background import BackgroundLoop
from ragcache_core.client.buffering import BufferedBody, BufferedResponse
from ragcache_core.client.claiming import Claims
from ragcache_core.client.rehearsing import CapturedRequest, asks_completion, capture, request_key
from ragcache_core.client.speculative_http import SpeculationRoutes, marked_request, receive
from ragcache_core.errors import EngineClosedError

_KEEP_S = 60.0
"""How long an answer is kept that nobody asked for (again)."""
_LAST_EVENT = b"data: [DONE]\n\n"

_logger = logging.getLogger(__name__)
_all: WeakSet[Speculations] = WeakSet()


class Speculation:
    """A speculative request and its answer. Its methods may be called by any thread.

    Attributes:
        id: its name in the engine.
        key: that of the real requests that may join it.
        asker: in whose name it was sent; only a request in nobody's name or theirs joins it.
        sent_s: when it was sent, by ``time.perf_counter()``.
        started_s: when it was sent, and as much later as it has waited in the engine for room, once that has told. The
            way there is not counted: a request that is made when the search has ended has it before it as well.
        making_s: seconds of processor time that its request took to make, where that was measured.
        is_claimable: whether a real request may join it.
        has_documents: whether it reads any; what stands before them hides nothing of a search.
        is_promised: whether any has.
        error: why it failed.
    """

    def __init__(
        self, owner: Speculations, captured: CapturedRequest, *, is_claimable: bool, has_documents: bool
    ) -> None:
        self.id = uuid.uuid4().hex
        self.key = captured.key
        self.asker = captured.asker
        self.is_claimable, self.has_documents = is_claimable, has_documents
        self.sent_s = time.perf_counter()
        self.started_s: float | None = None
        self.making_s = 0.0
        self.error: Exception | None = None
        self.response = BufferedResponse()
        self._owner = owner
        self._lock = threading.Lock()
        self._is_done = self._is_cancelled = self._is_confirmed = self.is_promised = False
        self._claimer: object | None = None
        self._callbacks: list[Callable[[Speculation], None]] = []
        self._work: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it finished, failed or was cancelled."""
        return self._is_done

    @property
    def is_failed(self) -> bool:
        """Whether the engine refused it, died meanwhile, or could not be reached; ``error`` says why."""
        return self.error is not None

    @property
    def is_cancelled(self) -> bool:
        """Whether it was ended before its answer was whole."""
        return self._is_cancelled

    @property
    def is_claimed(self) -> bool:
        """Whether a real request joined it, and was not sent after all; where it was sent in a name, one of theirs."""
        is_theirs = self.asker is None or self.asker is self._claimer
        return self.is_promised and is_theirs and (self.response.has_bytes or not self.is_failed)

    def cancel(self) -> None:
        """End the request in the engine, and let nobody join it; one that was joined already is left alone. Idempotent.

        It may have been joined by another request than its owner's, one about the same.
        """
        if self._owner._withdraw(self):
            self.abort()

    def abort(self) -> None:
        """End the request in the engine, whoever joined it: for the one who did. Idempotent."""
        self._owner._forget(self)
        if self._end(httpx.ReadError("the speculation was cancelled"), is_cancelled=True) and self._work is not None:
            self._work.cancel()

    def leave(self) -> None:
        """Abort it for the one who claimed it, unless the answer is whole but for the end of its connection."""
        if not self.response.last_bytes().endswith(_LAST_EVENT):
            self.abort()

    def confirm(self) -> None:
        """Tell the engine that the request is a real one from now on. Returns at once; idempotent."""
        with self._lock:
            if self._is_confirmed or self._is_cancelled or self.error is not None:
                return
            self._is_confirmed = True
        self._owner._confirm(self)

    def claim(self, claimer: object | None) -> None:
        """Let a real request join it, in whose name it is made."""
        self.is_promised, self._claimer = True, claimer

    def add_done_callback(self, callback: Callable[[Speculation], None]) -> None:
        """Call ``callback`` once it is done, in whichever thread ends it; at once if it is done already."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, error: Exception | None, *, is_cancelled: bool = False) -> bool:
        """Note the end, which readers are told with ``error``; return whether it had not ended before."""
        with self._lock:
            if self._is_done:
                return False
            self._is_done, self._is_cancelled = True, is_cancelled
            self.error = None if is_cancelled else error
            callbacks, self._callbacks = self._callbacks, []
        self.response.end(error)
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _logger.exception("a callback of a speculation failed")
        return True

    def __repr__(self) -> str:
        states = {"cancelled": self._is_cancelled, "failed": self.is_failed, "done": self._is_done}
        state = next((name for name, holds in states.items() if holds), "running")
        return f"Speculation({self.id}, {state})"


class Speculations:
    """The speculative requests of one engine's handle, and the thread that they run in.

    The thread starts with the first of them and ends in :meth:`close`. A fork starts without any. True while a real
    request may find one to join.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        """``base_url`` ends in ``/v1``."""
        self._home = f"{httpx.URL(base_url)}/"
        self._routes = SpeculationRoutes(base_url, api_key)
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
        request = marked_request(captured, speculation.id)
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
        speculation = self._claims.take(key, current_asker())
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
        """Let a request that joins ``speculation`` be sent if that failed; cancel it if the request is given up."""
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
                self._background = BackgroundLoop("ragcache-speculation", verify=self._has_certificate)
            return self._background.run(work)

    def _confirm(self, speculation: Speculation) -> None:
        with contextlib.suppress(EngineClosedError):
            self._run(self._send_confirmation(speculation))

    def _withdraw(self, speculation: Speculation) -> bool:
        """Let nobody claim ``speculation``; return whether nobody has."""
        return self._claims.drop(speculation)

    def _forget(self, speculation: Speculation) -> None:
        """Let nobody claim ``speculation``, and nothing cancel it any more."""
        with self._lock:
            self._live.pop(speculation, None)
        self._claims.drop(speculation)

    # In the background

    async def _send(self, speculation: Speculation, request: httpx.Request) -> None:
        noting = asyncio.create_task(self._note_wait(speculation))
        try:
            await receive(self._transport(), request, speculation.response, is_promised=lambda: speculation.is_promised)
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

        await self._routes.follow_wait(self._transport(), speculation.id, note, is_over=lambda: speculation.is_done)

    async def _send_confirmation(self, speculation: Speculation) -> None:
        await self._routes.confirm(self._transport(), speculation.id, is_over=lambda: speculation.is_done)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        assert self._background is not None
        return self._background.transport

    def _keep(self, speculation: Speculation) -> None:
        """Keep a whole answer that nobody claimed for a while: its real request may come later."""
        with self._lock:
            self._live.pop(speculation, None)
        if self._claims.keep(speculation):
            asyncio.get_running_loop().call_later(_KEEP_S, self._forget_kept, ref(speculation))

    def _forget_kept(self, kept: ref[Speculation]) -> None:
        """Forget it, unless it was dropped or claimed: the timer must not hold its answer so long."""
        if (speculation := kept()) is not None:
            self._forget(speculation)


def _joined(speculation: Speculation, timeout_s: float | None) -> httpx.Response:
    head, body = speculation.response.head(), BufferedBody(speculation.response, timeout_s, speculation.leave)
    return httpx.Response(head.status_code, headers=head.headers, stream=body)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the engine was closed: launch or connect again")


def _read_timeout_s(request: httpx.Request) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s


def _start_all_anew() -> None:
    for speculations in list(_all):
        speculations._start_anew()


os.register_at_fork(after_in_child=_start_all_anew)
