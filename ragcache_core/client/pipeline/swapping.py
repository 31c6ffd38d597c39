"""Stages of a search in which near-tied documents are replaced by cached ones, before speculation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragcache_core.client.ordering.document_order import OrderingClient
from ragcache_core.client.pipeline.result import similarities
from ragcache_core.client.pipeline.stages import check_stage, check_updates, close_stages, cut_stage
from ragcache_core.ordering import DocumentOrder
from ragcache_core.swaps import Choice
from ragcache_core.types import DocId, Document, RetrievalUpdate

if TYPE_CHECKING:  # the client does not need the store
    from ragcache_core.retrieval.base import Metric


@dataclass(frozen=True, slots=True)
class Swapping:
    """Settings of score-tolerant substitution; see :func:`~ragcache_core.swaps.prefer_cached`.

    ``metric`` is that of the scores; ``prefix_of`` returns the static prefix of these documents' prompt.
    """

    ordering: OrderingClient
    max_score_loss: float
    order: DocumentOrder
    keep_first: bool
    metric: Metric | None
    prefix_of: Callable[[Sequence[Document]], bytes | None]

    async def stages(self, updates: AsyncIterator[RetrievalUpdate], k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates`` reduced to ``k`` documents each; they name more.

        The choice for equal candidates stays the same during a search, although speculation changes the cache.
        """
        chosen: dict[tuple[DocId, ...], Choice] = {}
        try:
            check_updates(updates)
            async for update in updates:
                check_stage(update)
                update = cut_stage(update, None)
                ids = tuple(document.doc_id for document in update.documents)
                if ids not in chosen:
                    chosen[ids] = self._choose(update, ids, k)
                yield _with(update, chosen[ids])
        finally:
            await close_stages(updates)

    def _choose(self, update: RetrievalUpdate, ids: Sequence[DocId], k: int) -> Choice:
        scores = similarities([float(score) for score in update.scores], self.metric)
        if len(scores) < len(ids):
            return Choice(tuple(range(min(k, len(ids)))))
        return self.ordering.prefer_cached(
            ids,
            scores,
            k,
            max_score_loss=self.max_score_loss,
            order=self.order,
            keep_first=self.keep_first,
            prefix=self.prefix_of(update.documents),
        )


def _with(update: RetrievalUpdate, choice: Choice) -> RetrievalUpdate:
    return replace(
        update,
        documents=tuple(update.documents[i] for i in choice.places),
        scores=tuple(update.scores[i] for i in choice.places if i < len(update.scores)),
        swaps=choice.swaps,
    )
