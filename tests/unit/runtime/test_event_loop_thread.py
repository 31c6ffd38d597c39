"""An event loop in a thread of its own ends, whatever runs there."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from ragcache_core.runtime.event_loop_thread import EventLoopThread


def test_what_loses_its_cancellation_is_cancelled_again() -> None:
    begun = threading.Event()

    async def deaf() -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    thread = EventLoopThread("deaf")
    future = thread.run(deaf())
    assert begun.wait(10)
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert future.cancelled()
