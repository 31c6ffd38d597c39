"""One query to :class:`~ragcache_integrations.llamaindex.query_engine.RAGCacheQueryEngine` on its way to an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, aclosing, closing
from functools import partial
from typing import Any, TypeVar

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.session import SearchOverlap, SearchSession
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.stats import PIPELINE_KEY, STATS_KEY
from ragcache_integrations.llamaindex.events import publish
from ragcache_integrations.llamaindex.nodes import shown_document
from ragcache_integrations.llamaindex.retriever import AskAhead

_Response = TypeVar("_Response", bound=RESPONSE_TYPE)


class AskedQuery(SearchSession, AbstractContextManager["AskedQuery"]):
    """One query: who asks ahead for its answer, and what the search for it came to.

    Leaving it ends a speculation that no request took over, unless a stream does that at its end.
    """

    def __init__(
        self,
        query: QueryBundle,
        engine: EngineClient | None = None,
        ask_ahead: AskAhead | None = None,
        *,
        skipped_because: str | None = None,
        timeout_s: float | None = None,
        prompt: Callable[[], BoundPrompt | None] | None = None,
    ) -> None:
        super().__init__()
        self.query = query
        ahead: AskAhead | None = None if ask_ahead is None else partial(self._ask_ahead, ask_ahead)
        self.overlap = SearchOverlap(engine, ahead, self.take, timeout_s, prompt, skipped_because)
        self._ends_with_stream = False
        self._span_id = active_span_id.get()

    def _ask_ahead(self, ask: AskAhead, nodes: list[NodeWithScore]) -> Callable[[], Speculation] | None:
        with self.asking():
            return ask(nodes)

    async def nodes_at_once(self, find: Callable[[], Awaitable[list[NodeWithScore]]]) -> list[NodeWithScore]:
        """Return the nodes of a retriever of another make."""
        return await self.search_at_once(
            find,
            lambda nodes: [shown_document(n.node) for n in nodes],
            partial(publish, query=self.query.query_str, span_id=active_span_id.get()),
            timeout_s=self.overlap.timeout_s,
            skipped_because=self.overlap.skipped_because,
        )

    def reported(self, response: _Response) -> _Response:
        """Return the response with the report of the search; a stream settles it, and the speculation, when it ends."""
        metadata = self._report(response)
        if isinstance(response, StreamingResponse):
            tokens = self._ended_with(response.response_gen, metadata)
            next(tokens)
            response.response_gen, self._ends_with_stream = tokens, True
        return response

    async def areported(self, response: _Response) -> _Response:
        """Return the response with the report of the search; a stream settles it, and the speculation, when it ends."""
        metadata = self._report(response)
        if isinstance(response, AsyncStreamingResponse):
            tokens = self._aended_with(response.response_gen, metadata)
            await anext(tokens)
            response.response_gen, self._ends_with_stream = tokens, True
        return response

    def _report(self, response: RESPONSE_TYPE) -> dict[str, Any]:
        """Put the report into a response's metadata, and return these: its stream must not hold the response."""
        if response.metadata is None:
            response.metadata = {}
        if not isinstance(response, StreamingResponse | AsyncStreamingResponse):  # else it has only begun
            self._settle(response.metadata)
        else:
            self._put_report(response.metadata)
        return response.metadata

    def _settle(self, metadata: dict[str, Any]) -> None:
        if (event := self.settle()) is not None:
            publish(event, query=self.query.query_str, span_id=self._span_id)
        self._put_report(metadata)

    def _put_report(self, metadata: dict[str, Any]) -> None:
        if (report := self.pipeline_report()) is not None:
            metadata[STATS_KEY] = {**metadata.get(STATS_KEY, {}), PIPELINE_KEY: report}

    def __exit__(self, *_: object) -> None:
        if not self._ends_with_stream:
            self.close()

    # The first token is none: a generator that was never begun would not notice that it is closed.

    def _ended_with(self, tokens: Generator[str, None, None], metadata: dict[str, Any]) -> Generator[str, None, None]:
        try:
            yield ""
            with closing(self.asked_parts(tokens)) as parts:
                for token in parts:
                    self.close()  # what the request did not take over by now would only run beside it
                    yield token
        finally:
            tokens.close()
            self.close()
            self._settle(metadata)

    async def _aended_with(
        self, tokens: AsyncGenerator[str, None], metadata: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        try:
            yield ""
            async with aclosing(self.aasked_parts(tokens)) as parts:
                async for token in parts:
                    self.close()
                    yield token
        finally:
            await tokens.aclose()
            self.close()
            self._settle(metadata)
