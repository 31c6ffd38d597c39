"""The query engine: puts documents before the question, and overlaps search and generation."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.callbacks.base import EventContext
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.core.settings import Settings
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.stages import check_timeout
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.log import logger_of
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval.threads import in_thread, run_blocking
from ragcache_integrations.llamaindex.events import dispatcher, publish
from ragcache_integrations.llamaindex.llm import RAGCacheLLM
from ragcache_integrations.llamaindex.nodes import shown_documents
from ragcache_integrations.llamaindex.retriever import RAGCacheRetriever
from ragcache_integrations.rag.call import ChunkReuseSetting, check_option
from ragcache_integrations.rag.session import QuestionSession

_Response = TypeVar("_Response", bound=RESPONSE_TYPE)

logger = logger_of(__name__)

EMPTY_RESPONSE = "Empty Response"
"""LlamaIndex's own answer without retrieved nodes; the LLM is not called."""


class RAGCacheQueryEngine(BaseQueryEngine):
    """Answers from documents whose KV the engine caches, with statistics in ``response.metadata["ragcache"]``.

    ::

        query_engine = RAGCacheQueryEngine(RAGCacheRetriever(store, engine), RAGCacheLLM(engine))
        response = query_engine.query("Who keeps the lighthouse of Zor?")
        print(response, response.metadata["ragcache"]["num_cached_tokens"])

    All documents go into one prompt in the order in which they were retrieved and post-processed, before the question,
    so that requests about the same documents share a prefix of tokens; there is no second, refining call. With
    ``streaming`` the answer is a stream, whose statistics are in ``metadata`` when it has ended, and whose
    ``response_gen`` cancels the request when it is closed. A ``QueryEngineTool`` needs the whole answer: leave
    ``streaming`` off there.

    While a ``query`` or ``aquery`` searches, the engine already answers from the candidates of each stage
    (speculation). If these are the final documents, the LLM's own request adopts that answer. Otherwise the speculative
    request is cancelled, and the request is sent. No token is shown before the documents are final, and the answer is
    the same. ``response.metadata["ragcache"]["pipeline"]`` has the search statistics. With ``retrieve`` and
    ``synthesize`` in two steps, only the beginning of the prompt is prefilled.

    Args:
        retriever: a :class:`RAGCacheRetriever`. Any other one works too (``query`` calls it in another thread), but its
            search has one stage, so nothing overlaps.
        llm: a :class:`RAGCacheLLM`, by default ``Settings.llm``; another one answers without speculation.
        layout: how the prompt is laid out. Its ``relevance_hint`` names the documents by their scores.
        node_postprocessors: filter and change the nodes that the LLM reads.
        streaming: whether the answer is a stream.
        speculate_postprocessed: whether the candidates of each stage go through the post-processors too, in another
            thread, and publish their events each time. They must depend on their input only. Without it, queries with
            post-processors have no speculation, as candidates may be filtered out.
        search_timeout_s: maximum seconds of a search; by default the retriever's own, 60 for another retriever.
        chunk_reuse: chunk reuse: whether, and with which settings; approximate. ``None`` leaves it to the LLM.
        ttft_slo: target time to first token, in seconds from asking the LLM; see :class:`RAGCacheLLM`.

    Raises:
        ConfigError: ``retriever`` or ``llm`` is not one; ``search_timeout_s`` is not above 0; ``chunk_reuse`` or
            ``ttft_slo`` is invalid, or the LLM does not support it.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        *,
        layout: PromptLayout | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        streaming: bool = False,
        speculate_postprocessed: bool = False,
        search_timeout_s: float | None = None,
        chunk_reuse: ChunkReuseSetting = None,
        ttft_slo: float | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        llm = Settings.llm if llm is None else llm
        check_timeout(search_timeout_s)
        given: dict[str, Any] = {"chunk_reuse": chunk_reuse, "ttft_slo": ttft_slo}
        settings = {name: check_option(name, value) for name, value in given.items() if value is not None}
        if settings and not isinstance(llm, RAGCacheLLM):
            name, value = next(iter(settings.items()))
            raise ConfigError(f"{name} is {value!r:.80}, which {type(llm).__name__} cannot do: leave it out")
        for name, part, kind in (("retriever", retriever, BaseRetriever), ("llm", llm, LLM)):
            if not isinstance(part, kind):
                raise ConfigError(f"{name} is {quoted(part)}: pass a {kind.__name__} of LlamaIndex")
        super().__init__(callback_manager=callback_manager or llm.callback_manager)
        self._retriever = retriever
        self._llm = llm
        self._layout = layout or PromptLayout()
        self._node_postprocessors = tuple(node_postprocessors)
        self._streaming = streaming
        self._speculate_postprocessed = speculate_postprocessed
        self._search_timeout_s = search_timeout_s
        self._settings = settings
        self._has_warned = False
        self._bound: BoundPrompt | None = None

    @classmethod
    def from_args(cls, retriever: BaseRetriever, llm: LLM | None = None, **settings: Any) -> RAGCacheQueryEngine:
        """Return a query engine; the arguments are those of the class.

        Of ``RetrieverQueryEngine.from_args`` those are refused that make another prompt than ``layout``.

        Raises:
            ConfigError: an argument that there is not, and as of the class.
        """
        known = inspect.signature(cls).parameters
        if unknown := sorted(settings.keys() - known.keys()):
            raise ConfigError(
                f"RAGCacheQueryEngine knows no {unknown[0]!r}, only {', '.join(known)}: all documents go into one "
                "prompt, laid out by layout=PromptLayout(...)"
            )
        return cls(retriever, llm, **settings)

    @property
    def retriever(self) -> BaseRetriever:
        """The retriever."""
        return self._retriever

    @property
    def llm(self) -> LLM:
        """The LLM."""
        return self._llm

    @property
    def layout(self) -> PromptLayout:
        """The prompt layout."""
        return self._layout

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the retrieved nodes after the post-processors."""
        return self._found(self._new_query(query_bundle))

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the retrieved nodes after the post-processors."""
        return await self._afound(self._new_query(query_bundle))

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
        sources = _Sources(nodes, additional_source_nodes)
        with self._synthesis(query_bundle, nodes) as (messages, ended):
            if not nodes:
                return ended(StreamingResponse(_once(EMPTY_RESPONSE)) if self._streaming else Response(EMPTY_RESPONSE))
            if not self._streaming:
                return ended(sources.whole(self._llm.chat(messages, **self._settings)))
            answers = self._llm.stream_chat(messages, **self._settings)
            return ended(StreamingResponse(sources.tokens(answers), sources.nodes, sources.metadata))

    @dispatcher.span
    async def asynthesize(
        self,
        query_bundle: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Return the answer from ``nodes``, as :meth:`synthesize` does."""
        sources = _Sources(nodes, additional_source_nodes)
        with self._synthesis(query_bundle, nodes) as (messages, ended):
            if not nodes:
                empty = AsyncStreamingResponse(_aonce(EMPTY_RESPONSE)) if self._streaming else Response(EMPTY_RESPONSE)
                return ended(empty)
            if not self._streaming:
                return ended(sources.whole(await self._llm.achat(messages, **self._settings)))
            answers = await self._llm.astream_chat(messages, **self._settings)
            return ended(AsyncStreamingResponse(sources.atokens(answers), sources.nodes, sources.metadata))

    @contextmanager
    def _synthesis(
        self, query_bundle: QueryType, nodes: Sequence[NodeWithScore]
    ) -> Iterator[tuple[list[ChatMessage], Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]]:
        """Publish the start of a synthesis; yield its messages, and a function that publishes its response."""
        query = QueryBundle(query_bundle) if isinstance(query_bundle, str) else query_bundle

        def ended(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
            event.on_end(payload={EventPayload.RESPONSE: response})
            dispatcher.event(SynthesizeEndEvent(query=query, response=response))
            return response

        dispatcher.event(SynthesizeStartEvent(query=query))
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query.query_str}
        with self.callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
            yield self._messages(query, nodes) if nodes else [], ended

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._query_event(query_bundle) as event, self._make_query(query_bundle) as query_call:
            nodes = self._found(query_call)
            with query_call.model_call():
                response = self.synthesize(query_bundle, nodes)
            query_call.reported(response)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._query_event(query_bundle) as event, self._make_query(query_bundle) as query_call:
            nodes = await self._afound(query_call)
            with query_call.model_call():
                response = await self.asynthesize(query_bundle, nodes)
            await query_call.areported(response)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    def _query_event(self, query: QueryBundle) -> AbstractContextManager[EventContext]:
        return self.callback_manager.event(CBEventType.QUERY, payload={EventPayload.QUERY_STR: query.query_str})

    # Searching, while the engine answers

    def _make_query(self, query: QueryBundle) -> _Query:
        llm = self._llm
        if not isinstance(llm, RAGCacheLLM):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "RC-MODEL-FOREIGN: %s is no RAGCacheLLM: it gets its request when the search has ended",
                    type(llm).__name__,
                )
            return self._new_query(query)
        if self._node_postprocessors and not self._speculate_postprocessed:
            return self._new_query(query)

        def start_speculation(nodes: list[NodeWithScore]) -> Callable[[], Speculation] | None:
            nodes = self._postprocessed(nodes, query)
            if not nodes:
                return None
            return llm.prepare(self._messages(query, nodes), is_streamed=self._streaming, **self._settings)

        return _Query(
            query, llm.engine, start_speculation, timeout_s=self._search_timeout_s, prompt=self._prompt_of(llm.engine)
        )

    def _new_query(self, query: QueryBundle) -> _Query:
        """Return the query for a search that the retriever overlaps by itself."""
        why = "what is read is known after the post-processors only, see speculate_postprocessed"
        return _Query(
            query,
            skipped_because=why if self._node_postprocessors else None,
            timeout_s=self._search_timeout_s,
            prompt=self._prompt_of(self._llm.engine) if isinstance(self._llm, RAGCacheLLM) else None,
        )

    def _prompt_of(self, engine: EngineClient) -> Callable[[], BoundPrompt]:
        """Return a function that makes the prompt bound to ``engine`` at its first call."""

        def bound() -> BoundPrompt:
            if self._bound is None:
                self._bound = engine.bind_prompt(self._layout, is_default=False, is_prefilled=False)
            return self._bound

        return bound

    def _found(self, query_call: _Query) -> list[NodeWithScore]:
        query, retriever = query_call.query, self._retriever
        if isinstance(retriever, RAGCacheRetriever):
            nodes = retriever.overlapped(query_call.overlap).retrieve(query)
        else:
            nodes = run_blocking(lambda: query_call.nodes_at_once(lambda: in_thread(lambda: retriever.retrieve(query))))
        return self._postprocessed(nodes, query)

    async def _afound(self, query_call: _Query) -> list[NodeWithScore]:
        query, retriever = query_call.query, self._retriever
        if isinstance(retriever, RAGCacheRetriever):
            nodes = await retriever.overlapped(query_call.overlap).aretrieve(query)
        else:
            nodes = await query_call.nodes_at_once(lambda: retriever.aretrieve(query))
        return await self._apostprocessed(nodes, query)

    def _postprocessed(self, nodes: list[NodeWithScore], query: QueryBundle) -> list[NodeWithScore]:
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query)
        return nodes

    async def _apostprocessed(self, nodes: list[NodeWithScore], query: QueryBundle) -> list[NodeWithScore]:
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query)
        return nodes

    def _messages(self, query: QueryBundle, nodes: Sequence[NodeWithScore]) -> list[ChatMessage]:
        documents = shown_documents(nodes)
        if isinstance(self._llm, RAGCacheLLM):
            self._llm.engine.remember_documents(documents, shown=self._layout.document_text, query=query.query_str)
        scores = [n.score for n in nodes if n.score is not None]
        relevance = [documents[i] for i in sorted(range(len(scores)), key=lambda i: -scores[i])]
        messages = self._layout.messages(
            documents, query.query_str, relevance=relevance if len(scores) == len(nodes) else None
        )
        return [ChatMessage(**message) for message in messages]


class _Query(QuestionSession[NodeWithScore], AbstractContextManager["_Query"]):
    """One query: its speculation, and the result of its search.

    Leaving it ends a speculation that no request took over, unless a stream does that at its end.
    """

    def __init__(self, query: QueryBundle, *engine: Any, **how: Any) -> None:
        """Take ``query``, the question, and the arguments of the session."""
        super().__init__(query.query_str, *engine, **how)
        self.query = query
        self._ends_with_stream = False
        self._span_id = active_span_id.get()

    async def nodes_at_once(self, find: Callable[[], Awaitable[list[NodeWithScore]]]) -> list[NodeWithScore]:
        """Return the nodes of another framework's retriever."""
        return await self.find_at_once(
            find, shown_documents, partial(publish, query=self.question, span_id=active_span_id.get())
        )

    def reported(self, response: _Response) -> _Response:
        """Return the response with the search's report; a stream completes it, and ends the speculation, at its end."""
        metadata = self._report(response)
        if isinstance(response, StreamingResponse):
            tokens = self._ended_with(response.response_gen, metadata)
            next(tokens)
            response.response_gen, self._ends_with_stream = tokens, True
        return response

    async def areported(self, response: _Response) -> _Response:
        """Return the response with the search's report; a stream completes it, and ends the speculation, at its end."""
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
            response.metadata.update(self.with_report(response.metadata))
        return response.metadata

    def _settle(self, metadata: dict[str, Any]) -> None:
        if (event := self.settle()) is not None:
            publish(event, query=self.question, span_id=self._span_id)
        metadata.update(self.with_report(metadata))

    def __exit__(self, *_: object) -> None:
        if not self._ends_with_stream:
            self.close()

    # The first token is none: a generator that was never begun would not notice that it is closed.

    def _ended_with(self, tokens: Generator[str, None, None], metadata: dict[str, Any]) -> Generator[str, None, None]:
        try:
            yield ""
            with closing(self.stream_parts(tokens)) as parts:
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
            async with aclosing(self.astream_parts(tokens)) as parts:
                async for token in parts:
                    self.close()
                    yield token
        finally:
            await tokens.aclose()
            self.close()
            self._settle(metadata)


class _Sources:
    """The nodes of an answer, and their metadata."""

    def __init__(self, nodes: Sequence[NodeWithScore], additional: Sequence[NodeWithScore] | None) -> None:
        self.nodes = [*nodes, *(additional or ())]
        self.metadata: dict[str, Any] = {n.node.node_id: n.node.metadata for n in self.nodes}

    def whole(self, answer: ChatResponse) -> Response:
        return Response(answer.message.content or "", self.nodes, self.metadata)

    def tokens(self, answers: ChatResponseGen) -> Generator[str, None, None]:
        try:
            for answer in answers:
                if delta := answer.delta:
                    yield delta
        finally:
            answers.close()

    async def atokens(self, answers: ChatResponseAsyncGen) -> AsyncGenerator[str, None]:
        try:
            async for answer in answers:
                if delta := answer.delta:
                    yield delta
        finally:
            await answers.aclose()


def _once(text: str) -> Generator[str, None, None]:
    yield text


async def _aonce(text: str) -> AsyncGenerator[str, None]:
    yield text
