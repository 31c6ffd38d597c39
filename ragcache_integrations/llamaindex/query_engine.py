"""The query engine: retrieve, lay the prompt out with the documents before the question, ask once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType

from ragcache_core.prompt import PromptLayout
from ragcache_integrations.llamaindex._requests import STATS_KEY
from ragcache_integrations.llamaindex.events import dispatcher
from ragcache_integrations.llamaindex.llm import RAGCacheLLM
from ragcache_integrations.llamaindex.nodes import shown_document

EMPTY_RESPONSE = "Empty Response"
"""LlamaIndex's own answer where nothing was retrieved; the LLM is not asked."""


class RAGCacheQueryEngine(BaseQueryEngine):
    """Answers from documents whose KV the engine keeps, with what the cache did in ``response.metadata["ragcache"]``.

    ::

        query_engine = RAGCacheQueryEngine(RAGCacheRetriever(store, engine), RAGCacheLLM(engine))
        response = query_engine.query("Who keeps the lighthouse of Zor?")
        print(response, response.metadata["ragcache"]["num_cached_tokens"])

    ``retriever`` is any LlamaIndex retriever. All documents go into one prompt in the order in which they were
    retrieved and post-processed, before the question, so that requests about the same documents share a prefix of
    tokens; there is no second, refining call. With ``streaming`` the answer is a stream, whose statistics are in
    ``metadata`` when it has ended, and whose ``response_gen`` cancels the request when it is closed. A
    ``QueryEngineTool`` wants the whole answer: leave ``streaming`` off there.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM,
        *,
        layout: PromptLayout | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager or llm.callback_manager)
        self._retriever = retriever
        self._llm = llm
        self._layout = layout or PromptLayout()
        self._node_postprocessors = tuple(node_postprocessors)
        self._streaming = streaming

    @property
    def retriever(self) -> BaseRetriever:
        """What finds the nodes."""
        return self._retriever

    @property
    def llm(self) -> LLM:
        """What answers."""
        return self._llm

    @property
    def layout(self) -> PromptLayout:
        """How the prompt is laid out."""
        return self._layout

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the retrieved nodes after the post-processors."""
        nodes = self._retriever.retrieve(query_bundle)
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the retrieved nodes after the post-processors."""
        nodes = await self._retriever.aretrieve(query_bundle)
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    @dispatcher.span
    def synthesize(
        self,
        query_bundle: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Return the answer from ``nodes``; ``additional_source_nodes`` are named as sources only.

        Raises:
            PromptError: the question is empty, or the documents do not fit the context window.
            EngineError: the engine could not answer.
        """
        query = _bundle(query_bundle)
        sources = _Sources(nodes, additional_source_nodes)
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        with self.callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: query.query_str}
        ) as event:
            if not nodes:
                response = StreamingResponse(_once(EMPTY_RESPONSE)) if self._streaming else Response(EMPTY_RESPONSE)
            elif self._streaming:
                answers = self._llm.stream_chat(self._messages(query, nodes))
                response = StreamingResponse(sources.tokens(answers), sources.nodes, sources.metadata)
            else:
                answer = sources.seen(self._llm.chat(self._messages(query, nodes)))
                response = Response(answer.message.content or "", sources.nodes, sources.metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    async def asynthesize(
        self,
        query_bundle: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Return the answer from ``nodes``, as :meth:`synthesize` does."""
        query = _bundle(query_bundle)
        sources = _Sources(nodes, additional_source_nodes)
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        with self.callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: query.query_str}
        ) as event:
            if not nodes:
                response = (
                    AsyncStreamingResponse(_aonce(EMPTY_RESPONSE)) if self._streaming else Response(EMPTY_RESPONSE)
                )
            elif self._streaming:
                answers = await self._llm.astream_chat(self._messages(query, nodes))
                response = AsyncStreamingResponse(sources.atokens(answers), sources.nodes, sources.metadata)
            else:
                answer = sources.seen(await self._llm.achat(self._messages(query, nodes)))
                response = Response(answer.message.content or "", sources.nodes, sources.metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            response = self.synthesize(query_bundle, self.retrieve(query_bundle))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            response = await self.asynthesize(query_bundle, await self.aretrieve(query_bundle))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    def _messages(self, query: QueryBundle, nodes: Sequence[NodeWithScore]) -> list[ChatMessage]:
        documents = [shown_document(n.node) for n in nodes]
        if isinstance(self._llm, RAGCacheLLM):
            self._llm.engine.remember_documents(documents, shown=self._layout.document_text)
        return [ChatMessage(**message) for message in self._layout.messages(documents, query.query_str)]


class _Sources:
    """The nodes of an answer and its metadata: the metadata of every node, and the statistics when they are known."""

    def __init__(self, nodes: Sequence[NodeWithScore], additional: Sequence[NodeWithScore] | None) -> None:
        self.nodes = [*nodes, *(additional or ())]
        self.metadata: dict[str, Any] = {n.node.node_id: n.node.metadata for n in self.nodes}

    def seen(self, answer: ChatResponse) -> ChatResponse:
        if (stats := answer.additional_kwargs.get(STATS_KEY)) is not None:
            self.metadata[STATS_KEY] = stats
        return answer

    def tokens(self, answers: ChatResponseGen) -> Generator[str, None, None]:
        try:
            for answer in answers:
                if delta := self.seen(answer).delta:
                    yield delta
        finally:
            answers.close()

    async def atokens(self, answers: ChatResponseAsyncGen) -> AsyncGenerator[str, None]:
        try:
            async for answer in answers:
                if delta := self.seen(answer).delta:
                    yield delta
        finally:
            await answers.aclose()


def _bundle(query: QueryType) -> QueryBundle:
    return QueryBundle(query) if isinstance(query, str) else query


def _once(text: str) -> Generator[str, None, None]:
    yield text


async def _aonce(text: str) -> AsyncGenerator[str, None]:
    yield text
