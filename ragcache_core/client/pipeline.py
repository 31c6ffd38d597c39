"""Run a staged search and the generation it leads to at the same time (RAGCache §5.3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from ragcache_core.client.search_result import PipelineEvent, PipelineResult
from ragcache_core.client.search_run import SearchRun
from ragcache_core.client.speculating_door import SpeculatingDoor
from ragcache_core.client.stages import check_timeout
from ragcache_core.client.starting import Speculator
from ragcache_core.speculation import SettlingHistory
from ragcache_core.types import Document, RetrievalUpdate

__all__ = ["PipelineEvent", "PipelineResult", "Speculator", "run_pipeline"]


async def run_pipeline(
    updates: AsyncIterator[RetrievalUpdate],
    door: SpeculatingDoor | None,
    speculator: Speculator | None,
    *,
    timeout_s: float | None = None,
    on_event: Callable[[PipelineEvent], Awaitable[None] | None] | None = None,
    arrange: Callable[[Sequence[Document]], Sequence[Document]] | None = None,
    history: SettlingHistory | None = None,
) -> PipelineResult:
    """Return the final documents of a search, during which the engine worked ahead from its candidates.

    The search is never held up, and its result never lost: not by the engine, nor by a speculator that is slow or
    raises. Whatever ends this early, an error or a cancellation, cancels every speculation, closes ``updates`` and
    leaves no task. A source has a second to clean up, for which the result waits; it is cut off then.

    Args:
        updates: the search's stages. A document that appears twice counts once; nothing is read after the final stage.
        door: the engine; ``None``: nothing is speculated.
        speculator: sends what can be sent ahead; ``None``: nothing is speculated.
        timeout_s: how long the search may take until its documents are final.
        on_event: told of every stage and speculation, in order; what it raises ends the search.
        arrange: puts a stage's documents into the order of the prompt; asked once for the same documents.
        history: of the searches of this source, to which this one is added; without it every stage is trusted.

    Raises:
        SearchTimeoutError: the documents were not final in time.
        SearchError: the search ended without final documents, or ``updates`` yields no stages.
        ConfigError: the time-out is not above 0.
    """
    check_timeout(timeout_s)
    run = SearchRun(door, speculator, on_event, arrange, history or SettlingHistory())
    try:
        result = await run.result(updates, timeout_s)
        await run.end_tasks()
    except BaseException:
        run.abandon()
        await run.end_tasks()
        raise
    return result
