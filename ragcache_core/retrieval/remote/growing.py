"""Staged search in a store without stages: several searches with growing effort, at the same time.

An approximate search takes an effort, as ``ef`` of a graph or ``nprobe`` of lists. What little of it finds comes early
and is often right; the answer with the most is the final one, and is not held up by the others but for the store's own
work.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.retrieval.threads import in_thread
from ragcache_core.types import Document, RetrievalUpdate

logger = logger_of(__name__)

Effort = TypeVar("Effort")
Found = Sequence[tuple[Document, float]]
"""Documents with their scores, best first."""


class GrowingEffort(Generic[Effort]):
    """A staged retriever that runs a search with several efforts.

    ::

        def find(query, k, ef):
            return [(Document(hit.id, hit.text), hit.score) for hit in client.search(query, limit=k, ef=ef)]

        retriever = RAGCacheRetriever(store=GrowingEffort(find, efforts=(16, 256)), engine=engine)

    The final documents are those of the last effort, whose errors are raised. Another search that fails, or ends after
    one with more effort, is ignored. Closing the iterator early abandons all searches.

    Args:
        find: returns documents and scores for a question, ``k`` and an effort. A blocking function runs in a thread; a
            coroutine function is awaited.
        efforts: ascending efforts; the last one is the search without stages.
        embed: converts the question to the first argument of ``find``, once for all efforts.
        identity: name of the searched data, equal in every process, under which stage statistics are saved.
    """

    def __init__(
        self,
        find: Callable[[Any, int, Effort], Found | Awaitable[Found]],
        efforts: Sequence[Effort],
        *,
        embed: Callable[[str], Any] | None = None,
        identity: str | None = None,
    ) -> None:
        if isinstance(efforts, str) or not isinstance(efforts, Sequence) or not efforts:
            raise ConfigError(f"efforts is {efforts!r:.80}: give at least one, the last is the search without stages")
        if not callable(find):
            raise ConfigError(f"find is {find!r:.80}: give a function of a question, k and an effort")
        self._find = find
        self._efforts = tuple(efforts)
        self._embed = embed
        self.identity = None if identity is None else f"{identity}\n{self._efforts!r}"

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield each effort's result, unless a larger effort was faster; the last is final."""
        embed = self._embed
        asked = query if embed is None else await in_thread(lambda: embed(query))
        searches = [asyncio.create_task(self._search(asked, k, effort)) for effort in self._efforts]
        last, number, newest = searches[-1], 0, -1
        waiting = set(searches)
        try:
            while not last.done():
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                best = max((i for i, each in enumerate(searches[:-1]) if _is_found(each)), default=-1)
                if best > newest and not last.done():
                    newest = best
                    yield _update(searches[best].result(), number, is_final=False)
                    number += 1
            yield _update(last.result(), number, is_final=True)
        finally:
            for each in searches:
                each.cancel()
            for outcome in await asyncio.gather(*searches, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.debug("a search with less effort failed", exc_info=outcome)

    async def _search(self, asked: Any, k: int, effort: Effort) -> Found:
        if inspect.iscoroutinefunction(self._find):
            found: Found = await self._find(asked, k, effort)
            return found
        return await in_thread(lambda: self._find(asked, k, effort))  # type: ignore[arg-type, return-value]


def _is_found(search: asyncio.Task[Found]) -> bool:
    return search.done() and not search.cancelled() and search.exception() is None


def _update(found: Found, stage: int, *, is_final: bool) -> RetrievalUpdate:
    return RetrievalUpdate(
        documents=tuple(document for document, _ in found),
        scores=tuple(float(score) for _, score in found),
        stage=stage,
        is_final=is_final,
    )
