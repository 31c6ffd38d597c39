"""Requests as they come, kept as a trace that ``ragcache simulate`` runs again: ids and lengths, and no text."""

from __future__ import annotations

import atexit
import fcntl
import heapq
import json
import os
import stat
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ragcache_core.errors import TraceError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import RECORD_TRACE_ENV
from ragcache_core.stats import RequestStats
from ragcache_core.types import DocId, PromptSegment, SegmentKind

logger = logger_of(__name__)

_MAX_HELD = 10_000
"""Ended requests that wait for an older running one; beyond that it is written after them, out of order."""
_CLOSING_S = 5.0


class TraceRecorder:
    """Appends a JSON line for each ended request to a file that only its owner may read. Thread-safe.

    Lines are in the order of arrival: a request waits for those that arrived before it. A thread writes each at once:
    no caller waits for the disk, and written lines outlive a crash of the process. If a write fails, recording ends
    with a warning.

    Raises:
        TraceError: the file cannot be made, is no regular file, or is not empty where a new one is wanted.
    """

    def __init__(self, path: str | os.PathLike[str], *, since_s: float | None = None) -> None:
        """Make the file; times count from ``since_s``, seconds since 1970, by default now.

        With ``since_s`` an existing file is continued: that of a restarted engine.
        """
        self.path = Path(path)
        self._since_s = time.time() if since_s is None else since_s
        self._file = _open(self.path, is_new=since_s is None)
        self._events: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="ragcache-trace", daemon=True)
        self._thread.start()
        _open_recorders.add(self)

    def begin(self, key: Hashable, arrived_s: float | None = None) -> None:
        """Record that a request arrived, at ``arrived_s`` seconds since 1970, by default now."""
        self._events.put((key, time.time() if arrived_s is None else arrived_s))

    def end(
        self,
        key: Hashable,
        documents: Sequence[tuple[DocId, int]],
        question_tokens: int,
        output_tokens: int,
    ) -> None:
        """Record a request that began: its documents with their lengths, its question's and its answer's, in tokens."""
        self._events.put((key, documents, question_tokens, output_tokens))

    def end_with(self, key: Hashable, stats: RequestStats) -> None:
        """Record a request by its statistics: its question is all of the prompt that is no document."""
        documents = [(document.doc_id, document.num_tokens) for document in stats.documents]
        question_tokens = stats.num_prompt_tokens - sum(num_tokens for _, num_tokens in documents)
        self.end(key, documents, question_tokens, stats.num_output_tokens)

    def drop(self, key: Hashable) -> None:
        """Forget a request that is none of the trace; one that ended already is recorded."""
        self._events.put((key,))

    def close(self) -> None:
        """Write what has ended, and close the file. May be called twice."""
        self._events.put(None)
        self._thread.join(_CLOSING_S)
        _open_recorders.discard(self)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self) -> None:
        began: dict[Hashable, float] = {}
        ended: list[tuple[float, int, dict[str, object]]] = []
        number, last_s = 0, 0.0
        try:
            while True:
                told = self._events.get()
                match told:
                    case None:
                        began.clear()
                    case (key, arrived_s):
                        began.setdefault(key, arrived_s)
                    case (key, documents, question_tokens, output_tokens):
                        if (arrived := began.pop(key, None)) is not None:
                            number += 1
                            row = _row(documents, question_tokens, output_tokens)
                            heapq.heappush(ended, (arrived, number, row))
                    case (key,):
                        began.pop(key, None)
                while ended and (not began or ended[0][0] <= next(iter(began.values())) or len(ended) > _MAX_HELD):
                    arrived, _, row = heapq.heappop(ended)
                    last_s = max(last_s, round(arrived - self._since_s, 6))
                    self._file.write(json.dumps({"t": last_s, **row}).encode() + b"\n")
                if told is None:
                    return
        except (OSError, ValueError) as error:
            logger.warning("RC-TRACE-ENDED: the trace %s ends here, as it cannot be written to: %s", self.path, error)
        finally:
            with suppress(OSError):
                self._file.close()


def recording_in_server(path: str | os.PathLike[str]) -> dict[str, str]:
    """Make the file, and return the environment of a server that records its requests there: ``Engine.launch(env=)``.

    Raises:
        TraceError: as :class:`TraceRecorder` does.
    """
    path = Path(path).absolute()
    _open(path, is_new=True).close()
    return {RECORD_TRACE_ENV: f"{time.time()}:{path}"}


def lengths_of(segments: Sequence[PromptSegment], num_prompt_tokens: int) -> tuple[list[tuple[DocId, int]], int]:
    """Return a prompt's documents with their lengths, and how many tokens follow the last: the question."""
    documents = [s for s in segments if s.kind is SegmentKind.DOCUMENT]
    end = documents[-1].end if documents else 0
    return [(s.doc_id or "", s.num_tokens) for s in documents], num_prompt_tokens - end


def _row(documents: Sequence[tuple[DocId, int]], question_tokens: int, output_tokens: int) -> dict[str, object]:
    return {
        "docs": [doc_id for doc_id, _ in documents],
        "doc_tokens": [max(num_tokens, 1) for _, num_tokens in documents],
        "question_tokens": max(question_tokens, 0),
        "output_tokens": max(output_tokens, 1),
    }


def _open(path: Path, *, is_new: bool) -> Any:
    """Return the file; one that is there already is continued, but for a new trace it must be empty."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise TraceError(
            f"the trace cannot be written ({error.strerror}): name a file in a folder of yours", path
        ) from error
    file = os.fdopen(number, "wb", buffering=0)
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or (is_new and found.st_size):
        file.close()
        what = "there is such a file" if stat.S_ISREG(found.st_mode) else "this is no regular file"
        raise TraceError(f"{what}: name another one for the trace", path)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise TraceError("another process records into this file: choose another trace file", path) from error
    os.fchmod(number, 0o600)
    return file


_open_recorders: weakref.WeakSet[TraceRecorder] = weakref.WeakSet()


@atexit.register
def _close_open_recorders() -> None:
    for recorder in list(_open_recorders):
        recorder.close()
