"""Counts of reads in flight, for which closing a store waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Readers:
    """Counts reads in flight, and allows them until closed. Thread-safe."""

    def __init__(self) -> None:
        self._reading = threading.Condition()
        self._num_reading = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether reads are no longer allowed."""
        return self._is_closed

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Count one read during the context; yields whether it is allowed."""
        with self._reading:
            is_open = not self._is_closed
            self._num_reading += is_open
        try:
            yield is_open
        finally:
            with self._reading:
                self._num_reading -= is_open
                self._reading.notify_all()

    def close(self) -> None:
        """Allow no more reads, and wait for those in flight. Idempotent."""
        with self._reading:
            self._is_closed = True
            self._reading.wait_for(lambda: not self._num_reading)
