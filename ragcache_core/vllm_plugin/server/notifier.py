"""Coroutines that wait for what another part of the process is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_Found = TypeVar("_Found")


class Notifier:
    """Wakes those who wait for something, for them to look again. May be told by any thread."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def tell(self) -> None:
        """Have everybody who waits look again."""
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop was closed, with those who waited
                loop.call_soon_threadsafe(event.set)

    async def wait_for(self, find: Callable[[], _Found | None], patience_s: float) -> _Found | None:
        """Return what ``find`` does as soon as that is not ``None``, which it may be after ``patience_s``."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience_s):
                while (found := find()) is None:
                    await event.wait()
                    event.clear()
                return found
        except TimeoutError:
            return None
        finally:
            del self._waiting[event]
