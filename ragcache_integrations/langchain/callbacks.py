"""Callbacks and custom events: the stages of a search, the cache's statistics, and a trace of the requests."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, adispatch_custom_event, dispatch_custom_event
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import RunnableConfig

from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.client.stats.cache_summary import CacheSummary, CacheTally
from ragcache_core.runtime.trace_recorder import TraceRecorder
from ragcache_core.stats import ANSWER_KEY, STATS_KEY, RequestStats, request_stats_from_dict
from ragcache_integrations.rag.events import similarities_of

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric


CANDIDATES_EVENT = "ragcache.candidates"
"""Custom event of each stage: ``{"query", "stage", "is_final", "doc_ids", "scores", "swaps"}``.

``scores`` are the larger, the nearer, as LangChain's relevance scores are: ``1 / (1 + squared distance)``, or inner
products. They are empty where the retriever does not tell them. ``swaps`` are what a ``max_score_loss`` has exchanged:
``{"doc_out", "doc_in", "score_loss"}`` each."""
SPECULATION_EVENT = "ragcache.speculation"
"""Custom event of each speculation: ``{"query", "event", "stage", "doc_ids", "overlapped_search_s", "search_s"}``.

``event`` is ``start``, ``cancel`` (the candidates changed), ``confirm`` (they were the final documents), ``miss`` (the
engine had not begun with the final documents) or ``settle`` (the answer has ended). So much of the search was hidden,
which is told once: where a whole answer is asked ahead with ``settle`` (``None``: no request joined it, it was no match
after all), otherwise with ``confirm`` (``None``: the engine has not told yet when it began)."""


def dispatcher(query: str, config: RunnableConfig, metric: Metric | None = None) -> Callable[[PipelineEvent], None]:
    """Return what dispatches the events of a search for ``query``, by ``metric`` where the store tells it.

    ``config`` is that of the children of its run.
    """
    return lambda event: dispatch_custom_event(*_named(query, event, metric), config=config)


def async_dispatcher(
    query: str, config: RunnableConfig, metric: Metric | None = None
) -> Callable[[PipelineEvent], Awaitable[None]]:
    """Do :func:`dispatcher` for an asynchronous run."""
    return lambda event: adispatch_custom_event(*_named(query, event, metric), config=config)


def _named(query: str, event: PipelineEvent, metric: Metric | None) -> tuple[str, dict[str, Any]]:
    data: dict[str, Any] = {"query": query, "stage": event.stage, "doc_ids": list(event.doc_ids)}
    if event.kind == "stage":
        swaps = [asdict(swap) for swap in event.swaps]
        scores = similarities_of(event, metric)
        return CANDIDATES_EVENT, {**data, "is_final": event.is_final, "scores": scores, "swaps": swaps}
    hidden = {"overlapped_search_s": event.overlapped_search_s, "search_s": event.search_s}
    return SPECULATION_EVENT, {**data, "event": event.kind, **hidden}


class CacheStatsCallbackHandler(BaseCallbackHandler):
    """Collects the :class:`~ragcache_core.stats.RequestStats` of every ``ChatRAGCache`` call that it sees, and sums up
    how much searching was hidden.

    Pass it as a callback to a chain, an agent or a model: ``chain.invoke(question, {"callbacks": [handler]})``. It may
    be shared by threads and by event loops. The statistics of the last ``num_runs_kept`` runs are kept, sums of all.
    ``print(handler)`` says in one line what :meth:`summary` does.
    """

    def __init__(self, num_runs_kept: int = 10_000) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._runs: deque[tuple[UUID, RequestStats]] = deque(maxlen=num_runs_kept)
        self._tally = CacheTally()

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._runs.clear()
            self._tally.reset()

    @property
    def runs(self) -> list[tuple[UUID, RequestStats]]:
        """The model runs with their statistics, in the order in which they ended."""
        with self._lock:
            return list(self._runs)

    def summary(self) -> CacheSummary:
        """Return the sums up to now."""
        return self._tally.summary()

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Take the statistics out of a finished model run."""
        first = [g for generations in response.generations for g in generations[:1]]
        stats, num_kept = [s for g in first if (s := _stats_of(g))], sum(map(_is_kept, first))
        for _ in range(num_kept):
            self._tally.add_cached_answer()
        if not stats and not num_kept:
            self._tally.add_unfinished()
        with self._lock:
            for each in stats:
                self._runs.append((run_id, each))
                self._tally.add(each)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        """Count a model run that failed, or whose stream was closed early."""
        self._tally.add_unfinished()

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Count what the engine was asked ahead of a search's end."""
        if name == SPECULATION_EVENT:
            self._tally.add_speculation(data["event"], data["overlapped_search_s"])

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


class TraceCallbackHandler(BaseCallbackHandler):
    """Records every ``ChatRAGCache`` call that it sees in a file that ``ragcache simulate`` runs again.

    ::

        with TraceCallbackHandler("mine.jsonl") as recording:
            chain.invoke(question, {"callbacks": [recording]})

    A line says when a request was made, the ids and lengths of its documents, and how long question and answer were; it
    holds no text. The question is all of the prompt that is no document. Calls that fail are left out.

    Raises:
        TraceError: the file cannot be made, or holds something already.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._recorder = TraceRecorder(path)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the time of a model run."""
        self._recorder.begin(run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a finished model run."""
        for generations in response.generations:
            if generations and (stats := _stats_of(generations[0])) is not None:
                self._recorder.end_with(run_id, stats)
        self._recorder.drop(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Leave out a model run that failed, or whose stream was closed early."""
        self._recorder.drop(run_id)

    def close(self) -> None:
        """Close the file; the end of the process does so, too."""
        self._recorder.close()

    def __enter__(self) -> TraceCallbackHandler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _stats_of(generation: object) -> RequestStats | None:
    data = _answer_data(generation)
    return request_stats_from_dict(data) if data and ANSWER_KEY not in data else None


def _is_kept(generation: object) -> bool:
    """Return whether a cache of answers gave it."""
    return ANSWER_KEY in _answer_data(generation)


def _answer_data(generation: object) -> dict[str, Any]:
    message: BaseMessage | None = generation.message if isinstance(generation, ChatGeneration) else None
    data = message.response_metadata.get(STATS_KEY) if message is not None else None
    return data if isinstance(data, dict) else {}
