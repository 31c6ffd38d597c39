"""What RAGCache publishes on LlamaIndex's instrumentation dispatcher, and a handler that sums it up.

::

    handler = CacheStatsEventHandler()
    get_dispatcher().add_event_handler(handler)
    ...
    print(handler.num_cached_tokens, "of", handler.num_prompt_tokens)
"""

from __future__ import annotations

import threading
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragcache_core.stats import DocumentStats, RequestStats
from ragcache_core.types import RetrievalUpdate

dispatcher = get_dispatcher("ragcache_integrations.llamaindex")
"""What publishes the events of this room; they reach the handlers of LlamaIndex's root dispatcher too."""


class CacheStatsEvent(BaseEvent):
    """What one request of the LLM cost; the fields are those of :class:`~ragcache_core.stats.RequestStats`.

    Published once per request that ran to its end, after the last token. ``span_id`` is the span in which the request
    was made, also where its stream is read in another one.
    """

    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    total_s: float
    documents: tuple[DocumentStats, ...] = ()

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEvent"

    @classmethod
    def from_stats(cls, stats: RequestStats, *, model: str, span_id: str | None) -> CacheStatsEvent:
        """Return the event that says what ``stats`` says."""
        return cls(
            model=model,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_output_tokens=stats.num_output_tokens,
            ttft_s=stats.ttft_s,
            total_s=stats.total_s,
            documents=stats.documents,
            span_id=span_id,
        )

    @property
    def stats(self) -> RequestStats:
        """The statistics as the core's own object."""
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            ttft_s=self.ttft_s,
            total_s=self.total_s,
            documents=self.documents,
        )


class RetrievalStageEvent(BaseEvent):
    """What a staged search knew after one stage: a guess, or the answer where ``is_final``."""

    query: str
    stage: int
    is_final: bool
    document_ids: tuple[str, ...]
    scores: tuple[float, ...]

    @classmethod
    def class_name(cls) -> str:
        return "RetrievalStageEvent"

    @classmethod
    def from_update(cls, update: RetrievalUpdate, *, query: str, span_id: str | None) -> RetrievalStageEvent:
        """Return the event that says what ``update`` says."""
        return cls(
            query=query,
            stage=update.stage,
            is_final=update.is_final,
            document_ids=tuple(d.doc_id for d in update.documents),
            scores=update.scores,
            span_id=span_id,
        )


class CacheStatsEventHandler(BaseEventHandler):
    """Sums up the requests of an application; add it to the dispatcher. Safe to use from several threads."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_timed_requests: int = 0
    """Requests with a time to first token: those that were streamed."""
    sum_ttft_s: float = 0.0
    last: CacheStatsEvent | None = None

    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Count a :class:`CacheStatsEvent`; let every other event pass."""
        if not isinstance(event, CacheStatsEvent):
            return
        with self._lock:
            self.num_requests += 1
            self.num_prompt_tokens += event.num_prompt_tokens
            self.num_cached_tokens += event.num_cached_tokens
            self.num_output_tokens += event.num_output_tokens
            if event.ttft_s is not None:
                self.num_timed_requests += 1
                self.sum_ttft_s += event.ttft_s
            self.last = event

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the engine had to prefill."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came out of the cache; 0 before the first request."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to first token of the streamed requests; ``None`` before the first."""
        return self.sum_ttft_s / self.num_timed_requests if self.num_timed_requests else None
