"""The engine's load: how many prefills wait, so that speculations are sent only while it is idle.

::

    GET /v1/ragcache/load   {"num_pending_prefills": 3, "max_prefill_bs": 4, "is_speculative": true, "has_room": true,
                             "reads_ahead": true}
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from ragcache_core.client.http.attempt import SENT_ONCE

_TIMEOUT_S = 1.0
_FRESH_S = 0.02
"""So long an answer serves every search of this process: many of them would otherwise ask a busy server at once."""
_PAUSE_S = 10.0
"""After a request that failed, none is sent for so long: the search goes on meanwhile."""
_UNSUPPORTED_PAUSE_S = 60.0
"""A server that takes no speculative requests may be replaced by one that does: it is asked again after so long."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How many real requests wait for their first token, and how many speculative ones the engine takes at a time.

    ``has_room``: whether the scheduler would admit a speculative one now, which it alone decides. ``reads_ahead``:
    whether it has a disk, from which it can read for a prompt that nobody asks yet.
    """

    num_pending_prefills: int
    max_prefill_bs: int
    has_room: bool
    reads_ahead: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    num_pending_prefills: Annotated[int, Field(ge=0)]
    max_prefill_bs: Annotated[int, Field(ge=0)]
    is_speculative: bool = True
    has_room: bool | None = None
    reads_ahead: bool = False

    def load(self) -> EngineLoad:
        """Return it as a load. An older engine does not say whether it admits one: its count decides."""
        has_room = self.num_pending_prefills < self.max_prefill_bs if self.has_room is None else self.has_room
        return EngineLoad(self.num_pending_prefills, self.max_prefill_bs, has_room, self.reads_ahead)


_ANSWER = TypeAdapter(_Answer)


class LoadRoute:
    """Asks one server about its load. May be used by any thread and any event loop."""

    def __init__(self, base_url: str, api_key: str, http_async: httpx.AsyncClient) -> None:
        """``base_url`` ends in ``/v1``; the client stays its owner's."""
        self._url = f"{base_url}/ragcache/load"
        self._once: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {api_key}"},
            "timeout": _TIMEOUT_S,
            "extensions": SENT_ONCE,
        }
        self._http_async = http_async
        self._may_speculate: bool | None = None
        self._paused_until_s = 0.0
        self._latest: tuple[float, EngineLoad | None] = (-_FRESH_S, None)

    async def amay_speculate(self) -> bool:
        """Return whether the server takes speculative requests. Logs once why it does not. Never fails."""
        if not self._may_speculate:
            await self.apending()
        return self._may_speculate is True

    def may_speculate(self, http: httpx.Client) -> bool:
        """Do :meth:`amay_speculate` with another client."""
        if not self._may_speculate and self._may_ask():
            with self._pausing_after_failure():
                self._read(http.get(self._url, **self._once))
        return self._may_speculate is True

    async def apending(self) -> EngineLoad | None:
        """Return the engine's load; ``None`` if it does not say, or says that it never speculates. Never fails."""
        if (load := self._fresh()) is not None:
            return load
        if self._may_ask():
            with self._pausing_after_failure():
                return self._read(await self._http_async.get(self._url, **self._once))
        return None

    def _fresh(self) -> EngineLoad | None:
        told_s, load = self._latest
        return load if self._may_speculate and time.monotonic() - told_s < _FRESH_S else None

    def _may_ask(self) -> bool:
        return time.monotonic() >= self._paused_until_s

    def _read(self, response: httpx.Response) -> EngineLoad | None:
        if response.status_code != 404:  # whatever else is refused may be allowed later
            response.raise_for_status()
        answer = _answer(response)
        if not self._may_speculate:
            is_first = self._may_speculate is None
            self._may_speculate = answer is not None and answer.is_speculative and answer.max_prefill_bs > 0
            if not self._may_speculate:
                self._paused_until_s = time.monotonic() + _UNSUPPORTED_PAUSE_S
            if is_first and not self._may_speculate and (answer is None or answer.max_prefill_bs > 0):
                _logger.warning(
                    "The server at %s cannot prefill for documents that are not final: it runs without RAGCache's "
                    "scheduler. Requests are sent when retrieval has ended; start it with Engine.launch or `ragcache "
                    "serve`, of this version, to hide the search.",
                    self._url.removesuffix("/v1/ragcache/load"),
                )
        load = None if answer is None else answer.load()
        self._latest = (time.monotonic(), load)
        return load

    @contextmanager
    def _pausing_after_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            _logger.debug("the engine's load is unknown: %s: %s", type(error).__name__, error)


def _answer(response: httpx.Response) -> _Answer | None:
    """Return what the route says; ``None`` where there is no such route, or another version's."""
    try:
        return _ANSWER.validate_json(response.content) if response.status_code == 200 else None
    except ValidationError:
        return None
