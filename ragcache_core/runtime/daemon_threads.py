"""Threads for calls that may never return: kept for the next call, and without delay for the end of the process."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from weakref import WeakSet

_KEPT_S = 30.0

_all: WeakSet[DaemonThreadPool] = WeakSet()


class DaemonThreadPool:
    """Runs each call in a thread of its own, which is kept for a later call.

    The start of a thread blocks its caller until the system runs it: 4 ms beside busy processes, in which an event loop
    stands still. An idle thread starts a call at once. An executor's threads hold up the end of the process while one
    of them is stuck; these do not. A fork begins with none. May be used by any thread.
    """

    def __init__(self, name: str, *, most: int | None = None) -> None:
        """Begin without threads; at most ``most`` of them run a call. They are called ``name``."""
        self._name, self._most = name, most
        self._reset_after_fork()
        _all.add(self)

    @property
    def num_busy(self) -> int:
        """The number of running calls."""
        return self._num_busy

    def run(self, call: Callable[[], None]) -> bool:
        """Have a thread run ``call``, which raises nothing, in a copy of the caller's context; return at once.

        Returns whether one runs it: False if ``most`` calls are running.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        with self._lock:
            if self._most is not None and self._num_busy >= self._most:
                return False
            self._num_busy += 1
            kept = self._idle.pop() if self._idle else None
        inbox = kept or queue.SimpleQueue()
        inbox.put(partial(copy_context().run, call))
        if kept is None:
            try:
                threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._num_busy -= 1
                raise
        return True

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._idle: deque[queue.SimpleQueue[Callable[[], None]]] = deque()
        self._num_busy = 0

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                call = inbox.get(timeout=_KEPT_S)
            except queue.Empty:
                with self._lock, suppress(ValueError):  # it was just taken for a call
                    self._idle.remove(inbox)
                    return
                continue
            is_kept = False
            try:
                call()
                is_kept = True
            finally:
                del call  # or it would keep alive what it is about
                with self._lock:
                    self._num_busy -= 1
                    if is_kept:
                        self._idle.append(inbox)


def _reset_all_after_fork() -> None:
    for threads in list(_all):
        threads._reset_after_fork()


os.register_at_fork(after_in_child=_reset_all_after_fork)
