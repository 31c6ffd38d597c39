"""What of a request's body is refused before vLLM reads it: text that is none, numbers that no engine can take."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import ConfigError
from ragcache_core.wire import check_sendable

_SUSPICIOUS = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}|[eE]\+?[0-9]{3}|NaN|Infinity")
"""Without one of these, a body holds neither half of a surrogate pair nor a number beyond 64 bits or a float."""
_METADATA = "kv_transfer_params"
"""What of it cannot be sent to the engine is ignored there, and counted: no request fails of it."""


class RequestBodyCheck:
    """Middleware that answers such a request with status 400, and our error: vLLM's would be a 500, or a foreign one.

    A body is read once more only where its bytes make it suspicious.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the body of a POST; let everything else pass."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        parts = [message.get("body", b"") for message in messages]
        if (problem := problem_of(parts[0] if len(parts) == 1 else b"".join(parts))) is not None:
            error = {"message": problem, "type": "BadRequestError", "param": None, "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        messages.reverse()

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)


def problem_of(body: bytes) -> str | None:
    """Return why a body is refused; None if it is not, or is no JSON object, of which vLLM speaks."""
    if _SUSPICIOUS.search(body) is None:
        return None
    try:
        request: Any = json.loads(body)
    except RecursionError:
        return None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            return None
        return "the request holds a number of thousands of digits; one must lie within 64 bits: send a smaller one"
    if not isinstance(request, dict):
        return None
    try:
        check_sendable({name: value for name, value in request.items() if name != _METADATA}, "the request")
    except ConfigError as error:
        return str(error)
    return None
