"""LangChain and LlamaIndex behind one interface: a model, a retriever, and the pair that answers while it searches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, Callbacks
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.documents import Document as LangChainDocument
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers.base import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from pydantic import ConfigDict, Field

from ragcache_core.client import Engine
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.stats.cache_summary import CacheSummary
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from ragcache_integrations import langchain, llamaindex
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage
from tests.support.waiting import until

STATIC = PromptLayout().static_prefix
TIMEOUT_S = 20.0
"""A search of a test that has lost its way ends."""

Prompt = str | Sequence[tuple[str, str]]
"""A question, or the messages of a chat as ``(role, text)``."""


@dataclass(frozen=True)
class Answer:
    """An answer's text, and what ``"ragcache"`` of its metadata says."""

    text: str
    stats: Mapping[str, Any]


@dataclass(frozen=True)
class SearchEvent:
    """A stage, or a speculation, as a framework's event tells of it."""

    kind: str
    stage: int
    doc_ids: tuple[str, ...]
    query: str
    scores: tuple[float, ...] = ()
    swaps: tuple[tuple[str, str], ...] = ()
    is_final: bool = False
    overlapped_search_s: float | None = None
    search_s: float = 0.0

    @property
    def brief(self) -> tuple[object, ...]:
        return (self.kind, self.stage, *self.doc_ids)


class _Framework:
    """What is the same for both. ``events`` holds what was published since the last ``restart``."""

    asks: Mapping[str, Callable[..., Awaitable[Answer]]]
    """Every way to ask a model."""
    answers: Mapping[str, Callable[..., Awaitable[Answer]]]
    """Every way to ask a pair of retriever and model, the plainest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[SearchEvent] = []

    def over(self, *stages: Stage, is_endless: bool = False, **settings: Any) -> Any:
        """Return a pair over a scripted search."""
        retriever = self.retriever(ScriptedSource(stages, is_endless))  # type: ignore[attr-defined]  # of the framework
        return self.pair(retriever, **settings)  # type: ignore[attr-defined]

    async def answer(self, pair: Any, way: str = "", question: str = QUESTION) -> Answer:
        """Ask a pair in one of ``answers``."""
        return await self.answers[way or next(iter(self.answers))](pair, question)


# LangChain


class _Recorder(BaseCallbackHandler):
    def __init__(self, events: list[SearchEvent]) -> None:
        self.events = events
        self.stats: Mapping[str, Any] = {}

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        common = {"stage": data["stage"], "doc_ids": tuple(data["doc_ids"]), "query": data["query"]}
        if name == "ragcache.candidates":
            swaps = tuple((swap["doc_out"], swap["doc_in"]) for swap in data["swaps"])
            self.events.append(
                SearchEvent("stage", **common, scores=tuple(data["scores"]), swaps=swaps, is_final=data["is_final"])
            )
        else:
            times = {"overlapped_search_s": data["overlapped_search_s"], "search_s": data["search_s"]}
            self.events.append(SearchEvent(data["event"], **common, **times))

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        message = getattr(response.generations[0][0], "message", None)
        self.stats = getattr(message, "response_metadata", {}).get("ragcache") or self.stats

    def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
        if isinstance(outputs, AIMessage):
            self.stats = outputs.response_metadata.get("ragcache") or self.stats


def _text_of(chunks: Sequence[Any]) -> str:
    return "".join(chunk if isinstance(chunk, str) else chunk.text for chunk in chunks)


async def _invoke(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of([await asyncio.to_thread(run.invoke, given, config)])


async def _ainvoke(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of([await run.ainvoke(given, config)])


async def _batch(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of(await asyncio.to_thread(run.batch, [given], config))


async def _abatch(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of(await run.abatch([given], config))


async def _stream(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of(await asyncio.to_thread(lambda: list(run.stream(given, config))))


async def _astream(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    return _text_of([chunk async for chunk in run.astream(given, config)])


async def _astream_events(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    events: Any = run.astream_events(given, config, version="v2")
    return _text_of([e["data"]["chunk"] async for e in events if e["event"] == "on_chat_model_stream"])


async def _invoke_under_astream_events(run: Runnable[Any, Any], given: Any, config: Any) -> str:
    """LangChain makes the model stream where a handler wants its tokens, also if it was only invoked."""

    async def call(value: Any) -> Any:
        return await run.ainvoke(value)

    return await _astream_events(RunnableLambda(call), given, config)


LANGCHAIN_WAYS = [
    _invoke,
    _ainvoke,
    _stream,
    _astream,
    _batch,
    _abatch,
    _astream_events,
    _invoke_under_astream_events,
]
"""Every way to run a Runnable; takes it, its input and its configuration, and returns the text."""


class _LangChainReranker(BaseDocumentCompressor):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    choose: Callable[[list[str]], list[str]]
    once: Callable[[], bool]

    def compress_documents(
        self, documents: Sequence[LangChainDocument], query: str, callbacks: Callbacks = None
    ) -> Sequence[LangChainDocument]:
        until(self.once)
        by_id = {str(d.id): d for d in documents}
        return [by_id[doc_id] for doc_id in self.choose(list(by_id))]


class _LangChainList(LangChainRetriever):
    found: list[LangChainDocument]

    def _get_relevant_documents(self, query: str, **_: Any) -> list[LangChainDocument]:
        return self.found


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


class LangChain(_Framework):
    """LangChain's words."""

    name = "langchain"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.asks = {way.__name__[1:]: way for way in LANGCHAIN_WAYS}
        self.recorder: langchain.TraceCallbackHandler | None = None
        self.answers = {name: partial(self._run, way) for name, way in self.asks.items()}
        self.restart()

    def restart(self) -> None:
        """Begin with a new handler, and no events."""
        self.events.clear()
        self.handler = langchain.CacheStatsCallbackHandler()

    def summary(self) -> CacheSummary:
        """Return what the framework's handler has summed up."""
        return self.handler.summary()

    def _callbacks(self, *handlers: BaseCallbackHandler) -> list[BaseCallbackHandler]:
        return [*handlers, self.handler, *([self.recorder] if self.recorder else [])]

    async def _run(self, way: Any, run: Runnable[Any, Any], given: Any) -> Answer:
        recorder = _Recorder(self.events)
        text = await way(run, given, {"callbacks": self._callbacks(recorder)})
        return Answer(text, recorder.stats)

    def model(self, **settings: Any) -> Any:
        """Return a model on the engine, or on the server at ``base_url``."""
        where: dict[str, Any] = {} if "base_url" in settings else {"engine": self.engine}
        return langchain.ChatRAGCache(**{**where, **settings})

    def other_model(self) -> Any:
        """Return a model without an engine."""
        return GenericFakeChatModel(messages=iter(AIMessage("A short answer.") for _ in range(99)))

    def answer_cache(self, *embedding: Any, **settings: Any) -> Any:
        """Return a cache of answers."""
        return langchain.SemanticAnswerCache(*embedding, **settings)

    def cached_by(self, answers: Any) -> dict[str, Any]:
        """Return the setting of a model that gives it a cache of answers."""
        return {"cache": answers}

    def vector_store(self, path: Path, embedder: Any, **options: Any) -> Any:
        """Return the framework's vector store in a folder."""
        return langchain.StagedFAISS.open_or_create(path, embedder, **options)

    def documents_of(self, store: Any) -> DocumentStore:
        """Return the document store of a vector store."""
        core: DocumentStore = store.store
        return core

    async def add(self, store: Any, texts: Mapping[str, str], metadata: Any = None, *, is_async: bool = False) -> Any:
        """Store texts by id and return the ids."""
        documents = [LangChainDocument(id=i, page_content=t, metadata=metadata or {}) for i, t in texts.items()]
        return await store.aadd_documents(documents) if is_async else store.add_documents(documents)

    async def remove(self, store: Any, ids: list[str], *, is_async: bool = False) -> None:
        """Remove documents."""
        _ = await store.adelete(ids) if is_async else store.delete(ids)

    async def get(self, store: Any, ids: list[str], *, is_async: bool = False) -> dict[str, tuple[str, Any]]:
        """Return the texts and the metadata of documents by id."""
        found = await store.aget_by_ids(ids) if is_async else store.get_by_ids(ids)
        return {d.id: (d.page_content, d.metadata) for d in found}

    async def search(self, store: Any, question: str, k: int, *, is_async: bool = False) -> list[str]:
        """Return the ids of the nearest documents."""
        found = await store.asimilarity_search(question, k) if is_async else store.similarity_search(question, k)
        return [d.id for d in found]

    async def ask(self, way: str, model: Any, prompt: Prompt, **call: Any) -> Answer:
        """Ask a model in one of ``asks``."""
        return await self._run(self.asks[way], model.bind(**call) if call else model, _messages(prompt))

    def open_stream(self, model: Any, prompt: str, *, is_async: bool) -> Any:
        """Return the stream of an answer as the framework has it."""
        return (model.astream if is_async else model.stream)(prompt)

    def retriever(self, source: Any, *, k: int = 2, reranker: Any = None, engine: Any = ..., **settings: Any) -> Any:
        """Return a retriever over a source of stages."""
        engine = self.engine if engine is ... else engine
        settings = {"search_timeout_s": TIMEOUT_S, **settings}
        return langchain.RAGCacheRetriever(store=source, engine=engine, k=k, compressor=reranker, **settings)

    def other_retriever(self, *documents: Document) -> Any:
        """Return a retriever of another make that finds these documents."""
        return _LangChainList(found=[langchain.to_langchain(d) for d in documents])

    def reranker(self, choose: Any, once: Callable[[], bool] = lambda: True) -> Any:
        """Return a reranker that chooses among ids, once ``once`` holds."""
        return _LangChainReranker(choose=choose, once=once)

    async def find(self, retriever: Any, *, is_async: bool = False, question: str = QUESTION) -> list[str]:
        """Return the ids of the documents that a retriever finds."""
        config: Any = {"callbacks": self._callbacks(_Recorder(self.events))}
        if is_async:
            return [d.id for d in await retriever.ainvoke(question, config)]
        return [d.id for d in await asyncio.to_thread(retriever.invoke, question, config)]

    def pair(self, retriever: Any, model: Any = None, layout: PromptLayout | None = None, **settings: Any) -> Any:
        """Return what answers from a retriever's documents while it searches."""
        layout = layout or PromptLayout()
        return langchain.SpeculativeRAG(
            retriever=retriever,
            llm=model or self.model(),
            prompt=langchain.prompt_from_layout(layout),
            format_docs=partial(langchain.format_documents, layout=layout),
            **settings,
        )

    def open_answer(self, pair: Any, *, is_async: bool) -> Any:
        """Return the texts of a pair's streamed answer as they come."""
        if is_async:
            return (chunk.text async for chunk in pair.astream(QUESTION))
        return (chunk.text for chunk in pair.stream(QUESTION))

    @contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        """Record the requests in a trace."""
        with langchain.TraceCallbackHandler(path) as self.recorder:
            yield
        self.recorder = None

    def chain(self, retriever: Any, model: Any, prompt: Any = None) -> Callable[[str], Answer]:
        """Return the framework's own chain, or query engine, over a retriever and a model."""
        context = retriever | langchain.format_documents
        prompt = prompt or langchain.prompt_from_layout()
        run = {"context": context, "question": RunnablePassthrough()} | prompt | model
        return lambda question: asyncio.run(self._run(_invoke, run, question))

    def laid_out(self, retriever: Any, model: Any) -> Callable[[str], Answer]:
        """Return such a chain with the prompt that ``bind`` binds."""
        return self.chain(retriever, model)

    def question_first(self, retriever: Any, model: Any) -> Callable[[str], Answer]:
        """Return such a chain whose prompt has the question before the documents."""
        template = [("system", STATIC), ("human", "Question: {question}\n\n{context}")]
        return self.chain(retriever, model, ChatPromptTemplate.from_messages(template))

    def bind(self, layout: PromptLayout, **settings: Any) -> BoundPrompt:
        """Bind a prompt of this layout to the engine."""
        format_docs = partial(langchain.format_documents, layout=layout)
        return self.engine.bind_prompt(langchain.prompt_from_layout(layout), format_docs, **settings)

    def tool_calls(self, model: Any, *, is_streamed: bool) -> tuple[list[tuple[str, Any]], Mapping[str, Any]]:
        """Return the calls of the tool ``add`` that the model makes, and the statistics of its answer."""
        asking = model.bind_tools([add], tool_choice="any")
        asked = "What is 3 and 4 together?"
        first, *rest = list(asking.stream(asked)) if is_streamed else [asking.invoke(asked)]
        answer = sum(rest, first)
        return [(call["name"], call["args"]) for call in answer.tool_calls], answer.response_metadata["ragcache"]


def _messages(prompt: Prompt) -> list[BaseMessage] | str:
    return prompt if isinstance(prompt, str) else convert_to_messages(list(prompt))


# LlamaIndex


class _Log(BaseEventHandler):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    events: list[Any] = Field(default_factory=list)
    handler: Any = None

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.handler.handle(event)
        if isinstance(event, llamaindex.RetrievalStageEvent):
            swaps = tuple((swap.doc_out, swap.doc_in) for swap in event.swaps)
            self.events.append(
                SearchEvent("stage", event.stage, event.document_ids, event.query, event.scores, swaps, event.is_final)
            )
        elif isinstance(event, llamaindex.SpeculationEvent):
            times = {"overlapped_search_s": event.overlapped_search_s, "search_s": event.search_s}
            self.events.append(SearchEvent(event.kind, event.stage, event.document_ids, event.query, **times))


class _LlamaIndexReranker(BaseNodePostprocessor):
    choose: Callable[[list[str]], list[str]]
    once: Callable[[], bool]

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        until(self.once)
        by_id = {n.node.node_id: n for n in nodes}
        return [by_id[doc_id] for doc_id in self.choose(list(by_id))]


class ListRetriever(BaseRetriever):
    """Finds the nodes that it was given."""

    def __init__(self, *nodes: TextNode) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0 - i / 10) for i, node in enumerate(self.nodes)]


class _OneStep(Workflow):
    def __init__(self, query_engine: Any) -> None:
        super().__init__(timeout=30)
        self.query_engine = query_engine

    @step
    async def answer(self, event: StartEvent) -> StopEvent:
        response = await self.query_engine.aquery(event.question)
        return StopEvent(result=await response.get_response())


async def _read(responses: Any) -> Answer:
    said = [r async for r in responses] if hasattr(responses, "__aiter__") else await asyncio.to_thread(list, responses)
    return Answer("".join(r.delta or "" for r in said), said[-1].additional_kwargs["ragcache"])


def _of_response(response: Any) -> Answer:
    text = response.text if hasattr(response, "text") else response.message.content
    return Answer(text or "", response.additional_kwargs["ragcache"])


def _chat(prompt: Prompt) -> list[ChatMessage]:
    messages = [("user", prompt)] if isinstance(prompt, str) else prompt
    return [ChatMessage(role=role, content=text) for role, text in messages]


class LlamaIndex(_Framework):
    """LlamaIndex's words for the same."""

    name = "llamaindex"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.log = _Log()
        self.log.events = self.events
        self.asks = {
            "chat": self._chat, "achat": self._achat, "stream_chat": self._stream_chat,
            "astream_chat": self._astream_chat, "complete": self._complete, "acomplete": self._acomplete,
            "stream_complete": self._stream_complete, "astream_complete": self._astream_complete,
        }  # fmt: skip
        self.answers = {
            "query": self._query, "aquery": self._aquery, "streamed_query": self._streamed_query,
            "streamed_aquery": self._streamed_aquery, "tool_call": self._tool_call, "tool_acall": self._tool_acall,
            "in_a_workflow": self._in_a_workflow,
        }  # fmt: skip
        self.restart()

    def restart(self) -> None:
        self.events.clear()
        self.log.handler = llamaindex.CacheStatsEventHandler()

    def summary(self) -> CacheSummary:
        summed: CacheSummary = self.log.handler.summary()
        return summed

    def model(self, **settings: Any) -> Any:
        where: dict[str, Any] = {} if "base_url" in settings else {"engine": self.engine}
        body = settings.pop("extra_body", None)
        more = {} if body is None else {"additional_kwargs": {"extra_body": body}}
        return llamaindex.RAGCacheLLM(**{"max_tokens": 200, **where, **more, **settings})

    def other_model(self) -> Any:
        return MockLLM()

    def answer_cache(self, *embedding: Any, **settings: Any) -> Any:
        return llamaindex.AnswerCache(*embedding, **settings)

    def cached_by(self, answers: Any) -> dict[str, Any]:
        return {"answer_cache": answers}

    def vector_store(self, path: Path, embedder: Any, **options: Any) -> Any:
        return llamaindex.StagedFAISSVectorStore(path, embedder=embedder, **options)

    def documents_of(self, store: Any) -> DocumentStore:
        core: DocumentStore = store.client
        return core

    async def add(self, store: Any, texts: Mapping[str, str], metadata: Any = None, *, is_async: bool = False) -> Any:
        nodes = [TextNode(id_=i, text=t, metadata=metadata or {}) for i, t in texts.items()]
        return await store.async_add(nodes) if is_async else store.add(nodes)

    async def remove(self, store: Any, ids: list[str], *, is_async: bool = False) -> None:
        await store.adelete_nodes(ids) if is_async else store.delete_nodes(ids)

    async def get(self, store: Any, ids: list[str], *, is_async: bool = False) -> dict[str, tuple[str, Any]]:
        nodes = await store.aget_nodes(ids) if is_async else store.get_nodes(ids)
        return {n.node_id: (n.get_content(), n.metadata) for n in nodes}

    async def search(self, store: Any, question: str, k: int, *, is_async: bool = False) -> list[str]:
        query = VectorStoreQuery(query_str=question, similarity_top_k=k)
        return (await store.aquery(query) if is_async else store.query(query)).ids

    async def ask(self, way: str, model: Any, prompt: Prompt, **call: Any) -> Answer:
        return await self.asks[way](model, prompt, **call)

    async def _chat(self, llm: Any, prompt: Prompt, **call: Any) -> Answer:
        return _of_response(await asyncio.to_thread(llm.chat, _chat(prompt), **call))

    async def _achat(self, llm: Any, prompt: Prompt, **call: Any) -> Answer:
        return _of_response(await llm.achat(_chat(prompt), **call))

    async def _complete(self, llm: Any, prompt: str, **call: Any) -> Answer:
        return _of_response(await asyncio.to_thread(llm.complete, prompt, **call))

    async def _acomplete(self, llm: Any, prompt: str, **call: Any) -> Answer:
        return _of_response(await llm.acomplete(prompt, **call))

    async def _stream_chat(self, llm: Any, prompt: Prompt, **call: Any) -> Answer:
        return await _read(llm.stream_chat(_chat(prompt), **call))

    async def _astream_chat(self, llm: Any, prompt: Prompt, **call: Any) -> Answer:
        return await _read(await llm.astream_chat(_chat(prompt), **call))

    async def _stream_complete(self, llm: Any, prompt: str, **call: Any) -> Answer:
        return await _read(llm.stream_complete(prompt, **call))

    async def _astream_complete(self, llm: Any, prompt: str, **call: Any) -> Answer:
        return await _read(await llm.astream_complete(prompt, **call))

    def open_stream(self, model: Any, prompt: str, *, is_async: bool) -> Any:
        if not is_async:
            return model.stream_complete(prompt)

        async def chunks() -> Any:
            stream = await model.astream_complete(prompt)
            try:
                async for chunk in stream:
                    yield chunk
            finally:
                await stream.aclose()

        return chunks()

    def retriever(self, source: Any, *, k: int = 2, reranker: Any = None, engine: Any = ..., **settings: Any) -> Any:
        engine = self.engine if engine is ... else engine
        rerankers = [] if reranker is None else [reranker]
        settings = {"search_timeout_s": TIMEOUT_S, **settings}
        return llamaindex.RAGCacheRetriever(
            source, engine, similarity_top_k=k, node_postprocessors=rerankers, **settings
        )

    def other_retriever(self, *documents: Document) -> Any:
        return ListRetriever(*(TextNode(id_=d.doc_id, text=d.text) for d in documents))

    def reranker(self, choose: Any, once: Callable[[], bool] = lambda: True) -> Any:
        return _LlamaIndexReranker(choose=choose, once=once)

    async def find(self, retriever: Any, *, is_async: bool = False, question: str = QUESTION) -> list[str]:
        nodes = (
            await retriever.aretrieve(question) if is_async else await asyncio.to_thread(retriever.retrieve, question)
        )
        return [n.node.node_id for n in nodes]

    def pair(self, retriever: Any, model: Any = None, layout: PromptLayout | None = None, **settings: Any) -> Any:
        return partial(llamaindex.RAGCacheQueryEngine, retriever, model or self.model(), layout=layout, **settings)

    async def _query(self, make: Any, question: str) -> Answer:
        response = await asyncio.to_thread(make().query, question)
        return Answer(str(response), response.metadata["ragcache"])

    async def _aquery(self, make: Any, question: str) -> Answer:
        response = await make().aquery(question)
        return Answer(str(response), response.metadata["ragcache"])

    async def _streamed_query(self, make: Any, question: str) -> Answer:
        response = await asyncio.to_thread(make(streaming=True).query, question)
        assert isinstance(response, StreamingResponse)
        text = await asyncio.to_thread("".join, response.response_gen)
        return Answer(text, (response.metadata or {})["ragcache"])

    async def _streamed_aquery(self, make: Any, question: str) -> Answer:
        response = await make(streaming=True).aquery(question)
        assert isinstance(response, AsyncStreamingResponse)
        text = "".join([token async for token in response.response_gen])
        return Answer(text, (response.metadata or {})["ragcache"])

    async def _tool_call(self, make: Any, question: str) -> Answer:
        search = QueryEngineTool.from_defaults(make(), name="search")
        output: Any = await asyncio.to_thread(search.call, input=question)
        return Answer(output.content, output.raw_output.metadata["ragcache"])

    async def _tool_acall(self, make: Any, question: str) -> Answer:
        output: Any = await QueryEngineTool.from_defaults(make(), name="search").acall(input=question)
        return Answer(output.content, output.raw_output.metadata["ragcache"])

    async def _in_a_workflow(self, make: Any, question: str) -> Answer:
        response = await _OneStep(make(streaming=True)).run(question=question)
        return Answer(str(response), response.metadata["ragcache"])

    def open_answer(self, pair: Any, *, is_async: bool) -> Any:
        async def tokens() -> AsyncGenerator[str, None]:
            response = await pair(streaming=True).aquery(QUESTION)
            try:
                async for token in response.response_gen:
                    yield token
            finally:
                await response.response_gen.aclose()

        return tokens() if is_async else pair(streaming=True).query(QUESTION).response_gen

    @contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        handler = llamaindex.TraceEventHandler(path=path)
        get_dispatcher().add_event_handler(handler)
        try:
            yield
        finally:
            get_dispatcher().event_handlers.remove(handler)
            handler.close()

    def chain(self, retriever: Any, model: Any, prompt: Any = None) -> Callable[[str], Answer]:
        engine = RetrieverQueryEngine.from_args(retriever, llm=model, text_qa_template=prompt)

        def ask(question: str) -> Answer:
            response: Any = engine.query(question)
            return Answer(str(response), response.metadata.get("ragcache", {}))

        return ask

    def laid_out(self, retriever: Any, model: Any) -> Callable[[str], Answer]:
        engine = llamaindex.RAGCacheQueryEngine(retriever, model)

        def ask(question: str) -> Answer:
            query = QueryBundle(question)  # in two steps the retriever does what it does alone
            response: Any = engine.synthesize(query, engine.retrieve(query))
            return Answer(str(response), response.metadata["ragcache"])

        return ask

    def question_first(self, retriever: Any, model: Any) -> Callable[[str], Answer]:
        template = PromptTemplate(f"{STATIC}\nQuestion: {{query_str}}\n{{context_str}}")
        return self.chain(retriever, model, template)

    def bind(self, layout: PromptLayout, **settings: Any) -> BoundPrompt:
        return self.engine.bind_prompt(layout, **settings)

    def tool_calls(self, model: Any, *, is_streamed: bool) -> tuple[list[tuple[str, Any]], Mapping[str, Any]]:
        tools, asked = [FunctionTool.from_defaults(add.func, name="add")], "What is 3 and 4 together?"
        if is_streamed:
            response = list(model.stream_chat_with_tools(tools, user_msg=asked))[-1]
        else:
            response = model.chat_with_tools(tools, user_msg=asked)
        calls = model.get_tool_calls_from_response(response)
        return [(call.tool_name, call.tool_kwargs) for call in calls], response.additional_kwargs["ragcache"]


Framework = LangChain | LlamaIndex
FRAMEWORKS: dict[str, type[LangChain] | type[LlamaIndex]] = {"langchain": LangChain, "llamaindex": LlamaIndex}
DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"

_LANGCHAIN = ("invoke", "ainvoke", "stream", "astream")
_LANGCHAIN_MORE = ("batch", "abatch", "astream_events", "invoke_under_astream_events")
ASKS = [
    *(("langchain", way) for way in _LANGCHAIN + _LANGCHAIN_MORE),
    *(("llamaindex", way) for way in ("chat", "achat", "stream_chat", "astream_chat")),
    *(("llamaindex", way) for way in ("complete", "acomplete", "stream_complete", "astream_complete")),
]
ANSWERS = [
    *(("langchain", way) for way in _LANGCHAIN + _LANGCHAIN_MORE),
    *(("llamaindex", way) for way in ("query", "aquery", "streamed_query", "streamed_aquery")),
    *(("llamaindex", way) for way in ("tool_call", "tool_acall", "in_a_workflow")),
]
STREAMED = [
    *(("langchain", way) for way in ("stream", "astream")),
    *(("llamaindex", way) for way in ("stream_chat", "astream_chat", "stream_complete", "astream_complete")),
]
