"""HTTP around a service's routes: who has no key gets no further, and who leaves ends what it asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from ragcache_core.errors import (
    EmptyStoreError,
    RAGCacheError,
    SearchError,
    SearchTimeoutError,
    StoreAuthError,
    StoreUnreachableError,
)
from ragcache_core.retrieval.service.protocol import error_said, line
from ragcache_core.runtime.api_keys import ApiKeys

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_OPEN_PATHS = frozenset({"/health", "/metrics"})
"""What answers without the key."""

_logger = logging.getLogger(__name__)


class TooLargeError(SearchError):
    """A request has more bytes than are taken."""


def status_of(error: BaseException) -> int:
    """Return the HTTP status that an error is answered with."""
    match error:
        case StoreAuthError():
            return 401
        case TooLargeError():
            return 413
        case SearchTimeoutError():
            return 504
        case StoreUnreachableError():
            return 503
        case RAGCacheError() if isinstance(error, ValueError | EmptyStoreError):
            return 400
    return 500


class Door:
    """ASGI middleware that asks for the key, but for whether the service is there and how busy it is."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        is_open = scope["type"] != "http" or scope["path"] in _OPEN_PATHS
        if not is_open and not self._keys.admit(Headers(scope=scope).get("authorization", "")):
            error = StoreAuthError("the service wants another API key: pass the service's api_key")
            answer = JSONResponse(error_said(error), status_of(error), {"WWW-Authenticate": "Bearer"})
        await answer(scope, receive, send)


class LineResponse:
    """Lines of JSON as they are made, until who asked leaves: then ``lines`` is closed at once.

    An error before the first line is the answer's status; a later one is its last line. ``at_end`` is called when the
    answer has ended, however it did.
    """

    def __init__(self, lines: AsyncGenerator[bytes, None], *, at_end: Callable[[], None] = lambda: None) -> None:
        self._lines = lines
        self._at_end = at_end
        self._has_begun = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._at_end()

    async def _send(self, send: Send) -> None:
        try:
            async with aclosing(self._lines) as lines:
                async for each in lines:
                    await self._begin(send)
                    await send({"type": "http.response.body", "body": each, "more_body": True})
            await self._begin(send)
            await send({"type": "http.response.body", "body": b""})
        except Exception as error:
            await self._fail(error, send)

    async def _begin(self, send: Send, status: int = 200) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, error: Exception, send: Send) -> None:
        if not isinstance(error, RAGCacheError):
            _logger.error("a search failed", exc_info=error)
        await self._begin(send, status_of(error))
        await send({"type": "http.response.body", "body": line(error_said(error))})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
