"""HTTP connections without a complete request head, for which uvicorn has no time limit."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""Seconds that the head of a request may take; a connection is closed after one to three times as long."""


class HeadTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes
    """uvicorn's HTTP protocol, which also closes connections that send no request, or only part of a request head.

    Without a limit such connections hold file descriptors until the server has none left. uvicorn itself closes
    connections that are idle between two requests.
    """

    _last: Any = None
    _check: asyncio.TimerHandle | None = None
    _has_waited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._check = self.loop.call_later(HEAD_S, self._close_if_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def handle_websocket_upgrade(self, *event: Any) -> None:
        self._stop()  # from here on the connection is another protocol's
        super().handle_websocket_upgrade(*event)

    def _stop(self) -> None:
        if self._check is not None:
            self._check.cancel()

    def _close_if_late(self) -> None:
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        is_waiting = not is_answering and self.timeout_keep_alive_task is None and cycle is self._last
        if is_waiting and (self._has_waited or cycle is None):
            self.transport.close()
            return
        self._last, self._has_waited = cycle, is_waiting
        self._check = self.loop.call_later(HEAD_S, self._close_if_late)
