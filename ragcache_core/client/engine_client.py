"""Asking a server: generation, statistics, and the clients that the frameworks' doors need."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from typing import Any

import httpx
import openai

from ragcache_core.client.generation import (
    AnswerReader,
    Generation,
    GenerationChunk,
    Prompt,
    streamed_body,
    whole,
)
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.client.http.transport import AsyncRetryingTransport, RetryingTransport, ServerWatch
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes
from ragcache_core.client.ordering.document_order import OrderingClient, RememberedOrders
from ragcache_core.client.prompts.client import PromptClient
from ragcache_core.client.prompts.layout_learner import LayoutLearner
from ragcache_core.client.prompts.request_plan import RememberedDocuments, RequestPlan, plan_rendered
from ragcache_core.client.prompts.tokenizer import checked_tokenizer
from ragcache_core.client.server_info import Handshake, ModelCard
from ragcache_core.client.speculation.client import SpeculationClient
from ragcache_core.client.speculation.engine_load import LoadRoute
from ragcache_core.client.speculation.manager import SpeculationManager
from ragcache_core.client.stats.cache_stats import CacheStatsRoutes
from ragcache_core.client.stats.server_metrics import parse_metrics
from ragcache_core.client.warm_imports import importing_requests
from ragcache_core.errors import TokenizerUnavailableError
from ragcache_core.prompt import PromptTokenizer, RenderedPrompt
from ragcache_core.stats import EngineStats, RequestStats
from ragcache_core.wire import ChunkReuseOption, check_sendable, check_text

FindTokenizer = Callable[[Handshake, ModelCard], PromptTokenizer]
"""Returns the tokenizer of a server's model, or raises ``TokenizerUnavailableError``."""
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class EngineClient(PromptClient, SpeculationClient, OrderingClient):
    """The one way to ask a server that runs. Its methods may be called by any thread, the async ones from any loop.

    Attributes:
        model: the name under which the server serves its model.
        base_url: the root of its OpenAI protocol, ``http://host:port/v1``.
        api_key: the key that it asks for.
        max_model_len: its context window in tokens.
    """

    model: str
    max_model_len: int

    def __init__(self, base_url: str, api_key: str, watch: ServerWatch | None) -> None:
        """Make the clients, and ask nothing yet: :meth:`_shake_hands` does. ``watch`` is the server's owner."""
        self.base_url = base_url
        self.api_key = api_key
        self._watch = watch
        self._speculations = SpeculationManager(base_url, api_key)
        self._transport = RetryingTransport(watch, self._speculations)
        self._async_transport = AsyncRetryingTransport(watch, self._speculations)
        self._http = httpx.Client(transport=self._transport, timeout=_TIMEOUT)
        self._http_async = httpx.AsyncClient(transport=self._async_transport, timeout=_TIMEOUT)
        self._openai = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=self._http, max_retries=0)
        self._openai_async = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=self._http_async, max_retries=0
        )
        self._cache_stats = CacheStatsRoutes(base_url, api_key, self._http, self._http_async)
        self._load = LoadRoute(base_url, api_key, self._http, self._http_async)
        self._remembered = RememberedDocuments()
        self._reordered = RememberedOrders()
        self._mirror = CachedPrefixes(base_url, api_key)
        self._bound = None

    def _shake_hands(self, find_tokenizer: FindTokenizer | None) -> None:
        """Ask the server about itself; ``None`` does without a tokenizer."""
        server = Handshake(self._http, self.base_url, self.api_key)
        card = server.model_card()
        self.model, self.max_model_len = card.name, card.max_model_len
        with importing_requests():
            self._tokenizer = (
                TokenizerUnavailableError("this connection was made with tokenizer=False: leave that out")
                if find_tokenizer is None
                else checked_tokenizer(
                    lambda: find_tokenizer(server, card), lambda messages: server.token_ids(card.name, messages)
                )
            )
        self._learner = LayoutLearner(self._tokenizer_at_hand(), max_model_len=self.max_model_len)

    def _close_connections(self) -> None:
        self._mirror.close()
        self._speculations.close()
        self._async_transport.close()
        self._transport.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        chunk_reuse: ChunkReuseOption = None,
        **sampling: Any,
    ) -> Generation:
        """Return the whole answer to ``prompt``; see :meth:`stream`."""
        asked = {"max_tokens": max_tokens, "temperature": temperature, "chunk_reuse": chunk_reuse, **sampling}
        return whole(list(self.stream(prompt, **asked)))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        chunk_reuse: ChunkReuseOption = None,
        **sampling: Any,
    ) -> Generator[GenerationChunk]:
        """Yield the answer to ``prompt`` as it is generated; closing the iterator ends the request in the engine.

        Args:
            prompt: a text to continue, a :class:`RenderedPrompt`, or messages of the OpenAI protocol.
            max_tokens: the most tokens to generate; fewer where the context window ends before.
            temperature: 0 is greedy.
            chunk_reuse: whether documents are reused behind others than they were computed behind, which is
                approximate: ``True``, ``False``, or a mapping of ``selection``, ``quality`` or ``alpha``, and
                ``max_recompute``. ``None`` leaves it to the engine (``CacheConfig.chunk_reuse``; without it there is
                none).
            **sampling: other fields of the OpenAI protocol, ``stop=["\\n"]``; vLLM's own go into ``extra_body``.

        Raises:
            PromptTooLongError, RequestRejectedError, EngineDiedError, EngineUnreachableError, ...
            ConfigError: ``chunk_reuse`` is something else, or the prompt or a setting cannot be sent: text that is no
                Unicode, a number that is not finite or beyond 64 bits.
        """
        plan, body = self._request(prompt, max_tokens, temperature, chunk_reuse, sampling)
        reader = AnswerReader(plan)
        create: Any = self._openai.chat.completions.create if "messages" in body else self._openai.completions.create
        with translate_errors(), create(**body) as events:
            for event in events:
                if (chunk := reader.read(event)) is not None:
                    yield chunk
        yield reader.last(self.complete_stats(reader.stats(), reader.response_id))

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        chunk_reuse: ChunkReuseOption = None,
        **sampling: Any,
    ) -> Generation:
        """Return the whole answer to ``prompt``; see :meth:`stream`. Cancelling it ends the request in the engine."""
        asked = {"max_tokens": max_tokens, "temperature": temperature, "chunk_reuse": chunk_reuse, **sampling}
        async with aclosing(self.astream(prompt, **asked)) as chunks:
            return whole([chunk async for chunk in chunks])

    async def astream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        chunk_reuse: ChunkReuseOption = None,
        **sampling: Any,
    ) -> AsyncGenerator[GenerationChunk]:
        """Yield the answer to ``prompt`` as it is generated; see :meth:`stream`."""
        plan, body = self._request(prompt, max_tokens, temperature, chunk_reuse, sampling)
        reader = AnswerReader(plan)
        api = self._openai_async
        create: Any = api.chat.completions.create if "messages" in body else api.completions.create
        with translate_errors():
            async with await create(**body) as events:
                async for event in events:
                    if (chunk := reader.read(event)) is not None:
                        yield chunk
        yield reader.last(await self.acomplete_stats(reader.stats(), reader.response_id))

    def stats(self) -> EngineStats:
        """Return the server's counters, and those of its cache unless it is plain vLLM."""
        with translate_errors():
            page = self._http.get(self._metrics_url()).raise_for_status().text
        return self._cache_stats.add_to(parse_metrics(page, num_restarts=self._num_restarts()))

    async def astats(self) -> EngineStats:
        """Return the server's counters; see :meth:`stats`."""
        with translate_errors():
            page = (await self._http_async.get(self._metrics_url())).raise_for_status().text
        return await self._cache_stats.aadd_to(parse_metrics(page, num_restarts=self._num_restarts()))

    # For the frameworks' doors

    def http_client(self) -> httpx.Client:
        """Return the client to ask the server with: it sends again what a death cut off. The engine closes it."""
        return self._http

    def http_async_client(self) -> httpx.AsyncClient:
        """Return the asynchronous client, good for any event loop. The engine closes it."""
        return self._http_async

    def complete_stats(self, stats: RequestStats, response_id: str | None) -> RequestStats:
        """Return the statistics of an answered request with what the engine itself says of it.

        ``response_id`` is the ``id`` of the response, or of its stream's chunks. Never fails: where the engine does
        not say (plain vLLM has no such figures), ``stats`` come back as they are.
        """
        return self._cache_stats.complete(stats, response_id)

    async def acomplete_stats(self, stats: RequestStats, response_id: str | None) -> RequestStats:
        """Do :meth:`complete_stats` without blocking the event loop."""
        return await self._cache_stats.acomplete(stats, response_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model!r}, base_url={self.base_url!r})"

    def _request(
        self,
        prompt: Prompt,
        max_tokens: int,
        temperature: float,
        chunk_reuse: ChunkReuseOption,
        sampling: Mapping[str, Any],
    ) -> tuple[RequestPlan, dict[str, Any]]:
        settings = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **sampling}
        check_sendable(settings, "the request")
        match prompt:
            case str():
                check_text(prompt, "the prompt")
                plan = RequestPlan()
            case RenderedPrompt():
                limit = self.max_model_len
                plan = plan_rendered(prompt, max_model_len=limit, reordered=self._reordered, chunk_reuse=chunk_reuse)
            case _:
                plan = self.plan_chat(prompt, settings=sampling, chunk_reuse=chunk_reuse)
        if plan.num_prompt_tokens is not None:
            settings["max_tokens"] = min(max_tokens, self.max_model_len - plan.num_prompt_tokens)
        return plan, streamed_body(prompt, plan, settings)

    def _metrics_url(self) -> str:
        return f"{self.base_url.removesuffix('/v1')}/metrics"

    def _num_restarts(self) -> int:
        return self._watch.run - 1 if self._watch is not None else 0
