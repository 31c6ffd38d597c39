"""Waiting for what another thread or process makes true."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Return whether ``condition`` came true in time: by default before an endless answer of a test ends by itself."""
    ends_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends_s:
        time.sleep(0.005)  # a poll: no event says when it has come true
    return bool(condition())
