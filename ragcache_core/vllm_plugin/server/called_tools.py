"""Tell the engine which tool the answer to a chat calls, for how long such tools usually take.

The name is in the response only: the engine sees tokens, and vLLM's tool parsers run in the server.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from ragcache_core.hints import MAX_TOOL_CHARS
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.compat import call_cache
from ragcache_core.vllm_plugin.server.engine_view import received

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logger_of(__name__)

_ROUTE: Final = "/chat/completions"
_CALLS: Final = b'"tool_calls":[{'
_DATA: Final = b"data: "


class CalledTools:
    """Middleware that passes responses to chats unchanged, and then calls the engine where one calls a tool."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a response on; of several tools in it the first counts."""
        if scope["type"] != "http" or not scope["path"].endswith(_ROUTE) or received.engine() is None:
            await self._app(scope, receive, send)
            return
        called: tuple[str, str] | None = None

        async def reading(message: Message) -> None:
            nonlocal called
            if called is None and _CALLS in (part := message.get("body", b"")):
                called = called_tool(part)
            await send(message)

        await self._app(scope, receive, reading)
        if called is not None:
            await _tell(scope, *called)


async def _tell(scope: Scope, response_id: str, tool: str) -> None:
    body = {"response_id": response_id, "tool": tool[:MAX_TOOL_CHARS]}
    try:
        await call_cache(scope["app"].state.ragcache_engine_client, "called", body)
    except Exception as error:  # the response was sent; an engine that has died says so to the next request
        logger.debug("an engine did not take the name of a called tool: %s", error)


def called_tool(part: bytes) -> tuple[str, str] | None:
    """Return the id and the tool of a response, or of events of a stream."""
    for line in part.split(b"\n"):
        if _CALLS not in line:
            continue
        try:
            said = json.loads(line.removeprefix(_DATA))
            choice = said["choices"][0]
            called = choice.get("message") or choice["delta"]
            response_id, tool = said["id"], called["tool_calls"][0]["function"]["name"]
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
        if isinstance(response_id, str) and isinstance(tool, str) and tool:
            return response_id, tool
    return None
