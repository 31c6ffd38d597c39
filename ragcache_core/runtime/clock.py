"""The clock for the age of KV: seconds since 1970 that never jump during a process."""

from __future__ import annotations

import time

_STARTED_S = time.time() - time.monotonic()


def steady_s() -> float:
    """Return seconds since 1970, by the clock at this process's start."""
    return _STARTED_S + time.monotonic()
