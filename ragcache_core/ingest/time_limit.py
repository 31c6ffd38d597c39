"""An end to what takes too long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ragcache_core.errors import DocumentError


class _TimeUpError(BaseException):
    """Not an ``Exception``: libraries catch those."""


@contextmanager
def processor_time(limit_s: float, name: str) -> Iterator[None]:
    """End what runs within after ``limit_s`` seconds of processor time. In other threads than the main one: never.

    Raises:
        DocumentError: with the name of the file.
    """

    def stop(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise _TimeUpError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s, 1.0)  # again each second, should it be caught
        yield
    except _TimeUpError:
        raise DocumentError(
            f"file {name!r} takes more than {limit_s:g} processor seconds to read: raise max_file_s"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
