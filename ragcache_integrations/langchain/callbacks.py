"""Sum up what the cache did for a chain, an agent or a batch."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from ragcache_core.stats import RequestStats, request_stats_from_dict
from ragcache_core.types import DocId
from ragcache_integrations.langchain.events import SPECULATION_EVENT


@dataclass(frozen=True, slots=True)
class DocumentHits:
    """How often a document was in a prompt, and how many of its tokens came out of the cache."""

    num_requests: int
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """Sums over requests; ``num_gpu_tokens`` to ``num_stored_bytes`` over those of which the engine told them.

    ``ttft_s`` holds the times to first token that are known, and ``queue_s`` the times before the engine scheduled a
    request, oldest first. ``num_unfinished`` counts model calls without statistics: they failed, were closed early, or
    ran elsewhere.

    ``num_reused_chunks`` documents were reused behind others than they were computed behind, ``num_reused_tokens`` of
    them as they were stored and ``num_recomputed_tokens`` computed anew; their answers are approximate.

    While documents were searched, the engine worked ahead ``num_speculations`` times, ``num_confirmed_speculations`` of
    them with the documents that were found: ``hidden_search_s`` seconds of searching cost no time.
    """

    num_requests: int = 0
    num_unfinished: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_gpu_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_reused_chunks: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_speculations: int = 0
    num_confirmed_speculations: int = 0
    hidden_search_s: float = 0.0
    ttft_s: tuple[float, ...] = ()
    queue_s: tuple[float, ...] = ()
    documents: dict[DocId, DocumentHits] = field(default_factory=dict)

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the engine had to prefill."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came out of the cache; 0 before the first request."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


_SUMMED = (
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("num_gpu_tokens", "num_host_tokens", "num_disk_tokens", "num_loaded_bytes", "num_stored_bytes"),
)
"""Fields of the request's statistics that are summed up under their own names."""


class CacheStatsCallbackHandler(BaseCallbackHandler):
    """Collects the :class:`~ragcache_core.stats.RequestStats` of every ``ChatRAGCache`` call that it sees, and sums up
    how much searching was hidden.

    Pass it as a callback to a chain, an agent or a model: ``chain.invoke(question, {"callbacks": [handler]})``. It may
    be shared by threads and by event loops. The statistics of the last ``num_runs_kept`` runs are kept, sums of all.
    """

    def __init__(self, num_runs_kept: int = 10_000) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._num_runs_kept = num_runs_kept
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._runs: deque[tuple[UUID, RequestStats]] = deque(maxlen=self._num_runs_kept)
            self._sums: Counter[str] = Counter()
            self._hidden_search_s = 0.0
            self._documents: dict[DocId, DocumentHits] = {}

    @property
    def runs(self) -> list[tuple[UUID, RequestStats]]:
        """The model runs with their statistics, in the order in which they ended."""
        with self._lock:
            return list(self._runs)

    def summary(self) -> CacheSummary:
        """Return the sums up to now."""
        with self._lock:
            ttft_s = tuple(stats.ttft_s for _, stats in self._runs if stats.ttft_s is not None)
            queue_s = tuple(stats.queue_s for _, stats in self._runs if stats.queue_s is not None)
            return CacheSummary(
                **self._sums,
                hidden_search_s=self._hidden_search_s,
                ttft_s=ttft_s,
                queue_s=queue_s,
                documents=dict(self._documents),
            )

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Take the statistics out of a finished model run."""
        stats = [s for generations in response.generations for g in generations[:1] if (s := _stats_of(g))]
        with self._lock:
            if not stats:
                self._sums["num_unfinished"] += 1
            for each in stats:
                self._add(run_id, each)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        """Count a model run that failed, or whose stream was closed early."""
        with self._lock:
            self._sums["num_unfinished"] += 1

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Count what the engine was asked ahead of a search's end."""
        if name != SPECULATION_EVENT:
            return
        with self._lock:
            match data["event"]:
                case "start":
                    self._sums["num_speculations"] += 1
                case "confirm":
                    self._sums["num_confirmed_speculations"] += 1
                    self._hidden_search_s += data["hidden_search_s"] or 0.0
                case "settle":
                    self._sums["num_confirmed_speculations"] -= data["hidden_search_s"] is None
                    self._hidden_search_s += data["hidden_search_s"] or 0.0

    def _add(self, run_id: UUID, stats: RequestStats) -> None:
        self._runs.append((run_id, stats))
        self._sums["num_requests"] += 1
        self._sums.update({name: getattr(stats, name) or 0 for name in _SUMMED})
        if (reuse := stats.chunk_reuse) is not None:
            self._sums["num_reused_chunks"] += reuse.num_chunks
            self._sums["num_reused_tokens"] += reuse.num_reused_tokens
            self._sums["num_recomputed_tokens"] += reuse.num_recomputed_tokens
        for document in stats.documents:
            old = self._documents.get(document.doc_id, DocumentHits(0, 0, 0))
            self._documents[document.doc_id] = DocumentHits(
                old.num_requests + 1,
                old.num_tokens + document.num_tokens,
                old.num_cached_tokens + document.num_cached_tokens,
            )

    def __repr__(self) -> str:
        s = self.summary()
        tiers = ((s.num_gpu_tokens, "GPU"), (s.num_host_tokens, "host"), (s.num_disk_tokens, "disk"))
        told = ": " + ", ".join(f"{n} {name}" for n, name in tiers) if any(n for n, _ in tiers) else ""
        ttft = f", ttft {sum(s.ttft_s) / len(s.ttft_s):.3f} s on average" if s.ttft_s else ""
        hidden = f", {s.hidden_search_s:.3f} s of searching hidden" if s.num_confirmed_speculations else ""
        return (
            f"<{type(self).__name__}: {s.num_requests} requests, {s.num_cached_tokens} of {s.num_prompt_tokens} prompt "
            f"tokens cached ({s.hit_rate:.0%}{told}){ttft}{hidden}>"
        )


def _stats_of(generation: object) -> RequestStats | None:
    message: BaseMessage | None = generation.message if isinstance(generation, ChatGeneration) else None
    data = message.response_metadata.get("ragcache") if message is not None else None
    return request_stats_from_dict(data) if isinstance(data, dict) else None
