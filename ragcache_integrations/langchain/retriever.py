"""A retriever that searches in stages, names documents to the engine, and prefills candidates meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.documents import Document as LangChainDocument
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.vectorstores import VectorStore
from pydantic import AliasChoices, ConfigDict, Field, PlainValidator, PrivateAttr, field_validator, model_validator

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.histories import SourceHistory
from ragcache_core.client.pipeline.session import SearchOverlap
from ragcache_core.client.pipeline.stages import DEFAULT_TIMEOUT_S
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.ordering import DocumentOrder
from ragcache_core.retrieval import MMR, DocumentStore
from ragcache_core.retrieval.base import Metric
from ragcache_core.retrieval.sources import (
    Reranking,
    StageSource,
    as_source,
    empty_result,
    filter_by_score,
    num_candidates_of,
    or_nothing,
)
from ragcache_core.retrieval.threads import in_thread, run_blocking
from ragcache_core.swaps import check_max_score_loss
from ragcache_core.types import Document, RetrievalUpdate
from ragcache_integrations.langchain.callbacks import async_dispatcher, dispatcher
from ragcache_integrations.langchain.documents import RANK_KEY, VIEW, to_core, to_langchain
from ragcache_integrations.langchain.vectorstore import MetadataFilter, StagedFAISS, as_where, relevance_of
from ragcache_integrations.rag.handles import HoldsHandles
from ragcache_integrations.rag.search import (
    Listener,
    Rerank,
    RetrieverSearch,
    SearchOptions,
    StartSpeculation,
    history_of,
)

SearchType = Literal["similarity", "similarity_score_threshold", "mmr"]

_SETTINGS_OF: dict[SearchType, tuple[str, ...]] = {
    "similarity": (),
    "similarity_score_threshold": ("score_threshold",),
    "mmr": ("fetch_k", "lambda_mult"),
}
"""What ``search_kwargs`` may hold beside ``k`` and ``filter``."""


def _check_store(store: object) -> object:
    """Return ``store`` if it can be searched in stages: one error, instead of one for each type of store.

    Raises:
        ConfigError: it cannot.
    """
    if isinstance(store, VectorStore) and not isinstance(store, StagedFAISS):
        name = type(store).__name__
        raise ConfigError(
            f"{name} is not searched in stages: pass a StagedFAISS or a DocumentStore, or give SpeculativeRAG the "
            f"retriever of this store, {name}.as_retriever()"
        )
    if not isinstance(store, StagedFAISS):
        as_source(store)
    return store


_Compress = Callable[[Sequence[LangChainDocument]], Awaitable[Any]]


class RAGCacheRetriever(HoldsHandles, BaseRetriever):
    """Returns the ``k`` nearest documents of a store.

    It dispatches the candidates of each stage as a custom event ``ragcache.candidates``, and returns the final result
    once, streamed or not. ``engine`` is the engine of the chat model. It recognises the documents in the prompt of an
    ordinary chain, ``retriever | format_docs``.

    The engine also prefills the prompt's beginning with the documents of each stage while the search runs, and cancels
    it if the next stage has others; ``ragcache.speculation`` events report this. The prompt must be known: from
    ``engine.bind_prompt()``, or from the first request.

    A ``compressor`` is the last stage: its input are candidates. The first ``k`` candidates are prefilled while it
    runs, as long as enough of them usually stay in place. A ``ContextualCompressionRetriever`` around this retriever
    does not work this way: the retriever's own result counts as final.

    ``filter`` and ``k`` of a call override those of ``search_kwargs``, and these the retriever's:
    ``retriever.invoke(query, filter={"tenant": "a", "year": {"$gte": 2020}})``. A filter that is a function has one
    stage: nothing is prefilled meanwhile. Unknown arguments are rejected.

    With ``max_score_loss=0.02`` a document may be replaced by a candidate whose score is at most 2 % lower, if more of
    the prompt is cached then; ``2 * k`` candidates are searched for. The search statistics and the
    ``ragcache.candidates`` events list each swap.

    Raises:
        SearchTimeoutError: a search took longer than ``search_timeout_s``.
        SearchError: a filter on a field that no document has, or on a value of another kind than it has; the compressor
            returns something else than documents.
        ConfigError: a call asks for fewer than 0 documents; ``stages`` for a source that has its own; a filter, a
            threshold or MMR for a source that is no store; something that cannot be a filter; a ``num_candidates``
            below ``k``, or without a compressor; a ``max_score_loss`` that is no share, or with canonical order,
            MMR or a compressor.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    store: Annotated[StagedFAISS | DocumentStore | StageSource, PlainValidator(_check_store)] = Field(
        exclude=True, repr=False
    )
    """The document store that is searched, a vector store over one, or any other source of stages."""
    engine: EngineClient | None = Field(default=None, exclude=True, repr=False)
    prompt: BoundPrompt | None = Field(default=None, exclude=True, repr=False)
    """The prompt that shows the documents; by default the one that the engine knows."""
    k: int = Field(default=4, ge=1, validation_alias=AliasChoices("k", "top_k"))
    """How many documents to return, also called ``top_k``; a call may ask for another number."""
    filter: MetadataFilter | None = None
    """What the metadata of every document must be, ``{"tenant": "a"}``, or a function that accepts it."""
    search_type: SearchType = "similarity"
    """``mmr`` returns documents that differ, ``similarity_score_threshold`` those that are relevant enough."""
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """``k`` and ``filter`` as LangChain's vector stores take them; those that are here go before the retriever's. With
    ``mmr`` also ``fetch_k`` and ``lambda_mult``, with ``similarity_score_threshold`` its ``score_threshold``, a
    relevance from 0 to 1."""
    compressor: BaseDocumentCompressor | None = None
    """A reranker, or any compressor that makes ``k`` documents of the ``num_candidates`` nearest ones. It may run
    several times at once."""
    num_candidates: int | None = None
    """How many documents the compressor is given, by default 20."""
    stages: int | Sequence[float] | None = None
    """Number of stages of a store's search, or increasing shares of the work that end in 1. By default by its size."""
    document_order: DocumentOrder = "retrieval"
    """``canonical`` and ``cache_aware`` return the documents in an order with more cache hits; their metadata hold
    their ``relevance_rank`` then, for the prompt's ``relevance_hint``."""
    keep_first: bool = False
    """Whether the best document stays in front in every order."""
    max_score_loss: float | None = None
    """Share of a document's score that its replacement may lack, if more of the prompt is cached with it. By default
    the best ``k`` documents are returned."""
    search_timeout_s: float | None = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """Seconds that a search may take; ``None`` for no limit."""
    speculate: bool = True
    """Whether the engine prefills candidates during a search."""
    _source_history: SourceHistory = PrivateAttr(default_factory=SourceHistory)
    _reranking: Reranking = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._reranking = Reranking(f"the compressor {type(self.compressor).__name__}")
        is_reranked = self.compressor is not None
        num_candidates_of(self.num_candidates, self.k, is_reranked, "compressor=")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        self._search_settings({})
        return self

    @model_validator(mode="after")
    def _check_max_score_loss(self) -> Self:
        beside = "a compressor" if self.compressor is not None else "MMR" if self.search_type == "mmr" else None
        check_max_score_loss(self.max_score_loss, self.document_order, beside=beside)
        return self

    @field_validator("filter")
    @classmethod
    def _check_filter(cls, given: MetadataFilter | None) -> MetadataFilter | None:
        as_where(given)
        return given

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        overlap: SearchOverlap[StartSpeculation[LangChainDocument]] | None = None,
        **overrides: Any,
    ) -> list[LangChainDocument]:
        callbacks = run_manager.get_child()
        on_event = dispatcher(query, RunnableConfig(callbacks=callbacks), self._metric())

        async def compress(documents: Sequence[LangChainDocument]) -> object:
            assert self.compressor is not None
            return await in_thread(partial(self.compressor.compress_documents, documents, query, callbacks=callbacks))

        return run_blocking(lambda: self._search(query, overrides, overlap, on_event, compress))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        overlap: SearchOverlap[StartSpeculation[LangChainDocument]] | None = None,
        **overrides: Any,
    ) -> list[LangChainDocument]:
        callbacks = run_manager.get_child()
        on_event = async_dispatcher(query, RunnableConfig(callbacks=callbacks), self._metric())

        async def compress(documents: Sequence[LangChainDocument]) -> object:
            assert self.compressor is not None
            return await self.compressor.acompress_documents(documents, query, callbacks=callbacks)

        return await self._search(query, overrides, overlap, on_event, compress)

    async def _search(
        self,
        query: str,
        overrides: dict[str, Any],
        overlap: SearchOverlap[StartSpeculation[LangChainDocument]] | None,
        on_event: Listener,
        compress: _Compress,
    ) -> list[LangChainDocument]:
        settings, store = self._search_settings(overrides), self._searched()
        options = SearchOptions(
            self.document_order, self.keep_first, self.max_score_loss, self.search_timeout_s, self.speculate
        )
        reranker = None if self.compressor is None else (type(self.compressor).__name__, self.num_candidates)
        known = (settings["k"], self.stages, self.search_type, reranker, options.order_key())
        is_named = isinstance(store, DocumentStore) and not callable(settings["filter"])
        search = RetrieverSearch(
            query=query,
            k=settings["k"],
            stages=lambda k: self._updates(query, {**settings, "k": k}),
            view=VIEW,
            options=options,
            engine=self.engine,
            prompt=self.prompt,
            metric=self._metric(),
            rerank=None
            if reranker is None
            else Rerank(self._reranking, self.num_candidates, partial(_compressed, compress)),
            source_history=history_of(store, *known, default=self._source_history),
            read_by_id=store.get if isinstance(store, DocumentStore) else None,
            question_key=f"{query}\n{sorted(settings.items())!r}" if is_named else None,
            annotate=_ranked,
        )
        return await search.run(on_event, overlap)

    def _metric(self) -> Metric | None:
        return getattr(self._searched(), "metric", None)

    def _searched(self) -> DocumentStore | StageSource:
        return self.store.store if isinstance(self.store, StagedFAISS) else self.store

    def _search_settings(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a search: the retriever's, those of ``search_kwargs``, and before them a call's.

        Raises:
            ConfigError: there are others than its ``search_type`` knows, or some that cannot work.
        """
        known = ("k", "filter", *_SETTINGS_OF[self.search_type])
        settings: dict[str, Any] = {"k": self.k, "filter": self.filter}
        for given in (self.search_kwargs, overrides):
            named = {"k" if name == "top_k" else name: value for name, value in given.items()}
            if unknown := named.keys() - set(known):
                raise ConfigError(
                    f"RAGCacheRetriever knows no {', '.join(sorted(unknown))}: a search of type {self.search_type!r} "
                    f"takes {', '.join(known)}"
                )
            settings |= {name: value for name, value in named.items() if value is not None}
        k = settings["k"]
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ConfigError(f"k is {k!r:.80}: give a whole number of documents, 0 or more")
        as_where(settings["filter"])
        _mmr(self.search_type, settings)
        threshold = settings.get("score_threshold")
        if self.search_type == "similarity_score_threshold" and not (
            isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0 <= threshold <= 1
        ):
            raise ConfigError(
                f"score_threshold is {threshold!r}: give search_kwargs={{'score_threshold': ...}}, a relevance from 0 "
                "to 1"
            )
        return settings

    def _updates(self, query: str, settings: Mapping[str, Any]) -> AsyncGenerator[RetrievalUpdate, None]:
        store, where = self._searched(), as_where(settings["filter"])
        if not isinstance(store, DocumentStore):
            setting = "a filter" if where is not None else f"search_type={self.search_type!r}"
            if where is not None or self.search_type != "similarity":
                raise ConfigError(
                    f"{setting} is given, but {type(store).__name__} is no store: let stages() itself do it"
                )
            return (
                as_source(store, stages=self.stages).stages(query, settings["k"]) if settings["k"] else empty_result()
            )
        if not settings["k"]:
            return empty_result()
        mmr = _mmr(self.search_type, settings)
        updates = or_nothing(store.search_staged(query, settings["k"], stages=self.stages, where=where, mmr=mmr))
        if (threshold := settings.get("score_threshold")) is None:
            return updates
        relevance = relevance_of(store)
        return filter_by_score(updates, lambda score: relevance(score) >= threshold)


def _ranked(found: Sequence[Document], arranged: Sequence[Document]) -> Sequence[Document]:
    """Return documents in another order, each with its place in the search's result."""
    ranks = {document.doc_id: rank for rank, document in enumerate(found, 1)}
    return [replace(d, metadata={**d.metadata, RANK_KEY: ranks[d.doc_id]}) for d in arranged]


def _mmr(search_type: SearchType, settings: Mapping[str, Any]) -> MMR | None:
    given = {name: settings[name] for name in _SETTINGS_OF["mmr"] if name in settings}
    return MMR(**given) if search_type == "mmr" else None


async def _compressed(compress: _Compress, documents: Sequence[Document]) -> Sequence[Document]:
    """Return what a compressor makes of documents: those that it leaves as they are, as they were."""
    given = {document.doc_id: document for document in documents}
    found = await compress([to_langchain(document) for document in documents])
    if not isinstance(found, list | tuple):
        raise SearchError(f"the compressor returned {found!r:.80}: return a list of documents")
    return [d if given.get(d.doc_id) != d else given[d.doc_id] for d in to_core(found)]
