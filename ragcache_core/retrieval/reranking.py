"""A reranker as the last stage of a search: until it is done, what goes into it are candidates."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.log import logger_of
from ragcache_core.types import DocId, Document, RetrievalUpdate

NUM_CANDIDATES = 20
"""How many documents a reranker is given by default."""

Rerank = Callable[[Sequence[Document]], Awaitable[Sequence[Document]]]

logger = logger_of(__name__)


def num_candidates_of(num_candidates: object, k: int, is_reranked: bool, setting: str) -> int:
    """Return how many documents to search for, so that ``k`` are left of them; ``None`` is :data:`NUM_CANDIDATES`.

    ``setting`` names what reranks, if it is given.

    Raises:
        ConfigError: a number that is none, below ``k``, or given where nothing is reranked.
    """
    if not is_reranked:
        if num_candidates is None:
            return k
        raise ConfigError(
            f"num_candidates is {quoted(num_candidates)}, and nothing reranks them: give {setting}, or leave it out"
        )
    if num_candidates is None:
        return max(k, NUM_CANDIDATES)
    if isinstance(num_candidates, bool) or not isinstance(num_candidates, int) or num_candidates < k:
        raise ConfigError(
            f"num_candidates is {quoted(num_candidates)}: give a whole number of at least {k}, which are to be left "
            "of them"
        )
    return num_candidates


class Reranking:
    """Puts a reranker behind searches, and warns once where it returns what it was not given.

    It may leave documents out, shorten their texts, and return fewer than are wanted, or none. What it returns twice
    counts once, as of any source. What it was not given is taken as it is.
    """

    def __init__(self, name: str) -> None:
        """``name`` is what warnings call the reranker."""
        self._name = name
        self._has_warned = False

    async def stages(
        self, updates: AsyncGenerator[RetrievalUpdate, None], rerank: Rerank
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates`` as candidates, and then what ``rerank`` makes of the last one, which is final."""
        last: Any = None
        try:
            async for last in updates:
                if not isinstance(last, RetrievalUpdate):
                    yield last  # the reader of the stages reports the error
                    return
                yield replace(last, is_final=False)
                if last.is_final:
                    break
        finally:
            if (aclose := getattr(updates, "aclose", None)) is not None:
                await aclose()
        if last is None or not last.is_final:
            return
        found = await rerank(last.documents) if last.documents else ()
        self._see({document.doc_id: document for document in last.documents}, found)
        yield RetrievalUpdate(tuple(found), (math.nan,) * len(found), last.stage + 1, is_final=True)

    def _see(self, given: dict[DocId, Document], found: Sequence[Document]) -> None:
        texts = [document.text for document in given.values()]
        invented = [d.doc_id for d in found if d.doc_id not in given and not any(d.text in text for text in texts)]
        if invented and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "RC-DOCUMENTS-NEW: %s returned %d documents that it was not given, %r first: they are shown as they "
                "are, and their KV is kept under that name",
                self._name,
                len(invented),
                invented[0],
            )
