"""Wakes coroutines that wait for data from another part of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_Found = TypeVar("_Found")


class Notifier:
    """Wakes waiting coroutines, which then check their condition again. Any thread may call it."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop was closed, with its coroutines
                loop.call_soon_threadsafe(event.set)

    async def wait_for(self, find: Callable[[], _Found | None], timeout_s: float) -> _Found | None:
        """Return the first result of ``find`` that is not ``None``; ``None`` after ``timeout_s`` seconds."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while (found := find()) is None:
                    await event.wait()
                    event.clear()
                return found
        except TimeoutError:
            return None
        finally:
            del self._waiting[event]
