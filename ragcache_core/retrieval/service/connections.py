"""Connections of a store's service that send no request, or a half of one's head, and would be kept for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""So long a request's head may take to arrive, and up to twice as long."""


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes
    """uvicorn's protocol, which waits without end for a request's head: as many wait as there are file descriptors.

    What lies idle between two requests uvicorn closes itself.
    """

    _last: Any = None
    _look: asyncio.TimerHandle | None = None
    _has_waited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._look = self.loop.call_later(HEAD_S, self._close_if_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def _close_if_late(self) -> None:
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        is_waiting = not is_answering and self.timeout_keep_alive_task is None and cycle is self._last
        if is_waiting and (self._has_waited or cycle is None):
            self.transport.close()
            return
        self._last, self._has_waited = cycle, is_waiting
        self._look = self.loop.call_later(HEAD_S, self._close_if_late)
