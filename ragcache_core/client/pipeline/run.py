"""Run a staged search and the generation it leads to at the same time (RAGCache §5.3)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from ragcache_core.client.pipeline.result import PipelineEvent, PipelineResult
from ragcache_core.client.pipeline.search import SearchRun
from ragcache_core.client.pipeline.stages import check_timeout
from ragcache_core.client.speculation.attempt import Speculator
from ragcache_core.client.speculation.client import SpeculationClient
from ragcache_core.client.tracing import search_span
from ragcache_core.speculation import SettlingHistory
from ragcache_core.types import Document, RetrievalUpdate

_logger = logging.getLogger(__name__)

_LATE_S = 0.05
"""An event loop may be that late of itself."""

__all__ = ["PipelineEvent", "PipelineResult", "Speculator", "run_pipeline"]


async def run_pipeline(
    updates: AsyncIterator[RetrievalUpdate],
    client: SpeculationClient | None,
    speculator: Speculator | None,
    *,
    timeout_s: float | None = None,
    on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None = None,
    arrange: Callable[[Sequence[Document]], Sequence[Document]] | None = None,
    history: SettlingHistory | None = None,
    k: int | None = None,
) -> PipelineResult:
    """Return the final documents of a search, during which the engine worked ahead from its candidates.

    The search is never held up, and its result never lost: not by the engine, nor by a speculator that is slow or
    raises. Whatever ends this early, an error or a cancellation, cancels every speculation, closes ``updates`` and
    leaves no task. A source has a second to clean up, for which the result waits; it is cut off then.

    Args:
        updates: the search's stages. A document that appears twice counts once; nothing is read after the final stage.
        client: sends the engine speculations and asks for its load; ``None``: nothing is speculated.
        speculator: sends what can be sent ahead; ``None``: nothing is speculated.
        timeout_s: how long the search may take until its documents are final. A source that blocks the event loop
            is timed out between two stages only: a single one comes, late, and with a warning that says so.
        on_event: told of every stage and speculation, in order; what it raises ends the search.
        arrange: puts a stage's documents into the order of the prompt; asked once for the same documents.
        history: of the searches of this source, to which this one is added; without it every stage is trusted.
        k: how many documents were asked for: a source that finds more is cut to the first ones of each stage.

    Raises:
        SearchTimeoutError: the documents were not final in time.
        SearchError: the search ended without final documents, or ``updates`` yields no stages.
        ConfigError: the time-out is not above 0.
    """
    check_timeout(timeout_s)
    with search_span() as trace:
        run = SearchRun(client, speculator, on_event, arrange, history, k, trace)
        try:
            result = await run.result(updates, timeout_s)
            await run.end_tasks()
        except BaseException:
            run.abandon()
            await run.end_tasks()
            raise
        if trace is not None:
            trace.end(result)
    if timeout_s is not None and result.report.search_s > timeout_s + _LATE_S:  # else it had been timed out
        _logger.warning(
            "A search took %.3g s, beyond its time-out of %g s, because something blocked the event loop: let a source "
            "await what it waits for, and run what blocks in a thread, `await asyncio.to_thread(...)`",
            result.report.search_s,
            timeout_s,
        )
    return result
