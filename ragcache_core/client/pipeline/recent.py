"""What questions found last: the candidates of the same question again, while it is embedded, searched and reranked."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from functools import partial

from ragcache_core.client.pipeline.stages import close_stages
from ragcache_core.retrieval.threads import in_thread
from ragcache_core.types import DocId, Document, RetrievalUpdate

RECALLED_STAGE = -1
"""The stage before a search's own."""

_MOST_QUESTIONS = 1024
_LEAST_SEARCH_S = 0.02
"""What took less the last time is not preceded by anything."""

_logger = logging.getLogger(__name__)


class RecentQuestions:
    """Remembers ids of what the last thousand questions found, no texts. May be used by any thread.

    The documents are read anew from their store, so that one that was changed is shown as it is now, and one that was
    deleted is no candidate. They are a guess, as those of any stage: what the search finds is final.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[DocId, ...]] = OrderedDict()
        self._search_s = 0.0  # the last one's

    async def stages(
        self,
        updates: AsyncGenerator[RetrievalUpdate, None],
        question: Hashable,
        read: Callable[[Sequence[DocId]], Sequence[Document]],
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates``, and before them what ``question`` found last, if that is read before the first of them.

        ``question`` is all that decides what is found; ``read`` returns documents by their ids, in a thread.
        """
        began_s = time.perf_counter()
        ids = self._found.get(question, ()) if self._search_s >= _LEAST_SEARCH_S else ()
        first = asyncio.create_task(_next(updates)) if ids else None
        try:
            if first is not None:
                if (documents := await _read_before(first, partial(read, ids))) is not None:
                    scores = (math.nan,) * len(documents)
                    yield RetrievalUpdate(tuple(documents), scores, RECALLED_STAGE, is_final=False)
                await asyncio.wait((first,))
            while (update := await (_next(updates) if first is None else first)) is not None:
                first = None
                if update.is_final:
                    self._remember(question, update, began_s)
                yield update
        finally:
            if first is not None:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await close_stages(updates)

    def _remember(self, question: Hashable, update: RetrievalUpdate, began_s: float) -> None:
        self._search_s = time.perf_counter() - began_s
        self._found[question] = tuple(document.doc_id for document in update.documents)
        self._found.move_to_end(question)
        if len(self._found) > _MOST_QUESTIONS:
            self._found.popitem(last=False)


async def _next(updates: AsyncGenerator[RetrievalUpdate, None]) -> RetrievalUpdate | None:
    return await anext(updates, None)


async def _read_before(
    first: asyncio.Task[RetrievalUpdate | None], read: Callable[[], Sequence[Document]]
) -> Sequence[Document] | None:
    """Return what is read; ``None`` if it cannot be, or comes after the ``first`` stage."""
    reading = asyncio.ensure_future(in_thread(read))
    try:
        await asyncio.wait((first, reading), return_when=asyncio.FIRST_COMPLETED)
        return None if first.done() else reading.result()
    except Exception as error:  # deleted, or the store was closed, which the search says
        _logger.debug("what a question found last is no candidate: %s", error)
        return None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
