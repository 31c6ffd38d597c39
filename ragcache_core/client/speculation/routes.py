"""A speculation's requests to the server: the marked one, its confirmation, and how long it waited.

All of it is sent by the event loop that its ``transport`` belongs to, and only the confirmation more than once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from itertools import chain, repeat
from typing import TYPE_CHECKING

import httpx

from ragcache_core import wire
from ragcache_core.client.http.buffered_response import BufferedResponse, ResponseHead
from ragcache_core.client.http.errors import says_engine_died
from ragcache_core.client.http.resume import ResumeStreams, can_resume
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.errors import ConfigError, EngineDiedError, EngineError

if TYPE_CHECKING:
    from ragcache_core.client.speculation.speculation import Speculation

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_SHORT_TIMEOUT = httpx.Timeout(5.0)
_CONFIRM_PAUSES_S = (0.05, 0.2, 1.0, 2.0, 5.0)
"""Before a confirmation that did not arrive is repeated; the last one from then on."""
_ASK_AGAIN_S = 0.05
"""Before a server that had no news is asked again how long a speculation has waited; it waits for that itself."""
_ERROR_EVENT = re.compile(rb'data:\s*\{\s*"error"\s*:')
_LONGEST_CUT = 32
"""The beginning of an event may arrive apart from its rest; so much of it is looked at again."""

_logger = logging.getLogger(__name__)


def marked_request(
    captured: CapturedRequest, speculation_id: str, *, resume_streams: ResumeStreams = "off"
) -> httpx.Request:
    """Return ``captured`` with the id of a speculation in its metadata.

    ``resume_streams``: the answers that continue after a cut, for which the server names their tokens.

    Raises:
        ConfigError: its body is no JSON object.
    """
    try:
        asked = json.loads(captured.body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError(f"a request whose body is no JSON object cannot be speculated: {captured.body[:80]!r}")
    params = dict(asked.get("kv_transfer_params") or {})
    metadata = params.get(wire.KEY) or {"version": wire.WIRE_VERSION, "documents": []}
    params[wire.KEY] = {**metadata, "speculation": speculation_id}
    names_tokens = {"return_token_ids": True} if can_resume(asked, resume_streams) else {}
    return httpx.Request(
        captured.method,
        captured.url,
        headers=captured.headers,
        content=json.dumps({**asked, "kv_transfer_params": params, **names_tokens}).encode(),
        extensions={"timeout": _TIMEOUT.as_dict()},
    )


async def receive(
    transport: httpx.AsyncBaseTransport,
    request: httpx.Request,
    response: BufferedResponse,
    *,
    is_promised: Callable[[], bool],
) -> None:
    """Send ``request`` and write its answer into ``response`` to the end, which is left to the caller.

    What the server reports as an error in a stream is one until bytes are there that ``is_promised`` to somebody; then
    it is passed on as the server tells it, as the transports do. Cancelling this ends the request in the engine.

    Raises:
        EngineError: the engine refused it, or died. httpx.TransportError: the connection failed.
    """
    answer = await transport.handle_async_request(request)
    try:
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        if answer.status_code >= 400:
            said = (await answer.aread()).decode(errors="replace")
            raise EngineError(f"the engine refused a speculation with status {answer.status_code}: {said:.300}")
        response.begin(ResponseHead(answer.status_code, list(answer.headers.raw)))
        async for part in answer.stream:
            if not (response.has_bytes and is_promised()):
                _check(response.last_bytes()[-_LONGEST_CUT:] + part)
            response.append(part)
    finally:
        await answer.aclose()


def _check(events: bytes) -> None:
    """Raise the error that an event of a stream reports. In what the model says, quotes are escaped."""
    if (found := _ERROR_EVENT.search(events)) is not None:
        said = events[found.start() :].decode(errors="replace")
        if says_engine_died(said):
            raise EngineDiedError("the engine died during a speculation")
        raise EngineError(f"the engine failed during a speculation: {said:.300}")


class SpeculationRoutes:
    """Two routes of the plugin. Their failures are logged, and affect no request."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """``base_url`` ends in ``/v1``."""
        self._url = f"{base_url}/ragcache"
        self._authorization = f"Bearer {api_key}"

    async def confirm(self, transport: httpx.AsyncBaseTransport, speculation: Speculation) -> None:
        """Tell the engine that a speculation is a real request now, until it has acknowledged that or ends.

        A joined request whose confirmation is lost would wait behind every other one.
        """
        for pause_s in chain(_CONFIRM_PAUSES_S, repeat(_CONFIRM_PAUSES_S[-1])):
            answer = await self._ask(transport, "POST", speculation, "/confirm")
            if answer is not None and answer.status_code < 500:
                return
            await asyncio.sleep(pause_s)
            if speculation.is_done:
                return

    async def follow_wait(
        self, transport: httpx.AsyncBaseTransport, speculation: Speculation, note: Callable[[float], None]
    ) -> None:
        """Call ``note`` with the seconds that a speculation has waited to be scheduled, each time the engine tells.

        It does so when it begins, and when it goes on after a pause. Returns when the speculation is done,
        or when the server is one that does not tell.
        """
        num_told = 0
        while True:
            was_over = speculation.is_done
            after = 0 if was_over else num_told  # at the end it does not wait for what is known
            answer = await self._ask(transport, "GET", speculation, f"?after={after}")
            if answer is not None and answer.status_code < 500:
                match _json(answer):
                    case {"waited_s": float() | int() as waited_s, "num_told": int() as num_told}:
                        note(float(waited_s))
                        if not was_over:
                            continue
                    case {"waited_s": None}:
                        pass  # it waited for the engine, in vain
                    case _:
                        return
            if was_over:
                return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _ask(
        self, transport: httpx.AsyncBaseTransport, method: str, speculation: Speculation, route: str
    ) -> httpx.Response | None:
        """Return the server's answer, read to its end; ``None`` if there was none.

        It is asked as who sent the speculation: a tenant's are known to that tenant alone.
        """
        extensions = {"timeout": _SHORT_TIMEOUT.as_dict()}
        headers = {"Authorization": speculation.authorization or self._authorization}
        url = f"{self._url}/speculations/{speculation.id}{route}"
        request = httpx.Request(method, url, headers=headers, extensions=extensions)
        try:
            answer = await transport.handle_async_request(request)
            try:
                await answer.aread()
            finally:
                await answer.aclose()
            return answer
        except httpx.HTTPError as error:
            _logger.debug("%s %s: %s: %s", method, url, type(error).__name__, error)
            return None


def _json(answer: httpx.Response) -> object:
    """Return what a route answers; ``None`` if it refuses, or answers something else."""
    try:
        return answer.json() if answer.status_code == 200 else None
    except ValueError:
        return None
