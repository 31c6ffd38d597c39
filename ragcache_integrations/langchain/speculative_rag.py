"""Retrieval and generation at the same time: the answer is under way before the search has ended.

::

    rag = SpeculativeRAG(retriever=retriever, prompt=prompt_from_layout(), llm=ChatRAGCache(engine=engine))
    for text in (rag | StrOutputParser()).stream("Who founded Nalna?"):
        ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document as LangChainDocument
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import merge_configs, run_in_executor
from langchain_core.runnables.configurable import DynamicRunnable
from pydantic import ConfigDict, Field, PrivateAttr

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.retrieval.threads import in_thread, run_blocking
from ragcache_core.stats import STATS_KEY
from ragcache_integrations.langchain.callbacks import async_dispatcher, dispatcher
from ragcache_integrations.langchain.chat_model import ChatRAGCache
from ragcache_integrations.langchain.documents import format_documents, to_core
from ragcache_integrations.langchain.retriever import RAGCacheRetriever
from ragcache_integrations.rag.handles import HoldsHandles
from ragcache_integrations.rag.search import Listener
from ragcache_integrations.rag.session import QuestionSession

_Result = TypeVar("_Result")

logger = logger_of(__name__)


Documents = list[LangChainDocument]
Prompt = Runnable[dict[str, Any], PromptValue]


@dataclass(frozen=True, slots=True)
class _Bound:
    made_of: tuple[object, ...]
    prompt: BoundPrompt | None


class SpeculativeRAG(HoldsHandles, RunnableSerializable[str | dict[str, Any], AIMessage]):
    """Answers a question from retrieved documents: ``{"context": retriever | format_docs, ...} | prompt | llm``.

    While the search runs, the engine already answers from the candidates of each stage (speculation). If these are the
    final documents, the model's own request adopts that answer. Otherwise the speculative request is cancelled, and the
    request is sent. No token is shown before the documents are final, and the answer is the same.

    The input is the question, or a mapping that holds it with the prompt's other variables. The output is the model's
    message; ``response_metadata["ragcache"]["pipeline"]`` (in a stream: of the last chunk) has the search statistics.
    Prompt and ``format_docs`` run once for each set of candidates, in another thread: they depend on nothing but their
    input.

    Raises:
        ValueError: the input holds no question.
        SearchTimeoutError: the search took longer than ``search_timeout_s``.
        EngineError, PromptTooLongError, SearchError, ...: of the model and of the retriever.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: Runnable[str, Documents]
    """A :class:`RAGCacheRetriever`; any other retriever works too, and its search is one stage, so nothing overlaps."""
    prompt: Prompt
    llm: Runnable[LanguageModelInput, AIMessage]
    """A :class:`ChatRAGCache`, or one with arguments bound; another model answers without speculation."""
    format_docs: Callable[[Documents], Any] = format_documents
    context_key: str = "context"
    question_key: str = "question"
    search_timeout_s: float | None = Field(default=None, gt=0)
    """The longest that a search may take; by default the retriever's own, a minute for one of another kind."""
    _has_warned: bool = PrivateAttr(default=False)
    _bound: _Bound | None = PrivateAttr(default=None)

    def invoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:  # noqa: A002
        return self._call_with_config(self._invoke, input, config, **kwargs)

    async def ainvoke(
        self,
        input: str | dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await self._acall_with_config(self._ainvoke, input, config, **kwargs)

    def stream(
        self,
        input: str | dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessage]:
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self,
        input: str | dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessage]:
        async def one() -> AsyncIterator[str | dict[str, Any]]:
            yield input

        async with aclosing(_generator(self.atransform(one(), config, **kwargs))) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(
        self,
        input: Iterator[str | dict[str, Any]],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessage]:
        yield from self._transform_stream_with_config(input, self._transform, config, **kwargs)

    async def atransform(
        self,
        input: AsyncIterator[str | dict[str, Any]],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessage]:
        chunks = _generator(self._atransform_stream_with_config(input, self._atransform, config, **kwargs))
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    # The four ways to answer. Each searches, asks the model, and leaves nothing behind.

    def _invoke(
        self,
        given: str | dict[str, Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AIMessage:
        call = self._make_call(given, config, kwargs, {"async_api": False, "run_manager": run_manager})
        try:
            prompt = self.prompt.invoke(call.values(self._retrieve(call, config)), config)
            with call.model_call():
                answer = self.llm.invoke(prompt, config, **kwargs)
            answer = call.reported(answer, is_whole=True)
            _emit(call, config)
            return answer
        finally:
            call.close()

    async def _ainvoke(
        self,
        given: str | dict[str, Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AIMessage:
        call = await self._amake_call(given, config, kwargs, {"async_api": True, "run_manager": run_manager})
        try:
            prompt = await self.prompt.ainvoke(await self._avalues(call, config), config)
            with call.model_call():
                answer = await self.llm.ainvoke(prompt, config, **kwargs)
            answer = call.reported(answer, is_whole=True)
            await _aemit(call, config)
            return answer
        finally:
            call.close()

    def _transform(
        self,
        inputs: Iterator[str | dict[str, Any]],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[AIMessage]:
        how = {"async_api": False, "stream": True}
        call = self._make_call(_sum(list(inputs)), config, kwargs, how)
        try:
            prompt = self.prompt.invoke(call.values(self._retrieve(call, config)), config)
            parts = cast("Generator[AIMessage]", self.llm.stream(prompt, config, **kwargs))
            with closing(call.stream_parts(parts)) as chunks:
                for chunk in chain(map(call.reported, chunks), call.unreported()):
                    _emit(call, config)
                    yield chunk
        finally:
            call.close()

    async def _atransform(
        self,
        inputs: AsyncIterator[str | dict[str, Any]],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessage]:
        how = {"async_api": True, "stream": True}
        call = await self._amake_call(_sum([part async for part in inputs]), config, kwargs, how)
        try:
            prompt = await self.prompt.ainvoke(await self._avalues(call, config), config)
            parts = _generator(self.llm.astream(prompt, config, **kwargs))
            async with aclosing(call.astream_parts(parts)) as chunks:
                async for chunk in chunks:
                    reported = call.reported(chunk)
                    await _aemit(call, config)
                    yield reported
            for chunk in call.unreported():
                await _aemit(call, config)
                yield chunk
        finally:
            call.close()

    # Reading the question, and searching

    def _make_call(
        self, given: str | dict[str, Any], config: RunnableConfig, kwargs: dict[str, Any], how: dict[str, Any]
    ) -> _Question:
        """Return the question, ready to be searched for; ``how`` is what decides whether the model will stream."""
        variables = dict(given) if isinstance(given, Mapping) else {self.question_key: given}
        if not isinstance(question := variables.get(self.question_key), str):
            raise ValueError(  # noqa: TRY004  (what a mapping holds is a value)
                f"the input holds {question!r:.80} as {self.question_key!r}: pass the question as a string, or a "
                f"mapping that holds it under {self.question_key!r}"
            )

        def values(documents: Documents) -> dict[str, Any]:
            return {**variables, self.context_key: self.format_docs(documents)}

        llm, bound = _unbound(self.llm, config)
        bound |= kwargs
        if not isinstance(llm, ChatRAGCache):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "RC-MODEL-FOREIGN: %s is no ChatRAGCache: it gets its request when the search has ended",
                    type(llm).__name__,
                )
            return _Question(question, values, timeout_s=self.search_timeout_s)
        engine = llm.connect()
        is_streamed = llm._should_stream(**{**bound, **how})

        def start_speculation(documents: Documents) -> Callable[[], Speculation]:
            engine.remember_documents(to_core(documents), query=question)
            return llm.prepare(self._messages(values(documents)), is_streamed=is_streamed, **bound)

        prompt = partial(self._bound_prompt, engine)
        return _Question(question, values, engine, start_speculation, prompt=prompt, timeout_s=self.search_timeout_s)

    def _messages(self, values: dict[str, Any]) -> list[BaseMessage]:
        """Return the messages of the prompt without telling any callback."""
        if isinstance(self.prompt, BasePromptTemplate):
            return self.prompt.format_prompt(**values).to_messages()
        return self.prompt.invoke(values, {"callbacks": []}).to_messages()

    def _bound_prompt(self, engine: EngineClient) -> BoundPrompt | None:
        """Return the prompt as ``engine`` tokenises it; ``None`` where it is no template."""
        made_of = (engine, self.prompt, self.format_docs)
        if self._bound is None or any(a is not b for a, b in zip(self._bound.made_of, made_of, strict=True)):
            bound = None
            with suppress(ConfigError):
                bound = engine.bind_prompt(
                    self.prompt,
                    self.format_docs,
                    context=self.context_key,
                    question=self.question_key,
                    is_default=False,
                    is_prefilled=False,
                )
            self._bound = _Bound(made_of, bound)
        return self._bound.prompt

    async def _amake_call(
        self, given: str | dict[str, Any], config: RunnableConfig, kwargs: dict[str, Any], how: dict[str, Any]
    ) -> _Question:
        llm, _ = _unbound(self.llm, config)
        if isinstance(llm, ChatRAGCache) and llm.engine is None:
            await run_in_executor(None, llm.connect)
        return self._make_call(given, config, kwargs, how)

    def _retrieve(self, call: _Question, config: RunnableConfig) -> Documents:
        if self._is_staged(config):
            return self.retriever.invoke(call.question, config, overlap=call.overlap)
        on_event = dispatcher(call.question, config)
        find = partial(in_thread, lambda: self.retriever.invoke(call.question, config))
        return run_blocking(lambda: self._search_at_once(call, find, on_event))

    async def _aretrieve(self, call: _Question, config: RunnableConfig) -> Documents:
        if self._is_staged(config):
            return await self.retriever.ainvoke(call.question, config, overlap=call.overlap)
        on_event = async_dispatcher(call.question, config)
        return await self._search_at_once(call, lambda: self.retriever.ainvoke(call.question, config), on_event)

    async def _avalues(self, call: _Question, config: RunnableConfig) -> dict[str, Any]:
        """Return what the prompt is made of; ``format_docs`` runs where a chain runs a function, in the executor."""
        return await run_in_executor(config, call.values, await self._aretrieve(call, config))

    def _is_staged(self, config: RunnableConfig) -> bool:
        return isinstance(_unbound(self.retriever, config)[0], RAGCacheRetriever)

    async def _search_at_once(
        self, call: _Question, find: Callable[[], Awaitable[Documents]], on_event: Listener
    ) -> Documents:
        found = await call.find_at_once(find, to_core, on_event)
        if (engine := call.overlap.engine) is not None:
            engine.remember_documents(to_core(found), query=call.question)
        return found


class _Question(QuestionSession[LangChainDocument]):
    """One question: what its prompt is made of, and the report of its search in its answer."""

    def __init__(self, question: str, values: Callable[[Documents], dict[str, Any]], *engine: Any, **how: Any) -> None:
        """``values`` makes what the prompt is made of; the other arguments are those of the session."""
        super().__init__(question, *engine, **how)
        self.values = values
        self._is_answered = False
        self._is_reported = False
        self._unemitted: list[PipelineEvent] = []

    def reported(self, answer: AIMessage, *, is_whole: bool = False) -> AIMessage:
        """Return an answer, or a chunk of one, with the report if its statistics are there, or if it is whole."""
        if not self._is_answered:  # a speculation that the request did not join would only run beside it
            self._is_answered = True
            self.close()
        metadata = getattr(answer, "response_metadata", {})  # another model may answer with a string
        if metadata.get(STATS_KEY) is None and not is_whole:
            return answer
        if not self._settle() or not isinstance(answer, AIMessage):
            return answer
        return answer.model_copy(update={"response_metadata": self.with_report(metadata)})

    def unemitted(self) -> Iterator[PipelineEvent]:
        """Yield the events of the report that was handed out, once."""
        while self._unemitted:
            yield self._unemitted.pop()

    def unreported(self) -> Iterator[AIMessageChunk]:
        """Yield a last chunk with the report, if the stream of another model had no chunk to take it."""
        if not self._is_reported and self._settle():
            yield AIMessageChunk(content="", response_metadata=self.with_report({}))

    def _settle(self) -> bool:
        if (event := self.settle()) is not None:
            self._unemitted.append(event)
        self._is_reported = self.pipeline_report() is not None
        return self._is_reported


def _emit(call: _Question, config: RunnableConfig) -> None:
    for event in call.unemitted():
        dispatcher(call.question, config)(event)


async def _aemit(call: _Question, config: RunnableConfig) -> None:
    for event in call.unemitted():
        await async_dispatcher(call.question, config)(event)


def _unbound(runnable: Runnable[Any, Any], config: RunnableConfig) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """Return what ``bind``, ``with_config`` and ``configurable_fields`` wrapped, and the arguments that were bound."""
    kwargs: dict[str, Any] = {}
    while isinstance(runnable, RunnableBindingBase | DynamicRunnable):
        if isinstance(runnable, DynamicRunnable):
            runnable, config = runnable.prepare(config)
        else:
            kwargs, config = {**runnable.kwargs, **kwargs}, merge_configs(runnable.config, config)
            runnable = runnable.bound
    return runnable, kwargs


def _sum(parts: list[Any]) -> Any:
    """Return the input that arrived in parts, as a stream of the runnable before does."""
    whole = parts[0] if parts else {}
    for part in parts[1:]:
        whole = whole + part
    return whole


def _generator(chunks: AsyncIterator[_Result]) -> AsyncGenerator[_Result]:
    """Return an iterator of LangChain's as what it is: a generator, which can be closed."""
    return cast("AsyncGenerator[_Result]", chunks)
