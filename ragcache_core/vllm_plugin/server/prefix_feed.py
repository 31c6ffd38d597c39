"""Cached prefixes for whoever listens, as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from ragcache_core.ordering import (
    CachedPaths,
)

_MAX_BACKLOG_BYTES = 4 << 20
_HEARTBEAT_S = 3.0
_POLL_S = 0.25
VERSION = 1
HEARTBEAT = b"{}\n"


class _Reader:
    """One who reads the feed: the lines that it has not got yet."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.num_bytes = 0
        self.is_cut_off = False
        self._loop = asyncio.get_running_loop()
        self.has_news = asyncio.Event()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self.has_news.set)


class PrefixFeed:
    """A mirror of what an engine has cached, and those who read along. May be fed by any thread.

    A reader that falls behind by more than ``max_backlog_bytes`` is cut off: it comes back for a new snapshot.
    """

    def __init__(self, *, max_backlog_bytes: int = _MAX_BACKLOG_BYTES, heartbeat_s: float = _HEARTBEAT_S) -> None:
        self._paths = CachedPaths()
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_s = heartbeat_s
        self._readers: set[_Reader] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of paths that are cached."""
        return len(self._paths)

    @property
    def num_readers(self) -> int:
        """How many read along."""
        return len(self._readers)

    def add(self, deltas: Iterable[Mapping[str, object]]) -> None:
        """Take in what an engine said, in order, and pass it on."""
        with self._lock:
            for delta in deltas:
                self._paths.apply(delta)
                if self._readers:
                    self._pass_on(_line(delta))

    async def lines(self, is_ending: Callable[[], bool] = lambda: False) -> AsyncGenerator[bytes]:
        """Yield lines of JSON: a snapshot, a line that says so, then what changes; and heartbeats.

        Ends for a reader that was cut off, and soon after ``is_ending()``.
        """
        reader = _Reader()
        with self._lock:
            snapshot = self._paths.snapshot()
            first = next(snapshot)  # the copy is made here; what comes later is in the reader's lines
            self._readers.add(reader)
        try:
            yield _line({"version": VERSION, **first})
            for delta in snapshot:
                yield _line(delta)
                await asyncio.sleep(0)  # requests go on in between
            yield _line({"ready": True})
            heard_s = time.monotonic()
            while not (reader.is_cut_off or is_ending()):
                if await _wait(reader.has_news, _POLL_S):
                    yield self._take(reader)
                elif time.monotonic() - heard_s >= self._heartbeat_s:
                    yield HEARTBEAT
                else:
                    continue
                heard_s = time.monotonic()
        finally:
            with self._lock:
                self._readers.discard(reader)

    def _pass_on(self, line: bytes) -> None:
        for reader in list(self._readers):
            reader.lines.append(line)
            reader.num_bytes += len(line)
            if reader.num_bytes > self._max_backlog_bytes:
                reader.is_cut_off = True
                reader.lines.clear()
                self._readers.discard(reader)
            reader.wake()

    def _take(self, reader: _Reader) -> bytes:
        with self._lock:
            lines = b"".join(reader.lines)
            reader.lines.clear()
            reader.num_bytes = 0
            reader.has_news.clear()
        return lines or HEARTBEAT


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
