"""The time by which KV ages: seconds since 1970 that never jump while a process runs, even if its clock is set."""

from __future__ import annotations

import time

_STARTED_S = time.time() - time.monotonic()


def steady_s() -> float:
    """Return seconds since 1970, as the clock was set when this process began."""
    return _STARTED_S + time.monotonic()
