"""A server's log as JSON, one object a line, for what collects the logs of containers."""

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
"""What vLLM's lines begin with: the process, the level, the time without a year, and the place in the source."""
_MAX_LINE_BYTES = 1 << 16


def json_line(message: str, *, level: str | None = None, **fields: object) -> str:
    """Return one line of JSON with the time now, in UTC; an event code of the message is a field of its own."""
    event, message = split_code(message)
    given = {"level": level, **fields, "event": event, "message": message}
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return json.dumps({"time": at, **{name: value for name, value in given.items() if value is not None}}, default=str)


class JSONLines:
    """Turns a server's output into lines of JSON. The output comes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete with ``data``; longer ones than 64 KiB come in parts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(map(_converted, lines))

    def end(self) -> bytes:
        """Return what is left when the output has ended."""
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
