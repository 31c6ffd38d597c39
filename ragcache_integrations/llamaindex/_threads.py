"""Blocking code of others, awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

_Result = TypeVar("_Result")


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """Return what a blocking call comes to. It has a thread of its own: one that never returns holds up nobody."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        outcome.set_running_or_notify_cancel()  # a time-out cannot cancel it any more, only forget it
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="ragcache-retrieve", daemon=True).start()
    return await asyncio.wrap_future(outcome)
