"""A server's log as JSON lines, for log collectors."""

from __future__ import annotations

import json
import re
import time

from ragcache_core.log import split_code

_PREFIX = re.compile(
    r"(?:\((?P<process>[\w.-]+) pid=(?P<pid>\d+)\) ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):? +(?:\d\d-\d\d \d\d:\d\d:\d\d \[(?P<source>[^\]]*)\] ?)?)?"
    r"(?P<message>.*)",
    re.DOTALL,
)
"""The prefix of vLLM's log lines: process, level, time without year, and source."""
_MAX_LINE_BYTES = 1 << 16


def json_line(message: str, *, level: str | None = None, **fields: object) -> str:
    """Return one JSON line with the present UTC time; a message's event code is its own field."""
    event, message = split_code(message)
    given = {"level": level, **fields, "event": event, "message": message}
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return json.dumps({"time": at, **{name: value for name, value in given.items() if value is not None}}, default=str)


class JSONLines:
    """Converts a server's output, in pieces of any size, to JSON lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines completed by ``data``; lines above 64 KiB come in parts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(map(_converted, lines))

    def end(self) -> bytes:
        """Return the rest at the end of the output."""
        rest, self._rest = self._rest, b""
        return _converted(rest)


def _converted(line: bytes) -> bytes:
    text = line.decode(errors="replace").rstrip("\r")
    if not text.strip():
        return b""
    found = _PREFIX.fullmatch(text)
    assert found is not None, "everything may be missing"
    fields = found.groupdict()
    pid = None if fields["pid"] is None else int(fields["pid"])
    return (
        json_line(
            fields["message"], level=fields["level"], process=fields["process"], pid=pid, source=fields["source"]
        ).encode()
        + b"\n"
    )
