"""Sums of the cache's statistics over many requests, which both frameworks' handlers hold and print."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field, fields

from ragcache_core.runtime.handle import Handle
from ragcache_core.stats import TOKENS_BY_ORIGIN, RequestStats
from ragcache_core.types import DocId

_NUM_TIMES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class DocumentHits:
    """How often a document was in a prompt, and how many of its tokens were cached."""

    num_requests: int
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """Sums over requests; ``num_gpu_tokens`` to ``num_stored_bytes`` cover those with engine statistics.

    A request whose number of prompt tokens is not known (a stream without usage from a server without RAGCache) adds
    nothing to ``num_prompt_tokens``, ``num_cached_tokens`` and the tokens by tier.

    ``ttft_s`` holds the times to first token that are known, and ``queue_s`` the times before the engine scheduled a
    request, oldest first, of the last 10,000. ``num_unfinished`` counts model calls without statistics that the
    framework reports: they failed, were closed early, or used another server. ``num_cached_answers`` calls were
    answered by an answer cache; they are in no other sum.

    ``num_reused_chunks`` documents were used by chunk reuse, with ``num_reused_tokens`` of their tokens as stored and
    ``num_recomputed_tokens`` recomputed; these answers are approximate.

    ``num_deadlines`` requests had a ``ttft_slo``; ``num_met_deadlines`` of them met it.

    ``num_confirmed_speculations`` of ``num_speculations`` speculative requests were hits; ``overlapped_search_s``
    seconds of search time overlapped with their work.

    ``print(summary)`` prints it in one line.
    """

    num_requests: int = 0
    num_unfinished: int = 0
    num_cached_answers: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_gpu_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_shared_tokens: int = 0
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_reused_chunks: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_deadlines: int = 0
    num_met_deadlines: int = 0
    num_speculations: int = 0
    num_confirmed_speculations: int = 0
    overlapped_search_s: float = 0.0
    ttft_s: tuple[float, ...] = ()
    queue_s: tuple[float, ...] = ()
    documents: dict[DocId, DocumentHits] = field(default_factory=dict)

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the engine prefilled."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached; 0 before the first request."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean of the known times to first token in seconds; ``None`` before the first."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else None

    @property
    def mean_queue_s(self) -> float | None:
        """Mean queue time in seconds; ``None`` before the engine has reported one."""
        return sum(self.queue_s) / len(self.queue_s) if self.queue_s else None

    def __str__(self) -> str:
        tiers = [(self.num_gpu_tokens, "GPU"), (self.num_host_tokens, "host"), (self.num_disk_tokens, "disk")]
        if self.num_shared_tokens:
            tiers.append((self.num_shared_tokens, "shared store"))
        told = ": " + ", ".join(f"{n:,} {name}" for n, name in tiers) if any(n for n, _ in tiers) else ""
        line = f"{self.num_requests:,} request{'' if self.num_requests == 1 else 's'}, "
        if self.num_requests and not self.num_prompt_tokens:
            line += "prompt tokens not reported"
        else:
            cached = f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,} prompt tokens cached"
            line += f"{cached} ({self.hit_rate:.0%}{told})"
        if self.mean_ttft_s is not None:
            line += f", first token after {self.mean_ttft_s * 1000:,.0f} ms on average"
        if self.num_confirmed_speculations:
            line += f", {self.overlapped_search_s:.3f} s of search time overlapped"
        if self.num_deadlines:
            line += f", {self.num_met_deadlines:,} of {self.num_deadlines:,} deadlines met"
        if self.num_reused_chunks:
            line += f", {self.num_reused_chunks:,} documents reused approximately"
        if self.num_cached_answers:
            line += (
                f", {self.num_cached_answers:,} answer{'' if self.num_cached_answers == 1 else 's'} kept from before"
            )
        return line + (f", {self.num_unfinished:,} unfinished" if self.num_unfinished else "")


# Statistics of a request that are summed up under their own names; what the engine did not report counts as nothing.
# The shares of a prompt whose length is not known are in no sum.
_SUMS = {each.name for each in fields(CacheSummary) if each.default == 0}
_SUMMED = {each.name for each in fields(RequestStats)} & _SUMS
_OF_A_PROMPT = {"num_prompt_tokens", "num_cached_tokens", *TOKENS_BY_ORIGIN}


class CacheTally(Handle):
    """Adds events to a :class:`CacheSummary`. Thread-safe, for any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero."""
        with self._lock:
            self._sums: Counter[str] = Counter()
            self._overlapped_search_s = 0.0
            self._ttft_s: deque[float] = deque(maxlen=_NUM_TIMES_KEPT)
            self._queue_s: deque[float] = deque(maxlen=_NUM_TIMES_KEPT)
            self._documents: dict[DocId, DocumentHits] = {}

    def add(self, stats: RequestStats) -> None:
        """Add a completed request."""
        with self._lock:
            self._sums["num_requests"] += 1
            summed = _SUMMED if stats.num_prompt_tokens else _SUMMED - _OF_A_PROMPT
            self._sums.update({name: getattr(stats, name) or 0 for name in summed})
            if (reuse := stats.chunk_reuse) is not None:
                self._sums["num_reused_chunks"] += reuse.num_chunks
                self._sums["num_reused_tokens"] += reuse.num_reused_tokens
                self._sums["num_recomputed_tokens"] += reuse.num_recomputed_tokens
            if stats.deadline is not None:
                self._sums["num_deadlines"] += 1
                is_met = stats.ttft_s is not None and stats.ttft_s <= stats.deadline.ttft_slo_s
                self._sums["num_met_deadlines"] += is_met
            if stats.ttft_s is not None:
                self._ttft_s.append(stats.ttft_s)
            if stats.queue_s is not None:
                self._queue_s.append(stats.queue_s)
            for document in stats.documents:
                old = self._documents.get(document.doc_id, DocumentHits(0, 0, 0))
                self._documents[document.doc_id] = DocumentHits(
                    old.num_requests + 1,
                    old.num_tokens + document.num_tokens,
                    old.num_cached_tokens + document.num_cached_tokens,
                )

    def add_unfinished(self) -> None:
        """Add a model call without statistics."""
        with self._lock:
            self._sums["num_unfinished"] += 1

    def add_cached_answer(self) -> None:
        """Add a model call that the answer cache answered."""
        with self._lock:
            self._sums["num_cached_answers"] += 1

    def add_speculation(self, kind: str, overlapped_search_s: float | None) -> None:
        """Add an event of a speculation; ``kind`` is that of the pipeline's event."""
        with self._lock:
            self._sums["num_speculations"] += kind == "start"
            self._sums["num_confirmed_speculations"] += kind == "confirm"
            self._sums["num_confirmed_speculations"] -= kind == "settle" and overlapped_search_s is None
            self._overlapped_search_s += overlapped_search_s or 0.0

    def summary(self) -> CacheSummary:
        """Return the present sums."""
        with self._lock:
            return CacheSummary(
                **self._sums,
                overlapped_search_s=self._overlapped_search_s,
                ttft_s=tuple(self._ttft_s),
                queue_s=tuple(self._queue_s),
                documents=dict(self._documents),
            )
