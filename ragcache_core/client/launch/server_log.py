"""A server's output: appended to a file, or written to a stream, whose last lines are kept."""

from __future__ import annotations

import os
import re
import select
import stat
import threading
from pathlib import Path

from ragcache_core.private_files import FILE_MODE, make_private_folder

_STANDARD = re.compile(r"/dev/(?:std(?P<name>out|err)|fd/(?P<number>\d+))")
_KEPT_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_DRAINED_S = 1.0


class ServerLog:
    """The log of one run of a server, which writes to ``descriptor`` until :meth:`hand_over`.

    What is no regular file (``/dev/stdout`` and ``/dev/stderr`` as well, wherever they lead), gets the server's output
    from a thread of this process, which keeps the last 256 KiB of it.
    """

    def __init__(self, path: Path) -> None:
        """Open the log, a file at its end.

        Raises:
            OSError: it cannot be written.
        """
        self.path = path.absolute()
        self._kept = bytearray()
        self._pump: threading.Thread | None = None
        self.descriptor, is_stream = _open(self.path)
        if is_stream:
            stream = self.descriptor
            source, self.descriptor = os.pipe()
            self._pump = threading.Thread(
                target=self._copy, args=(source, stream), name="ragcache-server-log", daemon=True
            )
            self._pump.start()
        else:
            self._start = os.lseek(self.descriptor, 0, os.SEEK_END)

    def hand_over(self) -> None:
        """Close our end: the server has its own now, or was not started. Once."""
        os.close(self.descriptor)

    def text(self, *, is_over: bool = False) -> str:
        """Return what was logged so far; nothing if somebody removed the file. ``is_over``: the server has ended."""
        if self._pump is not None:
            if is_over:
                self._pump.join(_DRAINED_S)
            return bytes(self._kept).decode(errors="replace")
        try:
            with self.path.open("rb") as log:
                log.seek(self._start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _copy(self, source: int, stream: int) -> None:
        is_open = True
        while data := os.read(source, _READ_BYTES):
            self._kept += data
            del self._kept[:-_KEPT_BYTES]
            is_open = is_open and _write(stream, data)  # the server must not wait for a reader who has left
        os.close(source)
        os.close(stream)


def is_stream(path: Path) -> bool:
    """Return whether a log there goes to a terminal, a pipe or a standard stream."""
    return _STANDARD.fullmatch(str(path)) is not None or (path.exists() and not path.is_file())


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it is a stream's. Standard streams are shared: others write there as well."""
    if (standard := _STANDARD.fullmatch(str(path))) is not None:
        return os.dup({"out": 1, "err": 2}.get(standard["name"]) or int(standard["number"])), True
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    return descriptor, not stat.S_ISREG(os.fstat(descriptor).st_mode)


def _write(stream: int, data: bytes) -> bool:
    """Write all of it; return whether the stream is still open."""
    try:
        while data:
            try:
                data = data[os.write(stream, data) :]
            except BlockingIOError:
                select.select([], [stream], [])
    except OSError:
        return False
    return True
