"""Read the stages of any search: it may raise, find too much, never end, or end without an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from dataclasses import replace

from ragcache_core.errors import ConfigError, SearchError, SearchTimeoutError
from ragcache_core.types import Document, RetrievalUpdate

_logger = logging.getLogger(__name__)

_CURE = "write stages(query, k) as an async def that yields RetrievalUpdates"
CANCELLED_BY_SOURCE = "the search was cancelled by its source: see the source"
DEFAULT_TIMEOUT_S = 60.0
"""How long a search may take by default: a source that hangs must not block its caller for good."""


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a time-out that cannot work.

    Raises:
        ConfigError: it is not above 0.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}: give seconds above 0, or None to wait as long as it takes")


def check_updates(updates: object) -> None:
    """Refuse what cannot be read stage by stage.

    Raises:
        SearchError: it is no asynchronous iterator.
    """
    if not isinstance(updates, AsyncIterable):
        raise SearchError(f"the search's updates are {updates!r}: {_CURE}")


def check_stage(update: object) -> None:
    """Refuse what is no stage.

    Raises:
        SearchError: it is no update, or what it found are no documents.
    """
    if not isinstance(update, RetrievalUpdate):
        raise SearchError(f"a stage of the search is {update!r}: {_CURE}")
    for document in update.documents:
        if not isinstance(document, Document):
            raise SearchError(f"stage {update.stage} of the search found {document!r}: yield Documents only")


async def read_stages(
    updates: AsyncIterator[RetrievalUpdate], on_stage: Callable[[RetrievalUpdate], None], *, k: int | None = None
) -> None:
    """Hand each stage to ``on_stage``, every document once and the first ``k`` of them, until the final one.

    Raises:
        SearchTimeoutError: the source timed out.
        SearchError: the search ended without a final stage, or what it yields are no stages.
    """
    check_updates(updates)
    try:
        async for update in updates:
            check_stage(update)
            on_stage(cut_stage(update, k))
            if update.is_final:
                return
            await asyncio.sleep(0)  # a source that never waits would keep everything else from running, time-outs too
        raise SearchError("the search ended without final documents: its last update must have is_final=True")
    except TimeoutError as error:
        raise SearchTimeoutError(f"the search timed out: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SearchError(CANCELLED_BY_SOURCE) from error


async def close_stages(updates: AsyncIterator[RetrievalUpdate]) -> None:
    """Close the source. What it raises then is logged, and changes no result."""
    try:
        if isinstance(updates, Coroutine):
            updates.close()  # never awaited
        elif (aclose := getattr(updates, "aclose", None)) is not None:
            await aclose()
    except Exception:
        _logger.warning("a source of stages could not be closed", exc_info=True)


def cut_stage(update: RetrievalUpdate, k: int | None) -> RetrievalUpdate:
    """Return a stage with every document once, where it stood first, and the first ``k`` of them."""
    first = {document.doc_id: i for i, document in reversed(list(enumerate(update.documents)))}
    kept = sorted(first.values())[:k]
    if len(kept) == len(update.documents):
        return update
    return replace(
        update,
        documents=tuple(update.documents[i] for i in kept),
        scores=tuple(update.scores[i] for i in kept if i < len(update.scores)),
    )
