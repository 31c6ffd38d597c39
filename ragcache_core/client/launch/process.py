"""The server's process tree: started in a new session, watched, and ended as a whole.

Three things end it, whichever comes first: :meth:`ServerProcess.stop`, the end of this process (the child reads a
pipe that we hold; when we die, even by SIGKILL, it reads end-of-file and ends itself), and its own death, after
which whatever it started is killed. Python's resource trackers are spared from SIGKILL: they unlink the tree's
shared memory once the others are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from ragcache_core.errors import EngineStartError
from ragcache_core.private_files import FILE_MODE, make_private_folder
from ragcache_core.runtime.json_lines import JSONLines
from ragcache_core.runtime.sessions import kill_session

_STANDARD = re.compile(r"/dev/(?:std(?P<name>out|err)|fd/(?P<number>\d+))")
_KEPT_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_DRAINED_S = 1.0
SERVER_MODULE = "ragcache_core.vllm_plugin.server"
GRACE_S = 20.0
_FIRST_PORT, _NUM_PORTS, _MAX_TRIES = 20_000, 10_000, 20
_MAX_LAST_WORDS = 400
_LAST_LINES = 3
_ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception|error): .")
_POINTS_ELSEWHERE = re.compile(r"See (root cause above|stack trace for root cause)")
_PREFIX = re.compile(r"^\([\w-]+ pid=\d+\)(?: [A-Z]+ [\d-]+ [\d:]+ \[[^]]*\])?\s*")


class ServerLog:
    """The log of one run of a server, which writes to ``descriptor`` until :meth:`hand_over`.

    What is no regular file (``/dev/stdout`` and ``/dev/stderr`` as well, wherever they lead), gets the server's output
    from a thread of this process, which keeps the last 256 KiB of it.
    """

    def __init__(self, path: Path, *, as_json: bool = False) -> None:
        """Open the log for appending. ``as_json``: write an object per line; :meth:`text` stays plain.

        Raises:
            OSError: it cannot be written.
        """
        self.path = path.absolute()
        self._kept = bytearray()
        self._lines = JSONLines() if as_json else None
        self._pump: threading.Thread | None = None
        self.descriptor, is_stream = _open(self.path)
        if is_stream or as_json:
            stream = self.descriptor
            source, self.descriptor = os.pipe()
            self._pump = threading.Thread(
                target=self._copy, args=(source, stream), name="ragcache-server-log", daemon=True
            )
            self._pump.start()
        else:
            self._start = os.lseek(self.descriptor, 0, os.SEEK_END)

    def hand_over(self) -> None:
        """Close this process's end, after the server got its own or failed to start."""
        os.close(self.descriptor)

    def text(self, *, has_exited: bool = False) -> str:
        """Return the log so far; empty if the file was removed. ``has_exited``: whether the server has ended."""
        if self._pump is not None:
            if has_exited:
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
            shown = data if self._lines is None else self._lines.feed(data)
            is_open = is_open and _write(stream, shown)  # the server must not block on a closed reader
        if self._lines is not None and is_open:
            _write(stream, self._lines.end())
        os.close(source)
        os.close(stream)


def is_stream(path: Path) -> bool:
    """Return whether a log path is a terminal, a pipe or a standard stream."""
    return _STANDARD.fullmatch(str(path)) is not None or (path.exists() and not path.is_file())


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it is a shared standard stream."""
    if (standard := _STANDARD.fullmatch(str(path))) is not None:
        return os.dup({"out": 1, "err": 2}.get(standard["name"]) or int(standard["number"])), True
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    return descriptor, not stat.S_ISREG(os.fstat(descriptor).st_mode)


def _write(stream: int, data: bytes) -> bool:
    """Write all of the text; return whether the stream is still open."""
    try:
        while data:
            try:
                data = data[os.write(stream, data) :]
            except BlockingIOError:
                select.select([], [stream], [])
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """Return a TCP port of ``host`` that is free now, if possible below those of outgoing connections.

    A server binds its port seconds later, and until then a connection could take it.
    """
    for _ in range(_MAX_TRIES):
        try:
            return _bound(host, _FIRST_PORT + secrets.randbelow(_NUM_PORTS))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    """Bind a port, any free one for 0, until the return of its number."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def check_port_free(host: str, port: int) -> str:
    """Return the numeric address of ``host``; reject a port in use, and a host that is no address of this machine.

    Raises:
        EngineStartError: the port is taken, reserved or not a port; the host is no address of this machine.
    """
    try:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return str(probe.getsockname()[0])
    except (OSError, OverflowError) as error:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise EngineStartError(
                f"host {host!r} is no address of this machine ({error}): use 127.0.0.1, or 0.0.0.0 for all it has"
            ) from error
        raise EngineStartError(
            f"port {port} of {host} cannot be used ({error}): choose another port, or leave it out for a free one"
        ) from error


def claim_port(host: str, port: int) -> socket.socket:
    """Return a socket that claims a free port until it is closed: while a server loads.

    Linux lets a second process bind a port until the first one listens, which vLLM does once the model is loaded. The
    socket's abstract name belongs to the network namespace, as ports do, and leaves no file.

    Raises:
        EngineStartError: another server of RAGCache claims it; as :func:`check_port_free`.
    """
    address = check_port_free(host, port)
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0ragcache-port-{address}-{port}")
    except OSError as error:
        claim.close()
        raise EngineStartError(
            f"port {port} of {host} belongs to a server that still loads: choose another port, or leave it out for a "
            "free one"
        ) from error
    return claim


class ServerProcess:
    """One run of the server. Its output goes to ``log_path``, a file or a stream such as ``/dev/stdout``."""

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], log_path: Path, log_as_json: bool = False
    ) -> None:
        """Start the server.

        Raises:
            EngineStartError: the log file cannot be written.
        """
        self._owner_pid = os.getpid()
        self._is_gone = False
        try:
            self._log = ServerLog(log_path, as_json=log_as_json)
        except OSError as error:
            raise EngineStartError(f"cannot write the server's log {log_path}: {error}; set log_path") from error
        self.log_path = self._log.path
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", SERVER_MODULE, *arguments],
                stdin=subprocess.PIPE,
                stdout=self._log.descriptor,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        finally:
            self._log.hand_over()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; ``None`` while the server runs."""
        return self._popen.poll()

    def log_text(self) -> str:
        """Return the log of this run so far (of a stream its end); empty if the log was removed."""
        return self._log.text(has_exited=self.returncode is not None)

    def last_words(self) -> str:
        """Return the reason of the server's end from its log, in one line, with the log's path."""
        lines = [line.strip() for line in self.log_text().splitlines() if line.strip() and "leaked" not in line]
        errors = [i for i, line in enumerate(lines) if _ERROR_LINE.match(unprefixed(line))]
        errors = [i for i in errors if not _POINTS_ELSEWHERE.search(lines[i])] or errors
        begin = errors[-1] if errors else max(len(lines) - 1, 0)
        more = takewhile(lambda line: not line.startswith("Traceback"), lines[begin + 1 : begin + _LAST_LINES])
        last_lines = " ".join(map(unprefixed, [*lines[begin : begin + 1], *more])) or "it logged nothing"
        return f"{last_lines[:_MAX_LAST_WORDS]} (log: {self.log_path})"

    def wait(self) -> int:
        """Wait until the server's main process has ended; return its exit status."""
        return self._popen.wait()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the whole process tree: SIGTERM, then SIGKILL after ``grace_s``. Returns when all processes are gone.

        May be repeated. A fork of the owner does not own the server: there it does nothing.
        """
        if not self._is_owned():
            return
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the whole process tree. Returns when all processes are gone; may be repeated."""
        if not self._is_owned():
            return
        self._popen.poll()
        kill_session(self._popen.pid)
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._is_gone = True  # from here on the number may be another process's

    def _is_owned(self) -> bool:
        return not self._is_gone and os.getpid() == self._owner_pid


def unprefixed(line: str) -> str:
    """Return a line of vLLM's log without its prefix of process and time."""
    return _PREFIX.sub("", line)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
