"""The events that RAGCache publishes on LlamaIndex's instrumentation dispatcher, and a handler that sums them up.

::

    handler = CacheStatsEventHandler()
    get_dispatcher().add_event_handler(handler)
    ...
    print(handler)
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.client.stats.cache_summary import CacheSummary, CacheTally
from ragcache_core.runtime.trace_recorder import TraceRecorder
from ragcache_core.stats import ChunkReuseStats, DeadlineReport, DocumentStats, RequestStats
from ragcache_core.types import Swap
from ragcache_integrations.rag.events import similarities_of

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric

dispatcher = get_dispatcher("ragcache_integrations.llamaindex")
"""Dispatcher of this package's events, which also reach the handlers of LlamaIndex's root dispatcher."""


_FIELDS = tuple(field.name for field in fields(RequestStats))


class CacheStatsEvent(BaseEvent):
    """Statistics of one LLM request; fields as in :class:`~ragcache_core.stats.RequestStats`.

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
    num_shared_tokens: int | None = None
    num_loaded_bytes: int | None = None
    num_stored_bytes: int | None = None
    queue_s: float | None = None
    chunk_reuse: ChunkReuseStats | None = None
    deadline: DeadlineReport | None = None
    num_resumes: int = 0
    is_resampled: bool = False

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEvent"

    @classmethod
    def from_stats(cls, stats: RequestStats, *, model: str, span_id: str | None) -> CacheStatsEvent:
        """Return the event with the statistics ``stats``."""
        said = {name: getattr(stats, name) for name in (*_FIELDS, "num_computed_tokens")}
        return cls(model=model, span_id=span_id, **said)

    @property
    def stats(self) -> RequestStats:
        """The statistics as the core's class."""
        return RequestStats(**{name: getattr(self, name) for name in _FIELDS})


class CachedAnswerEvent(BaseEvent):
    """An answer of an ``answer_cache``, without a request to an engine.

    It was given to ``question``, or to the very same prompt (``None``), whose meaning is ``similarity`` near.
    """

    model: str
    question: str | None
    similarity: float

    @classmethod
    def class_name(cls) -> str:
        return "CachedAnswerEvent"


class RetrievalStageEvent(BaseEvent):
    """The documents of a staged search after one stage; final if ``is_final``.

    ``scores`` are those of the nodes; larger is nearer. They are empty if the retriever does not report scores.
    ``swaps`` are the substitutions within ``max_score_loss``.
    """

    query: str
    stage: int
    is_final: bool
    document_ids: tuple[str, ...]
    scores: tuple[float, ...]
    swaps: tuple[Swap, ...] = ()

    @classmethod
    def class_name(cls) -> str:
        return "RetrievalStageEvent"


class SpeculationEvent(BaseEvent):
    """An event of a speculative request.

    ``kind`` is ``start``, ``cancel`` (the candidates changed), ``confirm`` (they were the final documents), ``miss``
    (the engine had not begun with the final documents) or ``settle`` (the answer has ended). ``document_ids`` are in
    the order of the prompt, ``search_s`` is the time since the search began.

    ``overlapped_search_s`` is the part of it that overlapped. It is reported once: with ``settle`` for a speculation of
    the whole answer (``None`` if no request adopted it), otherwise with ``confirm`` (``None`` if the engine has not
    reported its start yet).
    """

    query: str
    kind: Literal["start", "cancel", "confirm", "miss", "settle"]
    stage: int
    document_ids: tuple[str, ...]
    search_s: float
    overlapped_search_s: float | None

    @classmethod
    def class_name(cls) -> str:
        return "SpeculationEvent"


def publish(event: PipelineEvent, *, query: str, span_id: str | None, metric: Metric | None = None) -> None:
    """Publish the events of a search for ``query``, with ``metric`` if known."""
    ids, stage = event.doc_ids, event.stage
    if event.kind == "stage":
        scores = tuple(similarities_of(event, metric))
        dispatcher.event(
            RetrievalStageEvent(
                query=query,
                stage=stage,
                is_final=event.is_final,
                document_ids=ids,
                scores=scores,
                swaps=event.swaps,
                span_id=span_id,
            )
        )
        return
    seconds = {"search_s": event.search_s, "overlapped_search_s": event.overlapped_search_s}
    dispatcher.event(
        SpeculationEvent(query=query, kind=event.kind, stage=stage, document_ids=ids, span_id=span_id, **seconds)
    )


class CacheStatsEventHandler(BaseEventHandler):
    """Sums up the requests of an application; add it to the dispatcher. Thread-safe.

    ``print(handler)`` prints :meth:`summary` in one line.
    """

    last: CacheStatsEvent | None = None

    _tally: CacheTally = PrivateAttr(default_factory=CacheTally)

    @classmethod
    def class_name(cls) -> str:
        return "CacheStatsEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Count this package's events of requests and speculations; ignore others."""
        if isinstance(event, CacheStatsEvent):
            self._tally.add(event.stats)
            self.last = event
        elif isinstance(event, CachedAnswerEvent):
            self._tally.add_cached_answer()
        elif isinstance(event, SpeculationEvent):
            self._tally.add_speculation(event.kind, event.overlapped_search_s)

    def summary(self) -> CacheSummary:
        """Return the present sums."""
        return self._tally.summary()

    def reset(self) -> None:
        """Set all sums to zero."""
        self._tally.reset()
        self.last = None

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


class TraceEventHandler(BaseEventHandler):
    """Records the requests of an application in a trace file for ``ragcache simulate``.

    ::

        recording = TraceEventHandler(path="mine.jsonl")
        get_dispatcher().add_event_handler(recording)

    Each line has the time of a request, the ids and lengths of its documents, and the lengths of question and answer,
    but no text. The question is the prompt without its documents. Failed requests are not recorded.

    Raises:
        TraceError: the file cannot be created, or is not empty.
    """

    path: Path
    _recorder: TraceRecorder = PrivateAttr()

    @classmethod
    def class_name(cls) -> str:
        return "TraceEventHandler"

    def model_post_init(self, context: Any, /) -> None:
        """Create the file."""
        super().model_post_init(context)
        self._recorder = TraceRecorder(self.path)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Record a :class:`CacheStatsEvent` with the start time of its request; ignore other events."""
        if isinstance(event, LLMChatStartEvent | LLMCompletionStartEvent):
            self._recorder.begin(event.span_id)
        elif isinstance(event, CacheStatsEvent):
            self._recorder.end_with(event.span_id, event.stats)
        elif isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self._recorder.drop(event.span_id)

    def close(self) -> None:
        """Close the file; also done at the end of the process."""
        self._recorder.close()
