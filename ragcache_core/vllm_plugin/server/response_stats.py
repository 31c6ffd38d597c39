"""The request's statistics in its response, for clients that ask for them with a header.

Clients of the OpenAI protocol reject or ignore fields that they do not know, so only ``x-ragcache-stats: 1`` adds a
``ragcache`` object: to the JSON of a response, or to one more event at the end of a stream. In a stream of the
Responses API that event is ``response.ragcache``, before the last one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.middleware import TENANT
from ragcache_core.wire import KEY, STATS_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ROUTES = ("/completions", "/responses")
_TIMEOUT_S = 0.5
_DONE = b"data: [DONE]"
_DATA = b"data: "
_CREATED = b"event: response.created\n"
_ENDS = tuple(b"event: response.%s\n" % end for end in (b"completed", b"incomplete", b"failed"))


class ResponseStatsMiddleware:
    """Middleware that adds the block where the header asks for it; everything else passes unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the block to a response."""
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or not scope["path"].endswith(_ROUTES)
            or Headers(scope=scope).get(STATS_HEADER) != "1"
        ):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Response(send, scope.get(TENANT)).send)


class _Response:
    """One response on its way to the client."""

    def __init__(self, send: Send, tenant: str | None) -> None:
        self._send = send
        self._tenant = tenant
        self._start: Message | None = None
        self._body = b""
        self._is_stream = False
        self._first: dict[str, Any] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            if self._is_stream or message["status"] != 200 or not kind.startswith("application/json"):
                await self._send(message)
            else:
                self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._start)
        else:
            if self._is_stream:
                message = {**message, "body": await self._with_event(message.get("body", b""))}
            await self._send(message)

    async def _end(self, start: Message) -> None:
        """Send a response that is one JSON object."""
        body = self._body
        said = _object(body)
        if said is not None and (figures := await self._figures(said.get("id"))) is not None:
            body = json.dumps({**said, KEY: figures}, ensure_ascii=False, separators=(",", ":")).encode()
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _with_event(self, part: bytes) -> bytes:
        """Return a part of a stream, with one more event before the last."""
        if part.startswith((_CREATED, *_ENDS)):
            return await self._with_response_event(part)
        if self._first is None and part.startswith(_DATA):
            self._first = _object(part.split(b"\n", 1)[0].removeprefix(_DATA))
        at = (b"\n" + part).find(b"\n" + _DONE)  # an answer may hold these words, within its line
        if self._first is None or at < 0:
            return part
        figures = await self._figures(self._first.get("id"))
        if figures is None:
            return part
        names = ("id", "object", "created", "model")
        event = {name: self._first[name] for name in names if name in self._first} | {"choices": [], KEY: figures}
        return part[:at] + _DATA + json.dumps(event).encode() + b"\n\n" + part[at:]

    async def _with_response_event(self, part: bytes) -> bytes:
        """Return the first event of a stream of the Responses API, or its last one behind one of ours."""
        event = _object(part.split(b"\n", 2)[1].removeprefix(_DATA))
        response = (event or {}).get("response")
        if event is None or not isinstance(response, dict):
            return part
        if part.startswith(_CREATED):
            self._first = response
            return part
        response_id = (self._first or response).get("id")
        if (figures := await self._figures(response_id)) is None:
            return part
        said = {"type": "response.ragcache", "sequence_number": event.get("sequence_number"), KEY: figures}
        return b"event: response.ragcache\n" + _DATA + json.dumps(said).encode() + b"\n\n" + part

    async def _figures(self, response_id: object) -> dict[str, Any] | None:
        """Return a request's statistics; they may arrive a moment after its answer."""
        if not isinstance(response_id, str) or received.engine() is None:
            return None
        return await received.notifier.wait_for(lambda: received.request(response_id, self._tenant), _TIMEOUT_S)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(data)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
