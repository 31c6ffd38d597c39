"""Resumed answers until their statistics are read, and how to find the unfinished characters of such answers."""

from __future__ import annotations

import threading
from dataclasses import replace

from ragcache_core.client.http.resume import Decode, ResumableStream
from ragcache_core.stats import RequestStats

_MAX_ANSWERS = 1024
# An application may never read the statistics of an answer: the oldest is dropped.


class ResumedAnswers:
    """The answers of one engine's handle that continued after an engine failure. May be used by any thread.

    Attributes:
        decode: the model's own, where its tokenizer is at hand.
    """

    decode: Decode | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resumes: dict[str, tuple[int, bool]] = {}

    def add(self, response_id: str, stream: ResumableStream) -> None:
        """Note that ``stream`` continued, until the statistics of its answer are read."""
        with self._lock:
            self._resumes[response_id] = stream.num_resumes, stream.is_sampled
            if len(self._resumes) > _MAX_ANSWERS:
                del self._resumes[next(iter(self._resumes))]

    def mark(self, response_id: str | None, stats: RequestStats) -> RequestStats:
        """Return ``stats`` with how the answer continued, if it did."""
        if not self._resumes or response_id is None:
            return stats
        with self._lock:
            num_resumes, is_sampled = self._resumes.pop(response_id, (0, False))
        return replace(stats, num_resumes=num_resumes, is_resampled=is_sampled)
