"""Custom events: what a search knows after each of its stages, and what the engine was asked ahead of its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import RunnableConfig

from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_integrations.rag.events import similarities_of

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric

CANDIDATES_EVENT = "ragcache.candidates"
"""Custom event of each stage: ``{"query", "stage", "is_final", "doc_ids", "scores", "swaps"}``.

``scores`` are the larger, the nearer, as LangChain's relevance scores are: ``1 / (1 + squared distance)``, or inner
products. They are empty where the retriever does not tell them. ``swaps`` are what a ``max_score_loss`` has exchanged:
``{"doc_out", "doc_in", "score_loss"}`` each."""
SPECULATION_EVENT = "ragcache.speculation"
"""Custom event of each speculation: ``{"query", "event", "stage", "doc_ids", "hidden_search_s", "search_s"}``.

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
    hidden = {"hidden_search_s": event.hidden_search_s, "search_s": event.search_s}
    return SPECULATION_EVENT, {**data, "event": event.kind, **hidden}
