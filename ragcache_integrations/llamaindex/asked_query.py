"""One query to :class:`~ragcache_integrations.llamaindex.query_engine.RAGCacheQueryEngine` on its way to an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import Engine
from ragcache_core.client.pipeline import PipelineResult, run_pipeline
from ragcache_core.client.stages import DEFAULT_TIMEOUT_S
from ragcache_core.retrieval.sources import one_stage
from ragcache_core.types import DocId, Document
from ragcache_integrations.llamaindex.events import publish
from ragcache_integrations.llamaindex.nodes import shown_document
from ragcache_integrations.llamaindex.retriever import AskAhead, SearchOverlap

PIPELINE_KEY = "ragcache_pipeline"
"""Key of ``response.metadata`` for the report of the search, :meth:`PipelineReport.to_dict()
<ragcache_core.stats.PipelineReport.to_dict>`."""

_Response = TypeVar("_Response", bound=RESPONSE_TYPE)


class AskedQuery(AbstractContextManager["AskedQuery"]):
    """One query: who asks ahead for its answer, and what the search for it came to.

    Leaving it ends a speculation that no request took over, unless a stream does that at its end.
    """

    def __init__(
        self,
        query: QueryBundle,
        engine: Engine | None = None,
        ask_ahead: AskAhead | None = None,
        *,
        skipped_because: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.query = query
        self.overlap = SearchOverlap(engine, ask_ahead, self._take, skipped_because, timeout_s)
        self._result: PipelineResult | None = None
        self._ends_with_stream = False

    def _take(self, result: PipelineResult) -> None:
        self._result = result

    async def search_at_once(self, find: Callable[[], Awaitable[list[NodeWithScore]]]) -> list[NodeWithScore]:
        """Return the nodes of a retriever of another make: its search is one stage, which hides nothing."""
        originals: dict[DocId, NodeWithScore] = {}

        async def found() -> list[Document]:
            nodes = await find()
            originals.update((n.node.node_id, n) for n in reversed(nodes))
            return [shown_document(n.node) for n in nodes]

        on_event = partial(publish, query=self.query.query_str, span_id=active_span_id.get())
        timeout_s = self.overlap.timeout_s or DEFAULT_TIMEOUT_S
        result = await run_pipeline(one_stage(found), None, None, timeout_s=timeout_s, on_event=on_event)
        why = self.overlap.skipped_because or "the retriever has one stage only"
        self._take(replace(result, report=replace(result.report, skipped_because=why)))
        return [originals[document.doc_id] for document in result.documents]

    def reported(self, response: _Response) -> _Response:
        """Return the response with the report of the search; a stream ends the speculation when it ends."""
        if self._result is not None:
            if response.metadata is None:
                response.metadata = {}
            response.metadata[PIPELINE_KEY] = self._result.report.to_dict()
        if isinstance(response, StreamingResponse):
            tokens = self._ended_with(response.response_gen)
            next(tokens)
            response.response_gen, self._ends_with_stream = tokens, True
        return response

    async def areported(self, response: _Response) -> _Response:
        """Return the response with the report of the search; a stream ends the speculation when it ends."""
        if isinstance(response, AsyncStreamingResponse):
            tokens = self._aended_with(response.response_gen)
            await anext(tokens)
            response.response_gen, self._ends_with_stream = tokens, True
        return self.reported(response)

    def __exit__(self, *_: object) -> None:
        if not self._ends_with_stream:
            self._close()

    def _close(self) -> None:
        if self._result is not None and self._result.speculation is not None:
            self._result.speculation.cancel()

    # The first token is none: a generator that was never begun would not notice that it is closed.

    def _ended_with(self, tokens: Generator[str, None, None]) -> Generator[str, None, None]:
        try:
            yield ""
            yield from tokens
        finally:
            tokens.close()
            self._close()

    async def _aended_with(self, tokens: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            yield ""
            async for token in tokens:
                yield token
        finally:
            await tokens.aclose()
            self._close()
