"""Calls to an engine core that may crash before it answers.

vLLM completes the future of a utility call when the answer arrives, and never fails it when the engine core dies. A
route that awaits one would keep uvicorn, and the server process, alive for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

_POLL_S = 0.25
_Answer = TypeVar("_Answer")


async def wait_for_exit(engine_client: Any, call: Awaitable[_Answer]) -> _Answer:
    """Return the result of ``call``; raise when the engine core crashes.

    Raises:
        EngineDeadError: the engine core died first; vLLM's server answers with the status of a failed generation.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=_POLL_S))[0]:
            if engine_client.errored:
                raise engine_client.dead_error
        return answer.result()
    finally:
        answer.cancel()
