"""What RAGCache publishes on LlamaIndex's instrumentation dispatcher, and a handler that sums it up.

::

    handler = CacheStatsEventHandler()
    get_dispatcher().add_event_handler(handler)
    ...
    print(handler.num_cached_tokens, "of", handler.num_prompt_tokens)
"""

from __future__ import annotations

import math
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragcache_core.client.pipeline import PipelineEvent
from ragcache_core.client.search_result import similarities
from ragcache_core.stats import ChunkReuseStats, DocumentStats, RequestStats

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric

dispatcher = get_dispatcher("ragcache_integrations.llamaindex")
"""What publishes the events of this room; they reach the handlers of LlamaIndex's root dispatcher too."""


_FIELDS = tuple(field.name for field in fields(RequestStats))


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
    num_gpu_tokens: int | None = None
    num_host_tokens: int | None = None
    num_disk_tokens: int | None = None
    num_loaded_bytes: int | None = None
    num_stored_bytes: int | None = None
    queue_s: float | None = None
    chunk_reuse: ChunkReuseStats | None = None

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEvent"

    @classmethod
    def from_stats(cls, stats: RequestStats, *, model: str, span_id: str | None) -> CacheStatsEvent:
        """Return the event that says what ``stats`` says."""
        said = {name: getattr(stats, name) for name in (*_FIELDS, "num_computed_tokens")}
        return cls(model=model, span_id=span_id, **said)

    @property
    def stats(self) -> RequestStats:
        """The statistics as the core's own object."""
        return RequestStats(**{name: getattr(self, name) for name in _FIELDS})


class RetrievalStageEvent(BaseEvent):
    """What a staged search knew after one stage: a guess, or the answer where ``is_final``.

    ``scores`` are those of the nodes: the larger, the nearer. They are empty where the retriever does not tell them.
    """

    query: str
    stage: int
    is_final: bool
    document_ids: tuple[str, ...]
    scores: tuple[float, ...]

    @classmethod
    def class_name(cls) -> str:
        return "RetrievalStageEvent"


class SpeculationEvent(BaseEvent):
    """What the engine was asked ahead of a search's end.

    ``kind`` is ``start``, ``cancel`` (the candidates changed), ``confirm`` (they were the final documents), ``miss``
    (the engine had not begun with the final documents) or ``settle`` (the answer has ended). ``document_ids`` are in
    the order of the prompt, ``search_s`` is the time since the search began.

    ``hidden_search_s`` of it was hidden, which is told once: where a whole answer is asked ahead with ``settle``
    (``None``: no request joined it, it was no match after all), otherwise with ``confirm`` (``None``: the engine has
    not told yet when it began).
    """

    query: str
    kind: Literal["start", "cancel", "confirm", "miss", "settle"]
    stage: int
    document_ids: tuple[str, ...]
    search_s: float
    hidden_search_s: float | None

    @classmethod
    def class_name(cls) -> str:
        return "SpeculationEvent"


def publish(event: PipelineEvent, *, query: str, span_id: str | None, metric: Metric | None = None) -> None:
    """Publish what happened during a search for ``query``, by ``metric`` where the store tells it."""
    ids, stage = event.doc_ids, event.stage
    if event.kind == "stage":
        scores = tuple(similarities([float(score) for score in event.scores if not math.isnan(score)], metric))
        dispatcher.event(
            RetrievalStageEvent(
                query=query, stage=stage, is_final=event.is_final, document_ids=ids, scores=scores, span_id=span_id
            )
        )
        return
    seconds = {"search_s": event.search_s, "hidden_search_s": event.hidden_search_s}
    dispatcher.event(
        SpeculationEvent(query=query, kind=event.kind, stage=stage, document_ids=ids, span_id=span_id, **seconds)
    )


_SUMMED = (
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("num_gpu_tokens", "num_host_tokens", "num_disk_tokens", "num_loaded_bytes", "num_stored_bytes"),
)
"""Fields of an event that are summed up under their own names; what the engine did not tell counts as nothing."""


class CacheStatsEventHandler(BaseEventHandler):
    """Sums up the requests of an application; add it to the dispatcher. Safe to use from several threads."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_gpu_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_reused_chunks: int = 0
    """Documents that were reused behind others than they were computed behind; those answers are approximate."""
    num_reused_tokens: int = 0
    """Of them, the tokens that were taken as they were stored."""
    num_recomputed_tokens: int = 0
    """Of them, the tokens that were computed anew."""
    num_timed_requests: int = 0
    """Requests whose time to first token is known: those that were streamed, or all where the engine tells it."""
    sum_ttft_s: float = 0.0
    num_queued_requests: int = 0
    """Requests of which the engine told how long they waited to be scheduled."""
    sum_queue_s: float = 0.0
    num_speculations: int = 0
    """How often the engine worked ahead while documents were searched."""
    num_confirmed_speculations: int = 0
    """How often it did with the documents that were found."""
    hidden_search_s: float = 0.0
    """Seconds of searching that cost no time, because the engine worked on the answer already."""
    last: CacheStatsEvent | None = None

    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Count a :class:`CacheStatsEvent` or a :class:`SpeculationEvent`; let every other event pass."""
        if isinstance(event, CacheStatsEvent):
            self._count_request(event)
        elif isinstance(event, SpeculationEvent):
            with self._lock:
                self.num_speculations += event.kind == "start"
                self.num_confirmed_speculations += event.kind == "confirm"
                self.num_confirmed_speculations -= event.kind == "settle" and event.hidden_search_s is None
                self.hidden_search_s += event.hidden_search_s or 0.0

    def _count_request(self, event: CacheStatsEvent) -> None:
        with self._lock:
            self.num_requests += 1
            for name in _SUMMED:
                setattr(self, name, getattr(self, name) + (getattr(event, name) or 0))
            if (reuse := event.chunk_reuse) is not None:
                self.num_reused_chunks += reuse.num_chunks
                self.num_reused_tokens += reuse.num_reused_tokens
                self.num_recomputed_tokens += reuse.num_recomputed_tokens
            if event.ttft_s is not None:
                self.num_timed_requests += 1
                self.sum_ttft_s += event.ttft_s
            if event.queue_s is not None:
                self.num_queued_requests += 1
                self.sum_queue_s += event.queue_s
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
        """Mean time to first token of the requests whose is known; ``None`` before the first."""
        return self.sum_ttft_s / self.num_timed_requests if self.num_timed_requests else None

    @property
    def mean_queue_s(self) -> float | None:
        """Mean time before a request was scheduled; ``None`` before the first of which the engine told it."""
        return self.sum_queue_s / self.num_queued_requests if self.num_queued_requests else None
