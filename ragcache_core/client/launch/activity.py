"""Whether a server that is loading gets on: large models take longer than anybody would wait for one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcache_core.client.launch.process import unprefixed

_MOVED_BYTES = 16 << 20
"""A server that hangs writes its log, and little else."""


class Activity:
    """Looks at a server's log, and at what it reads and writes, for signs of progress.

    ``num_bytes_moved`` is what its processes have read from and written to storage so far. What a server that waits
    for something says again and again is no progress.
    """

    def __init__(self, num_bytes_moved: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes_moved = num_bytes_moved
        self._clock = clock
        self._moved_at_s = clock()
        self._num_bytes = 0
        self._log_size = 0
        self._said: set[str] = set()

    def is_stuck(self, log: str, patience_s: float) -> bool:
        """Return whether there was no progress for ``patience_s`` seconds; ``log`` is what was logged so far."""
        if self._says_news(log):
            self._moved_at_s = self._clock()
        if self._clock() - self._moved_at_s <= patience_s:
            return False
        num_bytes = self._num_bytes_moved()
        if num_bytes - self._num_bytes < _MOVED_BYTES:
            return True
        self._num_bytes, self._moved_at_s = num_bytes, self._clock()
        return False

    def _says_news(self, log: str) -> bool:
        if len(log) == self._log_size:
            return False
        self._log_size, num_lines = len(log), len(self._said)
        self._said.update(unprefixed(line.strip()) for line in log.splitlines())
        return len(self._said) > num_lines
