"""The LLM: LlamaIndex's ``OpenAILike`` on a RAGCache engine, with the documents of a prompt and its cache statistics.

Streaming, tool calls and structured output are ``OpenAILike``'s own. Added to a request is what the engine has to know
about its documents; added to a response is what the cache did for it::

    response.additional_kwargs["ragcache"]     # RequestStats.to_dict(); in a stream: on the last response
    CacheStatsEvent                            # the same, on the instrumentation dispatcher
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.llms.openai.base import OpenAI, Tokenizer
from llama_index.llms.openai.utils import to_openai_message_dicts
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped]

from ragcache_core.answers import AnswerCache
from ragcache_core.client import Engine, EngineClient, RequestPlan
from ragcache_core.client.engine import check_tokenizer
from ragcache_core.client.generation import check_one_answer, check_settings
from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout
from ragcache_core.client.http.errors import translate_errors_as_openai
from ragcache_core.client.http.remote_server import HANG_TIMEOUT_S, RESTART_TIMEOUT_S, recovery_settings
from ragcache_core.client.prompts.request_plan import merge_bodies
from ragcache_core.client.prompts.retrieved_documents import DocumentHint
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.deadline import check_ttft_slo, unplanned
from ragcache_core.errors import ConfigError
from ragcache_core.runtime.environment import API_KEY_ENV, BASE_URL_ENV
from ragcache_core.wire import check_sendable
from ragcache_integrations.llamaindex.answers import CachedChat, just
from ragcache_integrations.llamaindex.nodes import CURE
from ragcache_integrations.llamaindex.requests import MeasuredRequest, OpenStreams
from ragcache_integrations.rag.call import (
    OPTIONS,
    ChunkReuseSetting,
    check_option,
    options_of,
    plan_chat,
    sent_settings,
    with_headers,
)
from ragcache_integrations.rag.handles import HoldsHandles, check_engine

DEFAULT_TIMEOUT_S = 600.0
_SETTINGS = frozenset(inspect.signature(OpenAI.__init__).parameters) - {"self", "kwargs"}
"""What ``OpenAILike`` takes besides its fields."""

_NOT_CHAT = "it goes to the completions endpoint, where no documents are known"

_T = TypeVar("_T")


class RAGCacheLLM(HoldsHandles, OpenAILike):  # type: ignore[misc]
    """An LLM on a RAGCache engine: chat, completion, streaming and tool calls, sync and async.

    ::

        engine = Engine.launch("Qwen/Qwen3-0.6B")
        llm = RAGCacheLLM(engine=engine, temperature=0)

    Without an engine it connects to the server at ``api_base`` (or ``base_url``), by default ``RAGCACHE_BASE_URL`` of
    the environment, with ``api_key``, by default ``RAGCACHE_API_KEY``; :meth:`close` then closes that connection. An
    engine that was given is the caller's to close. Further arguments are those of ``OpenAILike``; what it does not
    know is refused. ``additional_kwargs`` are sent with every request.

    Documents whose text is in the prompt are named to the engine: nodes that any retriever of LlamaIndex returned
    recently in this process. If long prompts show none, one warning says so.

    With ``api_base``, a request whose server goes away before its first token waits for it and is sent again. A
    stream that had begun continues where it was cut, and ``additional_kwargs["ragcache"]`` says how often
    (``num_resumes``), and whether it continued with another random state (``is_resampled``).
    ``restart_timeout_s``, ``hang_timeout_s`` and ``first_token_timeout_s`` are those of ``Engine.connect``.

    Requests go to the chat endpoint. One that is made with ``use_chat_completions=False`` (all, for a model without a
    chat template: ``is_chat_model=False``) goes to the completions endpoint, where the documents are not known.

    A ``tokenizer`` is ``OpenAILike``'s, for its ``max_tokens``: an object with ``encode``. The server finds the tokens
    of documents.

    With an ``answer_cache`` a chat without tools is not asked at all where nearly the same question was, with the same
    settings and about the same versions of the same documents: opt-in and approximate, see :class:`AnswerCache`. Such
    an answer is marked, ``additional_kwargs["ragcache"]["answer_cache"]``, and emits a :class:`CachedAnswerEvent`.

    ``chunk_reuse``, of the LLM or of a call, switches chunk reuse, which is approximate; see ``engine.stream()``.
    ``deduplicate``, of the LLM or of a call, replaces a document that the chat shows already by a reference
    (``[shown above: "Zorval was a company ..."]``).

    ``ttft_slo``, of the LLM or of a call, is the target time to first token, in seconds from sending the request. The
    prompt is sent unchanged if it is predicted in time. Otherwise its documents get the order with the longest cached
    prefix, or chunk reuse is used, if the engine has it and is calibrated (``chunk_reuse=False`` excludes it).
    ``additional_kwargs["ragcache"]["deadline"]`` and :class:`CacheStatsEvent` have the choice and the reason.

    Errors of requests are instances of the OpenAI SDK's types as well: an ``EngineUnreachableError`` of
    ``openai.APIConnectionError``.

    Raises:
        ConfigError: neither an engine nor an address, or both; ``chunk_reuse``, ``ttft_slo`` or ``deduplicate`` is not
            what it may be. A time that cannot work, or one that was set together with an engine. An argument, here or
            of a call, that there is not. ``n`` above 1 where one text is returned: a stream holds the first answer.
        EngineError: the server at that address cannot be used.
    """

    api_key: str | None = Field(default=None, exclude=True, repr=False)
    chunk_reuse: ChunkReuseSetting = Field(
        default=None, description="Chunk reuse: whether, and with which settings; None leaves it to the engine."
    )
    answer_cache: AnswerCache | None = Field(default=None, exclude=True, repr=False)

    ttft_slo: float | None = Field(
        default=None, description="TTFT SLO: the target time to first token, in seconds; None for none."
    )

    deduplicate: bool = Field(
        default=False,
        description="Whether a document that an earlier message of a chat shows is referred to, and not sent again.",
    )

    _engine: EngineClient = PrivateAttr()
    _owns_engine: bool = PrivateAttr(default=False)
    _open_streams: OpenStreams | None = PrivateAttr(default=None)
    _hint: DocumentHint = PrivateAttr(default_factory=lambda: DocumentHint(CURE))

    def __init__(
        self,
        engine: EngineClient | None = None,
        *,
        api_base: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        restart_timeout_s: float | None = RESTART_TIMEOUT_S,
        hang_timeout_s: float | None = HANG_TIMEOUT_S,
        first_token_timeout_s: FirstTokenTimeout = AUTO,
        **kwargs: Any,
    ) -> None:
        address = api_base or base_url
        check_engine(engine, "api_base=")
        if engine is not None and address:
            raise ConfigError("engine= and api_base= were both given: pass the engine, or the address of one")
        if unknown := sorted(kwargs.keys() - _SETTINGS - type(self).model_fields.keys()):
            raise ConfigError(
                f"RAGCacheLLM knows no {unknown[0]!r}: what every request sends goes into additional_kwargs="
                f"{{{unknown[0]!r}: ...}}, and vLLM's own (top_k, min_p, cache_salt, ...) into "
                f"additional_kwargs={{'extra_body': {{...}}}}"
            )
        for name in kwargs.keys() & set(OPTIONS):
            check_option(name, kwargs[name])
        if isinstance(tokenizer, str | os.PathLike):
            check_tokenizer(tokenizer)
        recovery = recovery_settings(
            has_engine=engine is not None,
            restart_timeout_s=restart_timeout_s,
            hang_timeout_s=hang_timeout_s,
            first_token_timeout_s=first_token_timeout_s,
        )
        owns_engine = engine is None
        if engine is None:
            if not (address := address or os.environ.get(BASE_URL_ENV)):
                raise ConfigError(f"no engine: pass engine=Engine.launch(...), or api_base=, or set {BASE_URL_ENV}")
            key = os.environ.get(API_KEY_ENV) if api_key is None else api_key
            engine = Engine.connect(address, api_key=key, **recovery)
        super().__init__(
            **{
                "context_window": engine.max_model_len,
                "is_chat_model": True,
                "is_function_calling_model": True,
                **kwargs,
                "model": model or engine.model,
                "api_base": engine.base_url,
                "api_key": engine.api_key,
                "tokenizer": tokenizer,
                "timeout": timeout,
                "max_retries": 0,  # the engine's http clients retry where it is safe
                "http_client": engine.http_client(),
                "async_http_client": engine.http_async_client(),
            }
        )
        self._engine = engine
        self._owns_engine = owns_engine
        engine.integration.prompts.expect_settings(self._settings_of({}, self._own_body({})))
        if self.answer_cache is not None:
            engine.integration.answer_caches.add(self.answer_cache)

    @classmethod
    def class_name(cls) -> str:
        return "RAGCacheLLM"

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> RAGCacheLLM:
        """Return the LLM that ``to_dict`` described, on ``engine=`` if it is given, else at the same address."""
        if kwargs.get("engine") is not None:
            data = {name: value for name, value in data.items() if name != "api_base"}
        llm: RAGCacheLLM = super().from_dict(data, **kwargs)
        return llm

    @property
    def engine(self) -> EngineClient:
        """The engine that answers."""
        return self._engine

    def prepare(
        self, messages: Sequence[ChatMessage], *, is_streamed: bool, **kwargs: Any
    ) -> Callable[[], Speculation]:
        """Return a callable that starts this chat speculatively; a chat with the same arguments adopts its answer.

        Publishes nothing. See ``SpeculationClient.prepare``, also for the errors.
        """

        uncached = self.model_copy(update={"answer_cache": None})

        def ask() -> None:
            if not self.is_chat_model:
                prompt = self.messages_to_prompt(messages)
                next(self._stream_complete(prompt, **kwargs)) if is_streamed else self._complete(prompt, **kwargs)
            elif is_streamed:
                next(uncached._stream_chat(messages, **kwargs))
            else:
                uncached._chat(messages, **kwargs)

        return self._engine.integration.speculation.prepare(ask)

    def close(self) -> None:
        """Close the connection that ``api_base`` opened; an engine that was given stays open."""
        if self._owns_engine:
            self._engine.close()

    # What a reader gets: generators that cancel the request in the engine when they are closed.

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer. Closing the generator cancels the request in the engine."""
        request, streams = self._one_request()
        return _closing(super(RAGCacheLLM, request).stream_chat(messages, **kwargs), streams)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the answer. Closing the generator cancels the request in the engine."""
        request, streams = self._one_request()
        return _closing(super(RAGCacheLLM, request).stream_complete(prompt, formatted, **kwargs), streams)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer. Closing the generator cancels the request in the engine."""
        request, streams = self._one_request()
        return _aclosing(await super(RAGCacheLLM, request).astream_chat(messages, **kwargs), streams)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream the answer. Closing the generator cancels the request in the engine."""
        request, streams = self._one_request()
        return _aclosing(await super(RAGCacheLLM, request).astream_complete(prompt, formatted, **kwargs), streams)

    def _one_request(self) -> tuple[RAGCacheLLM, OpenStreams]:
        request = self.model_copy()
        request._open_streams = OpenStreams()
        return request, request._open_streams

    # What OpenAILike calls: one method per way to ask the chat endpoint, and the completions endpoint.

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self._check_one_answer(kwargs)
        cached_call = self._cached_chat(messages, kwargs)
        if cached_call is not None and (kept := cached_call.find()) is not None:
            return kept
        request = self._plan(messages, kwargs)
        with translate_errors_as_openai():
            response: ChatResponse = super()._chat(messages, **request.body)
        response = request.finish(response)
        return response if cached_call is None else cached_call.keep(response)

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self._check_one_answer(kwargs)
        cached_call = await asyncio.to_thread(self._cached_chat, messages, kwargs)
        if cached_call is not None and (kept := await asyncio.to_thread(cached_call.find)) is not None:
            return kept
        request = await asyncio.to_thread(self._plan, messages, kwargs)
        with translate_errors_as_openai():
            response: ChatResponse = await super()._achat(messages, **request.body)
        response = await request.afinish(response)
        return response if cached_call is None else await asyncio.to_thread(cached_call.keep, response)

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        cached_call = self._cached_chat(messages, kwargs)
        if cached_call is not None and (kept := cached_call.find()) is not None:
            return (response for response in (kept,))
        request = self._plan(messages, kwargs)
        responses = request.stream(super()._stream_chat(messages, **request.body))
        return responses if cached_call is None else cached_call.keep_last(responses)

    async def _astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        cached_call = await asyncio.to_thread(self._cached_chat, messages, kwargs)
        if cached_call is not None and (kept := await asyncio.to_thread(cached_call.find)) is not None:
            return just(kept)
        request = await asyncio.to_thread(self._plan, messages, kwargs)
        responses = request.astream(await super()._astream_chat(messages, **request.body))
        return responses if cached_call is None else cached_call.akeep_last(responses)

    def _cached_chat(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> CachedChat | None:
        """Return the lookup of a chat in the answer cache; ``None`` without a cache, and with tools."""
        if self.answer_cache is None or kwargs.get("tools"):
            return None
        body = self._get_model_kwargs(**sent_settings(kwargs))
        settings = [{**body, "extra_body": self._own_body(kwargs)}, options_of(self, kwargs)]
        sent = to_openai_message_dicts(messages, model=self.model)
        return CachedChat(self.answer_cache, sent, settings, self.model)  # type: ignore[arg-type]

    def _complete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        self._check_one_answer(kwargs)
        request = self._plan_text(kwargs)
        with translate_errors_as_openai():
            response: CompletionResponse = super()._complete(prompt, **request.body)
        return request.finish(response)

    async def _acomplete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        self._check_one_answer(kwargs)
        request = self._plan_text(kwargs)
        with translate_errors_as_openai():
            response: CompletionResponse = await super()._acomplete(prompt, **request.body)
        return await request.afinish(response)

    def _stream_complete(self, prompt: str, **kwargs: Any) -> CompletionResponseGen:
        request = self._plan_text(kwargs)
        return request.stream(super()._stream_complete(prompt, **request.body))

    async def _astream_complete(self, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
        request = self._plan_text(kwargs)
        return request.astream(await super()._astream_complete(prompt, **request.body))

    @translate_errors_as_openai()
    def _plan(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> MeasuredRequest:
        options, kwargs = options_of(self, kwargs), sent_settings(kwargs)
        check_settings(self._get_model_kwargs(**kwargs), is_chat=True)
        own_body = self._own_body(kwargs)
        messages_sent: Any = to_openai_message_dicts(messages, model=self.model)
        plan = plan_chat(self._engine, self._hint, messages_sent, options, self._settings_of(kwargs, own_body))
        body = {**kwargs, "extra_body": merge_bodies(own_body, plan.extra_body)}
        return MeasuredRequest(self._engine, plan, body, self.model)

    def _plan_text(self, kwargs: Mapping[str, Any]) -> MeasuredRequest:
        own_body, ttft_slo = self._own_body(kwargs), options_of(self, kwargs)["ttft_slo"]
        deadline = None if ttft_slo is None else unplanned(check_ttft_slo(ttft_slo), _NOT_CHAT)
        kwargs = sent_settings(kwargs)  # no documents are known here
        check_settings(self._get_model_kwargs(**kwargs), is_chat=False)
        check_sendable({**self.additional_kwargs, **kwargs}, "the request")
        plan = RequestPlan(deadline=deadline)
        return MeasuredRequest(self._engine, plan, {**kwargs, "extra_body": own_body}, self.model)

    def _check_one_answer(self, kwargs: Mapping[str, Any]) -> None:
        check_one_answer({**self.additional_kwargs, **kwargs, "extra_body": self._own_body(kwargs)})

    def _settings_of(self, kwargs: Mapping[str, Any], own_body: Mapping[str, Any]) -> dict[str, Any]:
        given = {"model": self.model, **self.additional_kwargs, **kwargs, "extra_body": own_body}
        return with_headers(given, self.default_headers)

    def _own_body(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return merge_bodies(self.additional_kwargs.get("extra_body"), kwargs.get("extra_body"))

    def _get_model_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop("use_chat_completions", None)  # LlamaIndex's own switch, which it would send on
        body: dict[str, Any] = super()._get_model_kwargs(**kwargs)
        if "extra_body" in kwargs:
            body["extra_body"] = kwargs["extra_body"]
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True, **body.get("stream_options", {})}
        return body

    def _get_client(self) -> Any:
        client = super()._get_client()
        return client if self._open_streams is None else self._open_streams.watch(client)

    def _get_aclient(self) -> Any:
        client = super()._get_aclient()
        return client if self._open_streams is None else self._open_streams.awatch(client)


def _closing(responses: Iterator[_T], streams: OpenStreams) -> Generator[_T, None, None]:
    try:
        yield from responses
    finally:
        streams.close()


async def _aclosing(responses: AsyncIterator[_T], streams: OpenStreams) -> AsyncGenerator[_T, None]:
    try:
        async for response in responses:
            yield response
    finally:
        await streams.aclose()
