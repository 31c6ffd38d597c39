"""One overlapped, staged search of a retriever, for every framework."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ragcache_core.client import EngineClient
from ragcache_core.client.ordering.document_order import Swapping, in_order
from ragcache_core.client.pipeline.histories import HISTORIES, SourceHistory
from ragcache_core.client.pipeline.run import PipelineEvent, run_pipeline
from ragcache_core.client.pipeline.session import SearchOverlap
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.ordering import DocumentOrder
from ragcache_core.retrieval.base import Metric
from ragcache_core.retrieval.sources import NUM_CANDIDATES, Reranking
from ragcache_core.swaps import CANDIDATES_PER_DOCUMENT
from ragcache_core.types import DocId, Document, RetrievalUpdate

Shown = TypeVar("Shown")
"""A framework's type of retrieved documents."""

StartSpeculation = Callable[[list[Shown]], Callable[[], Speculation] | None]
"""Returns a callable that sends the speculative request for a stage's documents; ``None`` if none can be sent."""

Listener = Callable[[PipelineEvent], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class DocumentView(Generic[Shown]):
    """Converts a search's documents to a framework's, and to the text that the model reads."""

    show: Callable[[Sequence[Document]], list[Shown]]
    read: Callable[[Sequence[Shown]], list[Document]]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Retriever settings that all frameworks share; see the retrievers."""

    document_order: DocumentOrder
    keep_first: bool
    max_score_loss: float | None
    timeout_s: float | None
    speculate: bool

    def order_key(self) -> tuple[object, ...]:
        """Return the settings on which the stages' stability depends."""
        return (self.document_order, self.keep_first, self.max_score_loss)


@dataclass(frozen=True, slots=True)
class Rerank:
    """A reranker as the last stage of a search, and its number of candidates."""

    reranking: Reranking
    num_candidates: int | None
    rerank: Callable[[Sequence[Document]], Awaitable[Sequence[Document]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverSearch(Generic[Shown]):
    """One search for a question.

    Attributes:
        query: the question.
        k: the number of documents to return.
        stages: returns the stages of a search for a number of documents.
        view: the framework's documents.
        options: the retriever's settings.
        engine: the retriever's engine, if it has one.
        prompt: the retriever's prompt; by default the one that the engine knows.
        metric: what the scores of the search are, if the store tells it.
        rerank: the last stage, if there is a reranker.
        learnt: what earlier searches of the same store with the same settings taught.
        read_by_id: with ``question_key``: returns stored documents, for what the same question found last.
        question_key: all that decides what is found; ``None`` if that has no name.
        annotate: changes documents that an order has moved, given as found and as arranged.
    """

    query: str
    k: int
    stages: Callable[[int], AsyncGenerator[RetrievalUpdate, None]]
    view: DocumentView[Shown]
    options: SearchOptions
    engine: EngineClient | None
    prompt: BoundPrompt | None
    metric: Metric | None
    rerank: Rerank | None
    source_history: SourceHistory
    read_by_id: Callable[[Sequence[DocId]], Sequence[Document]] | None = None
    question_key: Hashable = None
    annotate: Callable[[Sequence[Document], Sequence[Document]], Sequence[Document]] | None = None

    async def run(
        self, on_event: Listener, overlap: SearchOverlap[StartSpeculation[Shown]] | None = None
    ) -> list[Shown]:
        """Return the documents in prompt order, and record them for the engines.

        Args:
            on_event: called with each stage and each speculation.
            overlap: what the engine does meanwhile, in place of prefilling the beginning of the prompt.

        Raises:
            SearchTimeoutError: the search took too long.
            SearchError: the search ended without final documents.
        """
        engine, options, timeout_s = self.engine, self.options, self.options.timeout_s
        prompt = self._known_prompt
        start_speculation = None if engine is None else self._prefill(engine)
        if overlap is not None:
            prompt = overlap.prompt or prompt
            timeout_s = timeout_s if overlap.timeout_s is None else overlap.timeout_s
            if overlap.ahead is not None:
                engine, start_speculation = overlap.engine, overlap.ahead
            elif overlap.skipped_because is not None:
                start_speculation = None
        updates = self._updates(engine, prompt)
        if self.question_key is not None and self.read_by_id is not None:
            updates = self.source_history.recent.stages(updates, self.question_key, self.read_by_id)
        is_arranged = options.document_order != "retrieval"
        result = await run_pipeline(
            updates,
            None if engine is None else engine.integration.speculation,
            _Ahead(self.view, start_speculation) if start_speculation is not None and options.speculate else None,
            timeout_s=timeout_s,
            on_event=on_event,
            arrange=(lambda documents: self._arranged(engine, prompt, documents)) if is_arranged else None,
            history=self.source_history.history,
            k=self.k,
        )
        if overlap is not None:
            why = overlap.skipped_because or result.report.skipped_because
            overlap.on_result(replace(result, report=replace(result.report, skipped_because=why)))
        shown = self.view.show(result.documents)
        for informed in filter(None, {self.engine, engine}):
            informed.remember_documents(self.view.read(shown), query=self.query)
        return shown

    def _known_prompt(self) -> BoundPrompt | None:
        if self.prompt is not None or self.engine is None:
            return self.prompt
        return self.engine.integration.prompts.prompt_for(self.query)

    def _updates(
        self, engine: EngineClient | None, prompt: Callable[[], BoundPrompt | None]
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        options, rerank = self.options, self.rerank
        if rerank is not None and self.k:
            num_candidates = max(self.k, rerank.num_candidates or NUM_CANDIDATES)
            return rerank.reranking.stages(self.stages(num_candidates), rerank.rerank)
        if options.max_score_loss is None or engine is None:
            return self.stages(self.k)
        swapping = Swapping(
            engine.integration.ordering,
            options.max_score_loss,
            options.document_order,
            options.keep_first,
            self.metric,
            lambda documents: self._static_prefix(prompt, documents),
        )
        return swapping.stages(self.stages(self.k * CANDIDATES_PER_DOCUMENT), self.k)

    def _arranged(
        self, engine: EngineClient | None, prompt: Callable[[], BoundPrompt | None], documents: Sequence[Document]
    ) -> Sequence[Document]:
        options = self.options
        prefix = self._static_prefix(prompt, documents) if options.document_order == "cache_aware" else None
        ordering = None if engine is None else engine.integration.ordering
        arranged = in_order(ordering, documents, options.document_order, keep_first=options.keep_first, prefix=prefix)
        if self.annotate is None or list(arranged) == list(documents):
            return arranged
        return self.annotate(documents, arranged)

    def _static_prefix(self, prompt: Callable[[], BoundPrompt | None], documents: Sequence[Document]) -> bytes | None:
        """Return a digest of the tokens before the documents; ``None`` if no prompt is known."""
        if (bound := prompt()) is None:
            return None
        shown = self.view.show(documents)
        return bound.static_prefix(shown, self.view.read(shown))

    def _prefill(self, engine: EngineClient) -> StartSpeculation[Shown]:
        def ask(shown: list[Shown]) -> Callable[[], Speculation] | None:
            if (bound := self._known_prompt()) is None:
                return None
            return engine.integration.speculation.prepare_prefill(bound, shown, self.view.read(shown))

        return ask


@dataclass(frozen=True, slots=True)
class _Ahead(Generic[Shown]):
    """Makes speculative requests from a stage's documents, as the framework's."""

    view: DocumentView[Shown]
    start_speculation: StartSpeculation[Shown]

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation] | None:
        return self.start_speculation(self.view.show(documents))


def history_of(source: object, *settings: object, default: SourceHistory) -> SourceHistory:
    """Return the history of ``source`` with these settings; ``default`` if it has no name."""
    return HISTORIES.of(source, settings, default=default)
