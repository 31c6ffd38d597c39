"""Checks before the server's routes: API key, body size, and shutdown; a time limit for request heads.

vLLM requires its key under ``/v1`` and a few other prefixes, but not on the routes of hosting platforms, or to
tokenise, pause or scale. Here every path needs the key except :data:`OPEN_PATHS`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketClose
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ragcache_core.runtime.api_keys import shown_digest
from ragcache_core.vllm_plugin.server.page.files import FILES, PAGE
from ragcache_core.wire import HUNG

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys


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


OPEN_PATHS = frozenset(
    {
        *("/health", "/ready", "/ping", "/load", "/version", "/metrics", "/metrics/"),
        *(*FILES, f"{PAGE}/"),
    }
)
"""Paths without a key: probes, metrics, and the page, which asks for the key itself."""
_OPERATORS_PATHS = frozenset(("/metrics", "/metrics/", "/load"))
"""Open paths with data of all tenants, which need an operator's key if there are tenants."""
_OWN = "/v1/ragcache/"
_TENANTS_ROUTES = {
    "GET": re.compile(
        rf"/v1/models(/.+)?|{_OWN}(stats|cached_paths|load|costs|tokenizer)"
        rf"|{_OWN}(requests|speculations)/[^/]+"
    ),
    "POST": re.compile(
        rf"/v1/(chat/)?completions|/(de)?tokenize|{_OWN}(prefetch|prompt)|{_OWN}speculations/[^/]+/confirm"
        rf"|{_OWN}documents/register"
    ),
}
"""The routes that a tenant's key may use; all others are rejected, also routes that are added elsewhere."""
TENANT = "ragcache_tenant"
"""The field of an ASGI scope with the tenant of the request's key; absent for operators."""
_PROBES = ("/health", "/ping", "/ready")
_OWN_PREFIX = "/v1/ragcache/"
_RETRY_AFTER_S = 2
_MAX_DRAINED_BYTES = 256 << 20
_BODY_PAUSE_S = 30.0
"""Seconds without a byte of a request body that is not complete."""
_SHUTDOWN_S = 5.0
"""Seconds that uvicorn waits for open requests when it shuts down. vLLM has stopped the engine by then."""
_ERROR_TYPES = {408: "Request Timeout", 413: "Request Entity Too Large"}


@dataclass(slots=True)
class Work:
    """The open requests of a server, and whether it accepts more."""

    num_running: int = 0
    is_draining: bool = False


def refusal_of_work() -> JSONResponse:
    """Return the response of a server that accepts no more requests: retry elsewhere or later."""
    message = "this server is about to end and takes no more requests: send them to another, or again in a moment"
    error = {"message": message, "type": "Service Unavailable", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, {"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"})


def bound_waiting(server: Any) -> None:
    """Limit a uvicorn server's wait for request heads, and for open requests at its shutdown.

    vLLM passes neither limit to uvicorn and has no option for them. ``serve_http`` puts the server into the state of
    the application before it starts, and uvicorn reads both settings later.
    """
    server.config.http_protocol_class = HeadTimeoutProtocol
    server.config.timeout_graceful_shutdown = _SHUTDOWN_S


class AuthMiddleware:
    """ASGI middleware around all routes of the server, inside vLLM's own.

    The server's state says how many bytes a body may have (``ragcache_max_body_bytes``), and whether the engine hangs
    (``ragcache_progress``), once there is an engine.
    """

    def __init__(self, app: ASGIApp, keys: AcceptedKeys, work: Work) -> None:
        """Take ``keys``, which may change while the server runs."""
        self._app = app
        self._work = work
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            if (server := getattr(scope["app"].state, "server", None)) is not None:
                bound_waiting(server)
            await self._app(scope, receive, send)
        elif not self._may_enter(scope):
            refuse: ASGIApp = JSONResponse({"error": "Unauthorized"}, 401)  # as vLLM says it
            await (WebSocketClose(1008) if scope["type"] == "websocket" else refuse)(scope, receive, send)
        elif (tenant := scope.get(TENANT)) is not None and not _may_request(scope):
            refuse = WebSocketClose(1008) if scope["type"] == "websocket" else _not_for_tenants(scope, tenant)
            await refuse(scope, receive, send)
        elif not _is_work(scope):
            await self._pass_on(scope, receive, send)
        elif self._work.is_draining:
            refuse = WebSocketClose(1012) if scope["type"] == "websocket" else refusal_of_work()
            await refuse(scope, receive, send)
        else:
            self._work.num_running += 1
            try:
                await self._pass_on(scope, receive, send)
            finally:
                self._work.num_running -= 1

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        progress = getattr(scope["app"].state, "ragcache_progress", None)
        hang = None if progress is None else progress.hang
        if hang is not None and scope["type"] == "http" and _path(scope) in _PROBES:
            error = {"message": hang, "type": HUNG, "param": None, "code": 503}
            await JSONResponse({"error": error}, 503)(scope, receive, send)
            return
        limit = getattr(scope["app"].state, "ragcache_max_body_bytes", None)
        if scope["type"] != "http" or limit is None:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        num_bytes = _number(headers.get("content-length", ""))
        if num_bytes <= limit:
            try:
                await self._app(scope, _bounded(receive, limit), send)
            except _BadBody as error:  # raised in middleware, outside vLLM's exception handlers
                await _refusal(error.status_code, error.detail)(scope, receive, send)
            return
        if "expect" not in headers:  # a client that waits for "100 Continue" sends no body
            with suppress(_BadBody):
                await _drain(_bounded(receive, _MAX_DRAINED_BYTES))
        await _refusal(413, _why_too_large(str(num_bytes), limit))(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        path = _path(scope)
        is_open = path in OPEN_PATHS and not (self._keys.has_tenants and path in _OPERATORS_PATHS)
        if self._keys.is_unlocked or is_open:  # vLLM's CORS middleware answers a browser's preflight before
            return True
        shown = shown_digest(Headers(scope=scope).get("authorization", ""))
        if self._keys.is_operators(shown):
            return True
        if (tenant := self._keys.tenant_of(shown)) is not None:
            scope[TENANT] = tenant
        return tenant is not None


def _may_request(scope: Scope) -> bool:
    """Return whether a tenant may call this route."""
    routes = _TENANTS_ROUTES.get(scope["method"]) if scope["type"] == "http" else None
    return routes is not None and routes.fullmatch(_path(scope)) is not None


def _not_for_tenants(scope: Scope, tenant: str) -> JSONResponse:
    message = (
        f"{scope['method']} {_path(scope):.200} is not for tenants, and the key is one of {tenant!r}: ask with an "
        "operator's key, or ask an operator"
    )
    return JSONResponse({"error": {"message": message, "type": "Forbidden", "param": None, "code": 403}}, 403)


def _is_work(scope: Scope) -> bool:
    """Return whether a request needs the model, unlike a request about the server."""
    if scope["type"] == "websocket":
        return True
    return scope["type"] == "http" and scope["method"] == "POST" and not _path(scope).startswith(_OWN_PREFIX)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _number(header: str) -> int:
    """Return the number in a header, limited to 63 bits; 0 for another text."""
    return int(header[:19]) if header.isdecimal() else 0


class _BadBody(HTTPException):
    """A body that exceeds the limit or does not arrive; vLLM's routes answer it like every ``HTTPException``."""


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return a ``receive`` that rejects a body above ``limit`` bytes, and one that stops arriving."""
    num_bytes = 0
    is_complete = False

    async def counting() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:  # from here on it waits for the client's disconnect
            return await receive()
        try:
            async with asyncio.timeout(_BODY_PAUSE_S):
                message = await receive()
        except TimeoutError as error:
            raise _BadBody(
                408,
                f"the request's body stopped for {_BODY_PAUSE_S:g} s after {num_bytes} bytes: send it again",
            ) from error
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _BadBody(413, _why_too_large(f"more than {limit}", limit))
        return message

    return counting


async def _drain(receive: Receive) -> None:
    """Read and discard a body, as a sending client does not read the response."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
        pass


def _refusal(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": _ERROR_TYPES[status], "param": None, "code": status}
    return JSONResponse({"error": error}, status)  # as vLLM's own errors


def _why_too_large(size: str, limit: int) -> str:
    return (
        f"the request's body has {size} bytes, this server takes {limit}, which its context window sets: send fewer "
        "documents or prompts at once, or raise --max-model-len"
    )
