"""Reads in flight: they wait for nothing, and closing waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Readers:
    """Those who read at the moment, until nobody may any more. Any thread may call any method."""

    def __init__(self) -> None:
        self._reading = threading.Condition()
        self._num_reading = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody may read any more."""
        return self._is_closed

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Count one who reads as long as the context lasts; it says whether that is still allowed."""
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
        """Let nobody read any more, and wait for those who do. Idempotent."""
        with self._reading:
            self._is_closed = True
            self._reading.wait_for(lambda: not self._num_reading)
