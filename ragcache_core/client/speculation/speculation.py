"""One request that is sent before its answer is asked for."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import httpx

from ragcache_core.client.http.buffered_response import BufferedResponse
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.client.tracing import SpeculationTrace

if TYPE_CHECKING:
    from ragcache_core.client.speculation.manager import SpeculationManager

_LAST_EVENT = b"data: [DONE]\n\n"
_logger = logging.getLogger(__name__)


class Speculation:
    """A speculative request and its answer. Its methods may be called by any thread.

    Attributes:
        id: its name in the engine.
        key: that of the real requests that may join it.
        scope: the request scope that it was sent in; only a request of the same scope, or without one, joins it.
        authorization: the header that says who asks, also for its confirmation.
        sent_s: when it was sent, by ``time.perf_counter()``.
        started_s: when it was sent, plus the time that it waited in the engine to be scheduled, once that has told. The
            way there is not counted: a request that is made when the search has ended has it before it as well.
        making_s: seconds of processor time that its request took to make, where that was measured.
        is_claimable: whether a real request may join it.
        has_documents: whether it reads any; what stands before them hides nothing of a search.
        is_promised: whether any has.
        error: why it failed.
    """

    def __init__(
        self, owner: SpeculationManager, captured: CapturedRequest, *, is_claimable: bool, has_documents: bool
    ) -> None:
        self.id = uuid.uuid4().hex
        self.key = captured.key
        self.scope = captured.scope
        self.authorization = captured.authorization
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
        self.trace = SpeculationTrace.begin(has_documents=has_documents, is_claimable=is_claimable)
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
        """Whether a real request joined it (of a scope's speculation, one in that scope), and was not sent itself."""
        is_theirs = self.scope is None or self.scope is self._claimer
        return self.is_promised and is_theirs and (self.response.has_bytes or not self.is_failed)

    def cancel(self) -> None:
        """End the request in the engine, so that none can join it; one that was joined already goes on. Idempotent.

        It may have been joined by another request than its owner's, one about the same.
        """
        if self._owner._withdraw(self):
            self.abort()

    def abort(self) -> None:
        """End the request in the engine on behalf of the request that joined it. Idempotent."""
        self._owner._forget(self)
        if self._end(httpx.ReadError("the speculation was cancelled"), is_cancelled=True) and self._work is not None:
            self._work.cancel()

    def leave(self) -> None:
        """Abort it on behalf of the request that claimed it, unless all of the answer has arrived."""
        if not self.response.last_bytes().endswith(_LAST_EVENT):
            self.abort()

    def confirm(self) -> None:
        """Tell the engine that the request is a real one from now on. Returns at once; idempotent."""
        with self._lock:
            if self._is_confirmed or self._is_cancelled or self.error is not None:
                return
            self._is_confirmed = True
        if self.trace is not None:
            self.trace.confirmed()
        self._owner._confirm(self)

    def claim(self, claimer: object | None) -> None:
        """Have a real request join it, made in the scope ``claimer``."""
        self.is_promised, self._claimer = True, claimer

    def add_done_callback(self, callback: Callable[[Speculation], None]) -> None:
        """Call ``callback`` once it is done, in whichever thread ends it; at once if it is done already."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, error: Exception | None, *, is_cancelled: bool = False) -> bool:
        """End it, for its readers with ``error``; return whether it had not ended before."""
        with self._lock:
            if self._is_done:
                return False
            self._is_done, self._is_cancelled = True, is_cancelled
            self.error = None if is_cancelled else error
            callbacks, self._callbacks = self._callbacks, []
        if self.trace is not None:
            self.trace.done(error, is_cancelled=is_cancelled)
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
