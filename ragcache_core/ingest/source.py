"""One file to read: its name, its limits, and its bytes."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ragcache_core.errors import ConfigError, DocumentError

_HINT = "take it away"
_SHORTEST_S, _LONGEST_S = 0.001, 1_000_000
_KINDS = {
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read. ``name`` is its path relative to the given directory, with forward slashes.

    A link must not lead out of the directory ``within``; a file that was named itself has none, and may be any link.
    """

    path: Path
    name: str
    within: Path | None = None


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Maximum size of a file, and maximum CPU seconds of reading it.

    Raises:
        ConfigError: the seconds are not from 0.001 to 1,000,000.
    """

    max_file_bytes: int = 64 << 20
    max_file_s: float = 120.0

    def __post_init__(self) -> None:
        if not _SHORTEST_S <= self.max_file_s <= _LONGEST_S:
            raise ConfigError(f"max_file_s is {self.max_file_s}: give a number from {_SHORTEST_S} to {_LONGEST_S:,}")


def read_source(file: SourceFile, max_file_bytes: int) -> bytes:
    """Return the bytes of a regular file; pipes and devices, which may not end, are not read.

    Raises:
        DocumentError: it is no regular file, a link that leads out of its directory, longer than ``max_file_bytes``, or
            not readable.
    """
    if file.within is not None:
        real, within = Path(os.path.realpath(file.path)), Path(os.path.realpath(file.within))
        if not real.is_relative_to(within):
            raise DocumentError(f"file {file.name!r} is a link to {str(real)!r}, outside {str(within)!r}: {_HINT}")
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
                raise DocumentError(f"file {file.name!r} is {kind}, not a regular file: {_HINT}")
            with os.fdopen(descriptor, "rb", closefd=False) as opened:
                content = opened.read(max_file_bytes + 1) if status.st_size <= max_file_bytes else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DocumentError(
            f"file {file.name!r} cannot be read ({error.strerror}): check that it is there, and its permissions"
        ) from error
    num_bytes = max(status.st_size, len(content))
    if num_bytes > max_file_bytes:
        raise DocumentError(
            f"file {file.name!r} has {num_bytes} bytes, the limit is {max_file_bytes}: raise max_file_bytes"
        )
    return content


class _TimeUpError(BaseException):
    """Not an ``Exception``, which libraries would catch."""


@contextmanager
def processor_time(limit_s: float, name: str) -> Iterator[None]:
    """Interrupt the block after ``limit_s`` seconds of CPU time; only in the main thread.

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
