"""The chat model: langchain-openai's client, plus what RAGCache knows of a prompt and measures of an answer."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_ai_message_chunks
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import RunnableConfig, get_config_list, run_in_executor
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, PrivateAttr, SecretStr, ValidationInfo, field_validator

from ragcache_core.batch_order import PrefixKey, order_requests
from ragcache_core.client import EngineClient, RequestPlan
from ragcache_core.client.batch import chat_key
from ragcache_core.client.engine import check_tokenizer
from ragcache_core.client.generation import check_settings
from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout
from ragcache_core.client.http.errors import translate_errors_as_openai
from ragcache_core.client.http.remote_server import HANG_TIMEOUT_S, RESTART_TIMEOUT_S, recovery_settings
from ragcache_core.client.prompts.request_plan import merge_bodies
from ragcache_core.client.prompts.retrieved_documents import DocumentHint
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.runtime.environment import API_KEY_ENV, BASE_URL_ENV
from ragcache_core.stats import ANSWER_KEY, STATS_KEY, RequestStats
from ragcache_core.types import Document
from ragcache_integrations.langchain.documents import CURE, to_core
from ragcache_integrations.rag.call import (
    OPTIONS,
    ChunkReuseSetting,
    MeasuredCall,
    check_option,
    options_of,
    plan_chat,
    sent_settings,
    with_headers,
)
from ragcache_integrations.rag.handles import Connections, HoldsHandles, check_engine

DOCUMENTS_KEY = "ragcache_documents"
"""Key of a human message's ``additional_kwargs`` for the documents that its text holds."""

_RESPONSE_ID = "ragcache_response_id"
_NO_KEY = "EMPTY"  # what vLLM's clients send to a server without a key; OPENAI_API_KEY must not reach it
_RESPONSES_API = ("use_responses_api", "use_previous_response_id")
_CLIENTS = ("client", "async_client", "root_client", "root_async_client")


class ChatRAGCache(HoldsHandles, BaseChatOpenAI):
    """A chat model served by a RAGCache engine. Streaming, tool calls, structured output and async are LangChain's own.

    ::

        llm = ChatRAGCache(engine=Engine.launch("my-model"))
        llm = ChatRAGCache(base_url="http://host:8000/v1", api_key=...)      # connects at the first request

    Documents whose text is in the prompt are named to the engine. They are found among the ``documents`` of the
    call (``llm.bind(documents=docs)``), those of a message (``additional_kwargs["ragcache_documents"]``), and those
    that any retriever of LangChain returned recently in this process. If long prompts show none, one warning says so.

    ``chunk_reuse``, of the model or of a call (``llm.bind(chunk_reuse=False)``), switches chunk reuse, which is
    approximate. See :meth:`Engine.stream <ragcache_core.client.engine_client.EngineClient.stream>`.

    ``deduplicate``, of the model or of a call, replaces a document that the conversation shows already by a reference
    (``[shown above: "Zorval was a company ..."]``). Prompts get shorter, and are not those of the chain.

    ``ttft_slo``, of the model or of a call (``llm.bind(ttft_slo=0.8)``), is the target time to first token, in seconds
    from sending the request. The prompt is sent unchanged if it is predicted in time. Otherwise its documents get the
    order with the longest cached prefix, or chunk reuse is used, if the engine has it and is calibrated
    (``chunk_reuse=False`` excludes it). ``response_metadata["ragcache"]["deadline"]`` has the choice and the reason.

    ``usage_metadata["input_token_details"]["cache_read"]`` holds the cached tokens, ``response_metadata["ragcache"]``
    the rest (in a stream: of the last chunk): which tier they came from, bytes moved, documents, times.

    ``profile`` says that the model calls tools and answers with structured output. With an engine, and with
    ``base_url`` after :meth:`connect`, it holds the context window too.

    Copies share the engine, or the connection: ``model_copy``, ``bind``, ``with_config``, ``configurable_fields``.

    With ``base_url``, a request whose server goes away before its first token waits for it and is sent again. A
    stream that had begun continues where it was cut, and ``response_metadata["ragcache"]`` says how often
    (``num_resumes``), and whether it continued with another random state (``is_resampled``).
    ``restart_timeout_s``, ``hang_timeout_s`` and ``first_token_timeout_s`` are those of :meth:`Engine.connect
    <ragcache_core.client.Engine.connect>`. With ``with_fallbacks``, set ``restart_timeout_s=0``.

    Raises:
        ConfigError: neither an engine nor an address (``base_url``, or ``RAGCACHE_BASE_URL`` in the environment);
            ``use_responses_api=True``; a time that cannot work, or one that was set together with ``engine``.
        EngineError, PromptTooLongError: from requests; see :mod:`ragcache_core.errors`. They are instances of the
            OpenAI SDK's types as well: an ``EngineUnreachableError`` of ``openai.APIConnectionError``.
    """

    engine: EngineClient | None = Field(default=None, exclude=True, repr=False)
    """The engine that answers; its owner closes it."""
    restart_timeout_s: float | None = Field(default=RESTART_TIMEOUT_S, exclude=True, repr=False)
    """With ``base_url``: seconds that a request waits for a server that restarts; ``None``: its ``timeout``."""
    hang_timeout_s: float | None = Field(default=HANG_TIMEOUT_S, exclude=True, repr=False)
    """With ``base_url``: seconds without any answer after which the server hangs; ``None``: never."""
    first_token_timeout_s: FirstTokenTimeout = Field(default=AUTO, exclude=True, repr=False)
    """With ``base_url``: seconds after which a stream without its first token is cancelled and sent once more.
    ``"auto"``: shortly before its ``timeout``, if that is at least 600 s; ``None``: never."""
    chunk_reuse: ChunkReuseSetting = None
    """Chunk reuse: whether, and with which settings; ``None`` leaves it to the engine."""
    deduplicate: bool = False
    """Whether a document that an earlier message of the conversation shows is referred to, and not sent again."""
    ttft_slo: float | None = None
    """TTFT SLO: the target time to first token, in seconds; ``None`` for none."""
    stream_usage: bool | None = True
    max_retries: int | None = 0
    """The engine's own client repeats a request that was lost before its first token."""
    use_responses_api: bool | None = False
    connections: Connections = Field(default_factory=Connections, exclude=True, repr=False)
    """With ``base_url``: what this model and its copies opened."""
    _connecting: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _connected: EngineClient | None = PrivateAttr(default=None)
    _hint: DocumentHint = PrivateAttr(default_factory=lambda: DocumentHint(CURE))

    @field_validator(*OPTIONS, mode="before")
    @classmethod
    def _check_option(cls, value: object, info: ValidationInfo) -> Any:
        return check_option(str(info.field_name), value)

    def __init__(self, *, engine: EngineClient | None = None, **settings: Any) -> None:
        if (name := next(filter(settings.get, _RESPONSES_API), None)) is not None:
            raise ConfigError(
                f"{name} is {quoted(settings[name])}, but the Responses API says nothing of documents: leave it out, "
                "then requests are chat completions"
            )
        settings |= dict.fromkeys(settings.keys() & set(_RESPONSES_API), False)  # None lets LangChain choose the API
        check_tokenizer(settings.pop("tokenizer", None))
        given = {alias: settings.pop(name) for name, alias in _ALIASES.items() if name in settings}
        settings |= {name: value for name, value in given.items() if value is not None}
        own_client = [settings.pop(name, None) for name in _CLIENTS][2]  # of the model that this one is a copy of
        own_url = "" if own_client is None else str(own_client.base_url).rstrip("/")
        check_engine(engine, "base_url=")
        if engine is not None:
            if settings.get("base_url") not in (None, "", engine.base_url, own_url):
                raise ConfigError("engine= and base_url= were both given: pass the engine, or the address of one")
            settings |= _address_of(engine)
            settings = {"model": engine.model, "timeout": engine.http_client().timeout, **settings}
        else:
            settings["base_url"] = base_url = settings.get("base_url") or os.environ.get(BASE_URL_ENV)
            if not base_url:
                raise ConfigError(f"no engine: pass engine=Engine.launch(...), or base_url=, or set {BASE_URL_ENV}")
            settings = {"model": "", "api_key": os.environ.get(API_KEY_ENV) or _NO_KEY, **settings}
            if not isinstance(settings["api_key"], str | SecretStr):
                raise ConfigError("api_key is a function: pass the key itself, as a string or a SecretStr")
        super().__init__(engine=engine, **settings)
        self._recovery_settings()
        if engine is not None:
            self._have_answers_forgotten(engine)
            own = {**self.model_kwargs, "model": self.model_name, "extra_body": self.extra_body}
            engine.integration.prompts.expect_settings(with_headers(own, self.default_headers))

    @property
    def _llm_type(self) -> str:
        return "ragcache-chat"

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": API_KEY_ENV}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{**super()._get_ls_params(stop, **kwargs), "ls_provider": "ragcache"})

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return what an answer depends on; LangChain's caches of answers tell requests apart by it."""
        own = {"chunk_reuse": self.chunk_reuse, "ttft_slo": self.ttft_slo, "deduplicate": self.deduplicate or None}
        own = {name: value for name, value in own.items() if value is not None}
        return {**own, **super()._get_invocation_params(stop, **kwargs)}

    def _resolve_model_profile(self) -> ModelProfile:
        profile: ModelProfile = {"structured_output": True, "tool_calling": True}
        return profile if self.engine is None else {**profile, "max_input_tokens": self.engine.max_model_len}

    def _convert_cached_generations(self, cache_val: list[Generation]) -> list[ChatGeneration]:
        """Do what the parent does, and mark each answer of a cache as such: no request is behind it."""
        return [_marked_as_kept(generation) for generation in super()._convert_cached_generations(cache_val)]

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable that answers with an instance of ``schema``; by default vLLM's grammar enforces it."""
        return super().with_structured_output(schema, method=method, **kwargs)

    def connect(self) -> EngineClient:
        """Return the engine that answers, connecting to it at the first call."""
        engine = self.engine or self._connected
        if engine is not None:
            return engine
        with self._connecting, translate_errors_as_openai():
            if self._connected is None:
                assert isinstance(self.openai_api_key, SecretStr)
                assert self.openai_api_base is not None
                key = self.openai_api_key.get_secret_value()
                settings = {"api_key": key, **self._recovery_settings()}
                engine = self.connections.open(self.openai_api_base, **settings)
                self._use_clients_of(engine)
                self.profile = {"max_input_tokens": engine.max_model_len, **(self.profile or {})}
                self._connected = engine
            return self._connected

    def prepare(
        self, messages: list[BaseMessage], stop: list[str] | None = None, *, is_streamed: bool, **kwargs: Any
    ) -> Callable[[], Speculation]:
        """Return a callable that starts this request speculatively; a call with the same arguments adopts its answer.

        No callback is called. See ``SpeculationClient.prepare``, also for the errors.
        """

        def ask() -> None:
            if is_streamed:
                next(self._stream(messages, stop, **kwargs), None)
            else:
                self._generate(messages, stop, **kwargs)

        return self.connect().integration.speculation.prepare(ask)

    def close(self) -> None:
        """Close the connection that this model opened itself. An engine that was passed in stays open."""
        self.connections.close()

    async def aclose(self) -> None:
        """Do :meth:`close` without blocking the event loop."""
        await run_in_executor(None, self.connections.close)

    # Counting tokens: with the engine's tokenizer, where the parent would download one of OpenAI's.

    def get_token_ids(self, text: str) -> list[int]:
        with translate_errors_as_openai():
            return list(self.connect().tokenize(text))

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return the length of the prompt that the chat template makes of ``messages``; tools are not counted."""
        with translate_errors_as_openai():
            return len(self.connect().tokenize(self._get_request_payload(list(messages))["messages"]))

    # Batches: requests with a common prefix follow each other; only the schedule changes. The batch of a chain runs its
    # steps one after the other, so all searches are done by then.

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        order = order_requests([self._prefix_key(each) for each in inputs])
        sorted_inputs, configs = [inputs[i] for i in order], _reordered_configs(config, order)
        answers = super().batch(sorted_inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return _in_given_order(answers, order)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        order = order_requests([self._prefix_key(each) for each in inputs])
        sorted_inputs, configs = [inputs[i] for i in order], _reordered_configs(config, order)
        answers = await super().abatch(sorted_inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return _in_given_order(answers, order)

    def _prefix_key(self, given: LanguageModelInput) -> PrefixKey:
        try:
            messages = self._convert_input(given).to_messages()
        except Exception:  # its own invoke raises it
            return ("",)
        return chat_key([{"role": message.type, "content": message.content} for message in messages])

    # The four ways to ask. Each plans, delegates, and reports.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translate_errors_as_openai():
            call = self._plan(messages, stop, kwargs)
            result = super()._generate(messages, stop, run_manager, **call.kwargs)
        call.read(result)
        self._note_tool_calls(call, [generation.message for generation in result.generations])
        return _with_stats(result, call.complete(call.usage, call.response_id))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translate_errors_as_openai():
            call = await run_in_executor(None, self._plan, messages, stop, kwargs)
            result = await super()._agenerate(messages, stop, run_manager, **call.kwargs)
        call.read(result)
        self._note_tool_calls(call, [generation.message for generation in result.generations])
        return _with_stats(result, await call.acomplete(call.usage, call.response_id))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with translate_errors_as_openai():
            call = self._plan(messages, stop, kwargs)
            chunks = super()._stream(messages, stop, run_manager, **call.kwargs)
            try:
                for chunk in chunks:
                    yield call.observe(chunk)
            finally:
                chunks.close()  # type: ignore[attr-defined]  # a generator: closes the response, which ends the request
        self._note_tool_calls(call, call.answer_messages())
        last = _last_chunk(call.complete(call.usage, call.response_id))
        if run_manager is not None:
            run_manager.on_llm_new_token("", chunk=last)
        yield last

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with translate_errors_as_openai():
            call = await run_in_executor(None, self._plan, messages, stop, kwargs)
            chunks = super()._astream(messages, stop, run_manager, **call.kwargs)
            try:
                async for chunk in chunks:
                    yield call.observe(chunk)
            finally:
                await chunks.aclose()  # type: ignore[attr-defined]
        self._note_tool_calls(call, call.answer_messages())
        last = _last_chunk(await call.acomplete(call.usage, call.response_id))
        if run_manager is not None:
            await run_manager.on_llm_new_token("", chunk=last)
        yield last

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        """Do what the parent does for the first answer, and keep the response's id, which it drops, at its end."""
        if (choices := chunk.get("choices")) and choices[0].get("index"):
            return None
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if converted is not None and converted.generation_info and "finish_reason" in converted.generation_info:
            converted.generation_info[_RESPONSE_ID] = chunk.get("id") or chunk.get("chunk", {}).get("id")
        return converted

    def _plan(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> _Call:
        engine, options, kwargs = self.connect(), options_of(self, kwargs), sent_settings(kwargs)
        documents = [*to_core(kwargs.pop("documents", None) or ()), *_documents_of(messages)]
        self._have_answers_forgotten(engine)
        payload = self._get_request_payload(messages, stop=stop, **kwargs)
        check_settings(payload.keys() - {"stream_usage"}, is_chat=True)  # which langchain-openai takes out
        settings = with_headers(payload, self.default_headers)
        plan = plan_chat(engine, self._hint, payload["messages"], options, settings, documents or None)
        if plan.extra_body:
            kwargs["extra_body"] = merge_bodies(payload.get("extra_body"), plan.extra_body)
        return _Call(engine, plan, kwargs)

    def _have_answers_forgotten(self, engine: EngineClient) -> None:
        """Have a cache of answers of ours drop those that stand on documents which ``engine`` forgets."""
        cache = get_llm_cache() if self.cache in (None, True) else self.cache
        if isinstance(cache, BaseCache):
            from ragcache_integrations.langchain.answers import SemanticAnswerCache

            if isinstance(cache, SemanticAnswerCache):
                engine.integration.answer_caches.add(cache)

    def _note_tool_calls(self, call: _Call, said: Sequence[BaseMessage]) -> None:
        """Tell the engine what an agent waits for."""
        for message in said:
            if isinstance(message, AIMessage) and message.tool_calls:
                call.note_tool_calls(partial(self._sent_back, message))

    def _sent_back(self, message: AIMessage) -> dict[str, Any]:
        """Return a message as the next request of its chat holds it."""
        sent: dict[str, Any] = self._get_request_payload([message])["messages"][0]
        return sent

    def _recovery_settings(self) -> dict[str, Any]:
        return recovery_settings(
            has_engine=self.engine is not None,
            restart_timeout_s=self.restart_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            first_token_timeout_s=self.first_token_timeout_s,
        )

    def _use_clients_of(self, engine: EngineClient) -> None:
        http, http_async = engine.http_client(), engine.http_async_client()
        timeout = http.timeout if self.request_timeout is None else self.request_timeout
        options: dict[str, Any] = {"base_url": engine.base_url, "timeout": timeout}
        self.root_client = self.root_client.with_options(**options, http_client=http)
        self.root_async_client = self.root_async_client.with_options(**options, http_client=http_async)
        self.client = self.root_client.chat.completions
        self.async_client = self.root_async_client.chat.completions
        self.model_name = self.model_name or engine.model


def _in_given_order(answers: list[AIMessage], order: Sequence[int]) -> list[AIMessage]:
    return [answer for _, answer in sorted(zip(order, answers, strict=True), key=itemgetter(0))]


def _reordered_configs(config: RunnableConfig | list[RunnableConfig] | None, order: list[int]) -> list[RunnableConfig]:
    """Return the configuration of each input of a batch; the first says how many run at a time, as in any batch."""
    if not order:
        return []
    configs = get_config_list(config, len(order))
    first, *others = [configs[i] for i in order]
    limit = configs[0].get("max_concurrency")
    return [cast("RunnableConfig", {**first, "max_concurrency": limit}), *others]


_ALIASES = {
    "openai_api_base": "base_url",
    "openai_api_key": "api_key",
    "model_name": "model",
    "request_timeout": "timeout",
}


class _Call(MeasuredCall):
    """One request, and the usage and the id that the server reported."""

    def __init__(self, engine: EngineClient, plan: RequestPlan, kwargs: dict[str, Any]) -> None:
        super().__init__(engine, plan)
        self.kwargs = kwargs
        self.response_id: str | None = None
        self._chunks: list[AIMessageChunk] = []
        self._usage: UsageMetadata | None = None

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage as the OpenAI protocol has it; ``None`` if the server reported none."""
        if self._usage is None:
            return None
        cached = self._usage.get("input_token_details", {}).get("cache_read", 0)
        return {
            "prompt_tokens": self._usage["input_tokens"],
            "completion_tokens": self._usage["output_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def read(self, result: ChatResult) -> None:
        """Note the usage and the id of a whole answer."""
        for generation in result.generations:
            self._usage = _note_cached_tokens(generation.message)
        self.response_id = (result.llm_output or {}).get("id")

    def observe(self, chunk: ChatGenerationChunk) -> ChatGenerationChunk:
        """Note the time of the first token, the usage, and the response's id."""
        message = chunk.message
        if message.content or getattr(message, "tool_call_chunks", None):
            self.note_token()
        self._usage = _note_cached_tokens(message) or self._usage
        if self.plan.tool_chat is not None and isinstance(message, AIMessageChunk):
            self._chunks.append(message)
        if chunk.generation_info is not None:
            self.response_id = chunk.generation_info.pop(_RESPONSE_ID, None) or self.response_id
        return chunk

    def answer_messages(self) -> list[BaseMessage]:
        """Return what was streamed as one message, where it may hold the calls of tools."""
        return [add_ai_message_chunks(*self._chunks)] if self._chunks else []


def _with_stats(result: ChatResult, stats: RequestStats) -> ChatResult:
    for generation in result.generations:
        generation.message.response_metadata[STATS_KEY] = stats.to_dict()
    return result


def _last_chunk(stats: RequestStats) -> ChatGenerationChunk:
    """Return the chunk that ends a stream. Only it holds the statistics: merging chunks would add them up."""
    metadata = {STATS_KEY: stats.to_dict()}
    return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata, chunk_position="last"))


def _note_cached_tokens(message: BaseMessage) -> UsageMetadata | None:
    """Return the usage of a message; vLLM leaves the cached tokens out where there are none."""
    if not isinstance(message, AIMessage) or message.usage_metadata is None:
        return None
    message.usage_metadata.setdefault("input_token_details", {}).setdefault("cache_read", 0)
    return message.usage_metadata


def _marked_as_kept(generation: ChatGeneration) -> ChatGeneration:
    """Return an answer of LangChain's cache with the mark of a kept one in place of the first request's statistics."""
    message = generation.message
    stats = message.response_metadata.get(STATS_KEY)
    if not isinstance(stats, dict) or ANSWER_KEY in stats:
        return generation
    mark = {STATS_KEY: {ANSWER_KEY: {"question": None, "similarity": 1.0}}}
    kept = message.model_copy(update={"response_metadata": {**message.response_metadata, **mark}})
    return generation.model_copy(update={"message": kept})


def _documents_of(messages: Sequence[BaseMessage]) -> list[Document]:
    return [d for m in messages for d in to_core(m.additional_kwargs.get(DOCUMENTS_KEY) or ())]


def _address_of(engine: EngineClient) -> dict[str, Any]:
    return {
        "base_url": engine.base_url,
        "api_key": engine.api_key or _NO_KEY,
        "http_client": engine.http_client(),
        "http_async_client": engine.http_async_client(),
    }
