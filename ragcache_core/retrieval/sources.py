"""Staged retrievers: a document store, any retriever, and a reranker as the last stage."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ragcache_core.errors import ConfigError, EmptyStoreError, quoted
from ragcache_core.log import logger_of
from ragcache_core.types import DocId, Document, RetrievalUpdate


@runtime_checkable
class StageSource(Protocol):
    """Staged retriever: finds documents in stages.

    It may have an ``identity``, a string that names it in every process. What retrievers learn of its stages is kept
    under that name then, for later ones.
    """

    def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the candidates after each stage; only the last update is final.

        Yield the ``k`` best documents, the best first; the caller cuts off further ones. Closing the iterator early
        stops the search. Run blocking code in a thread, as time-outs do not work in a blocked event loop.
        """
        ...


class StagedSearch(Protocol):
    """A store whose search is cut into stages, such as :class:`DocumentStore`."""

    def search_staged(
        self, query: str, k: int, *, stages: int | Sequence[float] | None = None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the candidates after each stage of a search."""
        ...


@dataclass(frozen=True, slots=True)
class _StoreSource:
    store: StagedSearch
    cuts: int | Sequence[float] | None

    def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        return self.store.search_staged(query, k, stages=self.cuts)


def as_source(obj: object, *, stages: int | Sequence[float] | None = None) -> StageSource:
    """Return ``obj`` as a staged retriever: one itself, or an object with ``search_staged`` such as a store.

    ``stages`` sets the stages of a store's search; another staged retriever has its own.

    Raises:
        ConfigError: ``obj`` is neither, or its method is no asynchronous generator; ``stages`` for a retriever with its
            own.
    """
    if not isinstance(obj, type):
        if callable(search := getattr(obj, "stages", None)):
            _check_yields(search)
            if stages is not None:
                raise ConfigError(
                    f"stages is {stages!r:.80}, but {type(obj).__name__} has stages of its own: leave "
                    "stages out, or pass an object with search_staged(query, k, stages=...)"
                )
            return obj  # type: ignore[return-value]
        if callable(search := getattr(obj, "search_staged", None)):
            _check_yields(search)
            return _StoreSource(obj, stages)  # type: ignore[arg-type]
    raise ConfigError(
        f"{obj!r:.80} is not a staged retriever: pass a DocumentStore, or an object with "
        "stages(query, k) that yields RetrievalUpdates"
    )


def _check_yields(search: Callable[..., object]) -> None:
    if inspect.iscoroutinefunction(search):
        why = "is an async def without yield: yield each stage as a RetrievalUpdate, return none"
    elif inspect.isgeneratorfunction(search):
        why = "is a plain generator, which blocks the event loop: make it an async def"
    else:
        return
    raise ConfigError(f"{getattr(search, '__qualname__', None) or repr(search)} {why}")


NOTHING_FOUND = RetrievalUpdate((), (), 0, is_final=True)


async def empty_result() -> AsyncGenerator[RetrievalUpdate, None]:
    """Yield one final stage without documents."""
    yield NOTHING_FOUND


async def or_nothing(updates: AsyncGenerator[RetrievalUpdate, None]) -> AsyncGenerator[RetrievalUpdate, None]:
    """Yield the same stages, or for a store without documents one final stage without documents."""
    try:
        async with aclosing(updates):
            async for update in updates:
                yield update
    except EmptyStoreError:
        yield NOTHING_FOUND


async def filter_by_score(
    updates: AsyncGenerator[RetrievalUpdate, None], is_near: Callable[[float], bool]
) -> AsyncGenerator[RetrievalUpdate, None]:
    """Yield the same stages without documents whose scores are below the threshold."""
    async with aclosing(updates):
        async for update in updates:
            kept = [i for i, score in enumerate(update.scores) if is_near(score)]
            documents = tuple(update.documents[i] for i in kept)
            yield replace(update, documents=documents, scores=tuple(update.scores[i] for i in kept))


async def one_stage(find: Callable[[], Awaitable[Sequence[Document]]]) -> AsyncGenerator[RetrievalUpdate, None]:
    """Yield the result of ``find`` as the only, final stage. Scores are unknown (NaN)."""
    documents = tuple(await find())
    yield RetrievalUpdate(documents, (math.nan,) * len(documents), stage=0, is_final=True)


NUM_CANDIDATES = 20
"""How many documents a reranker is given by default."""

Rerank = Callable[[Sequence[Document]], Awaitable[Sequence[Document]]]

logger = logger_of(__name__)


def num_candidates_of(num_candidates: object, k: int, is_reranked: bool, setting: str) -> int:
    """Return the number of documents to search for, at least ``k``; ``None`` means :data:`NUM_CANDIDATES`.

    ``setting`` names what reranks, if it is given.

    Raises:
        ConfigError: a number that is none, below ``k``, or given where nothing is reranked.
    """
    if not is_reranked:
        if num_candidates is None:
            return k
        raise ConfigError(
            f"num_candidates is {quoted(num_candidates)}, but there is no reranker: give "
            f"{setting}, or leave num_candidates out"
        )
    if num_candidates is None:
        return max(k, NUM_CANDIDATES)
    if isinstance(num_candidates, bool) or not isinstance(num_candidates, int) or num_candidates < k:
        raise ConfigError(
            f"num_candidates is {quoted(num_candidates)}: give a whole number of at least {k}, which is k"
        )
    return num_candidates


class Reranking:
    """Applies a reranker to searches, and warns once if it returns documents that it was not given.

    The reranker may drop documents, shorten their texts, and return fewer than requested, or none. Repeated documents
    count once. Documents that it was not given are used unchanged.
    """

    def __init__(self, name: str) -> None:
        """Take ``name``: the reranker's name in warnings."""
        self._name = name
        self._has_warned = False

    async def stages(
        self, updates: AsyncGenerator[RetrievalUpdate, None], rerank: Rerank
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates`` as candidates, then the final stage: ``rerank`` of the last one."""
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
