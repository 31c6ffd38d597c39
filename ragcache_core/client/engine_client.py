"""Asking a server: generation, statistics, prompts, and the parts that integrations of frameworks use."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from weakref import WeakSet

import httpx

from ragcache_core.client.batch import answer_batch
from ragcache_core.client.cache import CacheRoutes, DocumentDependent, DocumentRoutes, PrefetchRoute, listed
from ragcache_core.client.deadline import DeadlineClient, DeadlineRoutes
from ragcache_core.client.generation import (
    AnswerReader,
    Generation,
    GenerationChunk,
    Prompt,
    check_one_answer,
    check_prompt,
    check_settings,
    join_chunks,
    streamed_body,
)
from ragcache_core.client.http.attempt import RetryPolicy, ServerWatch
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.client.http.resume import ResumedAnswers
from ragcache_core.client.http.routing import Replicas
from ragcache_core.client.http.transport import AsyncRetryingTransport, RetryingTransport
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes, CachedPrefixIndex
from ragcache_core.client.ordering.document_order import Arrangement, OrderingClient, RememberedOrders
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, FormatDocuments, KVScopes
from ragcache_core.client.prompts.client import PromptClient
from ragcache_core.client.prompts.request_plan import RequestPlan
from ragcache_core.client.prompts.server_tokenizer import ServerTokenizer
from ragcache_core.client.registration import DocumentRegistrations
from ragcache_core.client.server_api import ServerAPI, importing_requests
from ragcache_core.client.speculation.client import LoadRoute, SpeculationClient
from ragcache_core.client.speculation.speculation import SpeculationManager
from ragcache_core.client.stats.cache_stats import METRICS, CacheStatsRoutes, parse_metrics
from ragcache_core.client.tracing import RequestTraces
from ragcache_core.client.warming import WarmingClient, WarmingReceipt, check_bound, known_scope
from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DocumentOrder
from ragcache_core.prompt import ChatMessage, RenderedPrompt, check_prompt_fits
from ragcache_core.runtime.event_loop_thread import EventLoopThread
from ragcache_core.runtime.handle import Handle, OneProcess
from ragcache_core.stats import EngineStats, ForgetReceipt, RegistrationReceipt
from ragcache_core.types import DocId, Document
from ragcache_core.wire import ChunkReuseOption, check_sendable, check_text

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True, slots=True)
class Integration:
    """What an integration of a framework needs of an engine, besides what applications use."""

    prompts: PromptClient
    speculation: SpeculationClient
    ordering: OrderingClient
    deadlines: DeadlineClient
    stats: CacheStatsRoutes
    answer_caches: WeakSet[DocumentDependent]
    watch: ServerWatch
    cached_prefixes: CachedPrefixIndex
    prefetching: PrefetchRoute
    api: ServerAPI


class EngineClient(Handle, ABC):
    """Requests to a running server. Its methods may be called by any thread, the async ones from any loop.

    A fork of the process has no threads of its parent: there every call raises ``EngineForkedError``, and ``close``
    does nothing.

    Attributes:
        model: the name under which the server serves its model.
        base_url: the root of its OpenAI protocol, ``http://host:port/v1``.
        api_key: the key that it asks for.
        max_model_len: its context window in tokens.
        cache: what the server has cached, to look into and act upon.
        integration: the parts that integrations of frameworks use.
    """

    model: str
    max_model_len: int
    _integration: Integration

    def __init__(
        self,
        base_url: str,
        api_key: str,
        watch: ServerWatch,
        policy: RetryPolicy,
        *,
        replicas: Replicas | None = None,
        cached_prefixes: CachedPrefixIndex | None = None,
    ) -> None:
        """Make the clients, and ask nothing yet: :meth:`_handshake` does. ``watch`` knows how the server is.

        A fleet's ``replicas`` get the requests to ``base_url``, which is nowhere, and ``cached_prefixes`` are theirs.
        """
        self.base_url = base_url
        self.api_key = api_key
        self._process = OneProcess()
        self._watch = watch
        self._speculations = SpeculationManager(
            base_url, api_key, watch, resume_streams=policy.resume_streams, replicas=replicas
        )
        traces, self._resumed = RequestTraces(), ResumedAnswers()
        parts = (watch, self._speculations, policy, traces, replicas, self._resumed)
        self._transport, self._async_transport = RetryingTransport(*parts), AsyncRetryingTransport(*parts)
        self._http = httpx.Client(transport=self._transport, timeout=_TIMEOUT)
        self._http_async = httpx.AsyncClient(transport=self._async_transport, timeout=_TIMEOUT)
        self._api = ServerAPI(base_url, api_key, self._http, self._http_async)
        self._registrations = DocumentRegistrations(self._api)
        self._cache_stats = CacheStatsRoutes(self._api, traces, self._resumed, self._registrations.saw)
        self.cache = CacheRoutes(self._api)
        self._documents = DocumentRoutes(self._api)
        self._prefetching: PrefetchRoute = PrefetchRoute(self._api)
        self._cached_prefixes = cached_prefixes or CachedPrefixes(base_url, api_key)

    @property
    def integration(self) -> Integration:
        """The parts that integrations of frameworks use.

        Raises:
            EngineForkedError: this is a fork of the process that made the engine.
        """
        self._process.check()
        return self._integration

    @cached_property
    def _openai(self) -> OpenAI:
        from openai import OpenAI  # half a start of the command line, which many commands do without

        return OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=self._http, max_retries=0)

    @cached_property
    def _openai_async(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=self._http_async, max_retries=0)

    def _handshake(self, *, is_for_requests: bool = True) -> None:
        """Ask the server about itself. Unless it ``is_for_requests``, import nothing for requests yet."""
        server = self._api
        card = server.model_card()
        self.model, self.max_model_len = card.name, card.max_model_len
        tokenizer = ServerTokenizer(server, card.name)
        with importing_requests() if is_for_requests else nullcontext():
            tokenizer.connect()
        reordered, scopes = RememberedOrders(), KVScopes(card.name, self.api_key)
        load = LoadRoute(server)
        prompts = PromptClient(
            tokenizer,
            max_model_len=card.max_model_len,
            reordered=reordered,
            scopes=scopes,
        )
        self._scopes = scopes
        self._integration = Integration(
            prompts,
            SpeculationClient(
                server,
                model=card.name,
                max_model_len=card.max_model_len,
                speculations=self._speculations,
                load=load,
                prefetching=self._prefetching,
                scopes=scopes,
                prompts=prompts,
            ),
            OrderingClient(self._cached_prefixes, reordered),
            DeadlineClient(prompts, self._cached_prefixes, DeadlineRoutes(server)),
            self._cache_stats,
            self._documents.answer_caches,
            self._watch,
            self._cached_prefixes,
            self._prefetching,
            server,
        )
        self._warming = WarmingClient(self._integration.speculation, load, self._cached_prefixes, scopes, server)

    @abstractmethod
    def close(self, grace_s: float = GRACE_S) -> None:
        """Close the connections, and end what was launched."""

    async def aclose(self) -> None:
        """Do :meth:`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def _close_connections(self) -> None:
        self._registrations.close()
        self._cached_prefixes.close()
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
        check_one_answer(sampling)
        request_options = {"max_tokens": max_tokens, "temperature": temperature, "chunk_reuse": chunk_reuse, **sampling}
        return join_chunks(list(self.stream(prompt, **request_options)))

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
            chunk_reuse: chunk reuse, which is approximate: ``True``, ``False``, or a mapping of ``selection``,
                ``quality`` or ``alpha``, and ``max_recompute``. With ``"store"`` the answer is exact, and its documents
                are stored for later reuse. ``None`` leaves it to the engine (``CacheConfig.chunk_reuse``).
            **sampling: other fields of the OpenAI protocol, ``stop=["\\n"]``; vLLM's own go into ``extra_body``. With
                ``n`` above 1 the stream holds the first answer; :meth:`generate` refuses it.

        Raises:
            PromptTooLongError, RequestRejectedError, EngineDiedError, EngineUnreachableError: the request failed.
            ConfigError: ``chunk_reuse`` is something else, or the prompt or a setting cannot be sent: text that is no
                Unicode, a number that is not finite or beyond 64 bits, a setting that there is not.
        """
        plan, body = self._request(prompt, max_tokens, temperature, chunk_reuse, sampling)
        reader = AnswerReader(plan)
        create: Any = self._openai.chat.completions.create if "messages" in body else self._openai.completions.create
        with translate_errors(), create(**body) as events:
            for event in events:
                if (chunk := reader.read(event)) is not None:
                    yield chunk
        yield reader.last(self._cache_stats.complete(reader.stats(), reader.response_id, plan.doc_ids))

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
        check_one_answer(sampling)
        request_options = {"max_tokens": max_tokens, "temperature": temperature, "chunk_reuse": chunk_reuse, **sampling}
        async with aclosing(self.astream(prompt, **request_options)) as chunks:
            return join_chunks([chunk async for chunk in chunks])

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
        yield reader.last(await self._cache_stats.acomplete(reader.stats(), reader.response_id, plan.doc_ids))

    @overload
    def batch(
        self, prompts: Sequence[Prompt], *, return_exceptions: Literal[True], **options: Any
    ) -> list[Generation | Exception]: ...

    @overload
    def batch(
        self, prompts: Sequence[Prompt], *, return_exceptions: Literal[False] = False, **options: Any
    ) -> list[Generation]: ...

    def batch(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **options: Any
    ) -> list[Generation] | list[Generation | Exception]:
        """Return the whole answers to ``prompts``, in their order.

        Requests are sent in the order of their prompts' prefixes: prompts with a common prefix follow each other, and
        a small cache computes these tokens once. Each answer is that of :meth:`generate` for its prompt.

        Args:
            prompts: as of :meth:`stream`.
            return_exceptions: return what a prompt's request raised in place of its answer. By default the first
                exception ends the batch.
            **options: ``max_concurrency``, the most requests in flight (64), and the settings of :meth:`generate`,
                which all requests have.

        Raises:
            ConfigError: ``prompts`` is no list of prompts, or ``max_concurrency`` is less than 1.
            RAGCacheError: as of :meth:`generate`.
        """
        loop = EventLoopThread("ragcache-batch")
        try:
            return loop.run(self.abatch(prompts, return_exceptions=return_exceptions, **options)).result()  # type: ignore[call-overload,no-any-return]
        finally:
            loop.close()

    @overload
    async def abatch(
        self, prompts: Sequence[Prompt], *, return_exceptions: Literal[True], **options: Any
    ) -> list[Generation | Exception]: ...

    @overload
    async def abatch(
        self, prompts: Sequence[Prompt], *, return_exceptions: Literal[False] = False, **options: Any
    ) -> list[Generation]: ...

    async def abatch(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **options: Any
    ) -> list[Generation] | list[Generation | Exception]:
        """Return the whole answers to ``prompts``; see :meth:`batch`. Cancelling it ends its requests."""
        return await answer_batch(self.agenerate, prompts, return_exceptions=return_exceptions, **options)

    def stats(self) -> EngineStats:
        """Return the server's counters, and those of its cache unless it is plain vLLM.

        Who has a tenant's key is told of his own cache alone.
        """
        return self._cache_stats.add_to(self._read(self._api.ask(METRICS)))

    async def astats(self) -> EngineStats:
        """Return the server's counters; see :meth:`stats`."""
        return await self._cache_stats.aadd_to(self._read(await self._api.aask(METRICS)))

    # Documents

    def forget(self, doc_ids: Iterable[DocId], *, wait_s: float = 30.0) -> ForgetReceipt:
        """Delete the KV of documents from GPU, host memory, disk and chunk reuse, and the KV behind them.

        When this returns, no request hits it. When the receipt ``is_complete``, no file of the cache holds a byte of
        it. Running requests keep their blocks until they finish. Documents are known by the ids that requests sent,
        from any client; other ids are reported as unknown. If a text has several ids, each of them deletes its KV.
        Answer caches of this engine's models delete the answers about the documents.

        Args:
            doc_ids: of the documents.
            wait_s: seconds to wait for running requests that use it, and for the disk; 0 to 600.

        Raises:
            RequestRejectedError: the server runs without RAGCache, or cannot forget.
            ConfigError: an invalid id. EngineUnreachableError, EngineDiedError, ...: it is unknown what was deleted:
                call it again.
        """
        doc_ids = listed(doc_ids)
        self._registrations.forget(doc_ids)
        return self._documents.forget(doc_ids, wait_s)

    async def aforget(self, doc_ids: Iterable[DocId], *, wait_s: float = 30.0) -> ForgetReceipt:
        """Remove the KV of documents; see :meth:`forget`."""
        doc_ids = listed(doc_ids)
        self._registrations.forget(doc_ids)
        return await self._documents.aforget(doc_ids, wait_s)

    def register(
        self, documents: Iterable[Document], *, progress: Callable[[int], object] | None = None
    ) -> RegistrationReceipt:
        """Register documents with the server, which then recognises them in prompts of any client.

        A text that is registered already is no change, so a registration that was interrupted can be repeated.

        Args:
            documents: with their ids, texts and access groups.
            progress: is called with the number of documents of each request that was answered.

        Returns:
            How many are registered, and why others are not.

        Raises:
            RequestRejectedError: the server recognises no documents.
            EngineUnreachableError, EngineDiedError, ...: some may be registered: repeat the call.
        """
        return self._registrations.register(documents, progress)

    def register_in_background(self, documents: Iterable[Document]) -> None:
        """Register documents that this client has not registered yet, without waiting; see :meth:`register`.

        A failure is logged once.
        """
        self._registrations.register_in_background(documents)

    def warm(self, documents: Iterable[Document], prompt: Callable[[Document], Prompt] | None = None) -> int:
        """Prefill documents, each as the first of its prompt, and return their number.

        ``prompt`` returns the prompt to prefill for a document; by default the bound one is used
        (:meth:`bind_prompt` with a ``PromptLayout``), and documents without a full block are skipped.

        Raises:
            ConfigError: there is no prompt, or its ``cache_salt`` or adapter is not known: see ``settings`` of
                :meth:`bind_prompt`. RAGCacheError: as of :meth:`generate`.
        """
        rendered, settings = self._warming_prompts(documents, prompt)
        for each in rendered:
            self.generate(each, max_tokens=1, **settings)
        return len(rendered)

    async def awarm(self, documents: Iterable[Document], prompt: Callable[[Document], Prompt] | None = None) -> int:
        """Prefill documents; see :meth:`warm`."""
        rendered, settings = self._warming_prompts(documents, prompt)
        for each in rendered:
            await self.agenerate(each, max_tokens=1, **settings)
        return len(rendered)

    def warm_paths(
        self,
        paths: Iterable[tuple[Sequence[Document], int]],
        *,
        prompt: BoundPrompt | None = None,
        on_path: Callable[[WarmingReceipt], object] = lambda _: None,
    ) -> WarmingReceipt:
        """Prefill prefixes in the engine's idle steps, ranked by their expected uses, and return when they are cached.

        Real requests go first. Cached prefixes are skipped, so a second call continues an interrupted one.
        ``ragcache_core.sim.warming.pick_paths`` picks prefixes; :meth:`bind_prompt` declares how they are shown. With
        chunk reuse the last document of each is stored for reuse as well.

        Args:
            paths: prefixes, as documents in prompt order, each with the number of the next 1,000 requests that are
                expected to begin with it. A prefix comes after its own beginning.
            prompt: what :meth:`bind_prompt` returned; by default the one that is bound.
            on_path: called after each prefix with the receipt so far.

        Raises:
            ConfigError: no prompt is bound, or it shows the question first, or a number of uses is out of bounds.
            EngineError: the engine takes no speculative requests, or went away: call again to go on.
        """
        bound = check_bound(prompt or self.integration.prompts.bound_prompt)
        return self._warming.warm(paths, bound, self.stats(), on_path)

    def _warming_prompts(
        self, documents: Iterable[Document], prompt: Callable[[Document], Prompt] | None
    ) -> tuple[list[Prompt], dict[str, Any]]:
        """Return what to prefill, and the settings of the requests that will show it."""
        bound = self.integration.prompts.bound_prompt
        if prompt is None and bound is None:
            raise ConfigError(
                "no prompt is known in which a document could be prefilled: bind a PromptLayout with "
                "engine.bind_prompt, or pass prompt=, a function that returns a document's prompt"
            )
        made: list[Prompt] = []
        for document in documents:
            if prompt is not None:
                made.append(prompt(document))
            elif bound is not None and (prefix := bound.prefix([document], [document])) is not None:
                made.append(prefix)
        return made, known_scope(self._scopes, bound).settings()

    def prefetch(self, prompt: Prompt, *, cache_salt: str | None = None, model: str | None = None) -> int:
        """Read the disk blocks of ``prompt`` into host memory, without a request and without waiting.

        A later prompt that begins with the same tokens hits them there. They are evicted as usual.

        Args:
            prompt: as that of :meth:`stream`; what comes after the documents need not be in it.
            cache_salt: of the later request.
            model: of the later request. KV of adapters is not on disk.

        Returns:
            the number of tokens whose KV is being read. 0 if none is only on disk, if they take more than a quarter of
            host memory, and without a disk tier.

        Raises:
            EngineError: the server cannot be asked.
            PromptTooLongError: it does not fit into the context window.
            TokenizerUnavailableError, ConfigError: see :meth:`tokenize`.
        """
        return self._prefetching.prefetch(self._token_ids(prompt), self._salt_of(prompt, cache_salt), model=model)

    async def aprefetch(self, prompt: Prompt, *, cache_salt: str | None = None, model: str | None = None) -> int:
        """Do :meth:`prefetch` without blocking the event loop."""
        token_ids = await asyncio.to_thread(self._token_ids, prompt)
        return await self._prefetching.aprefetch(token_ids, self._salt_of(prompt, cache_salt), model=model)

    def _salt_of(self, prompt: Prompt, cache_salt: str | None) -> str | None:
        if isinstance(prompt, RenderedPrompt):
            return self.integration.prompts.cache_salt_for(prompt, cache_salt)
        return cache_salt

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        check_prompt(prompt)
        token_ids = prompt.token_ids if isinstance(prompt, RenderedPrompt) else self.tokenize(prompt)
        check_prompt_fits(len(token_ids), self.max_model_len, num_output_tokens=0)
        return token_ids

    # Prompts

    @property
    def tokenizer(self) -> ServerTokenizer:
        """The server's tokenizer and chat template, which are asked over HTTP. Its calls block."""
        return self.integration.prompts.tokenizer

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a text (with the model's special tokens) or of messages, as the server has them.

        Raises:
            TokenizerUnavailableError: the server does not tell them. EngineError: it cannot be asked.
            ConfigError: it is no Unicode text, or no prompt.
        """
        check_prompt(prompt)
        return self.integration.prompts.tokenize(prompt)

    def remember_documents(
        self,
        documents: Iterable[Document],
        shown: Callable[[Document], str] | None = None,
        *,
        query: str | None = None,
    ) -> None:
        """Remember retrieved documents, which later chat requests show: they are recognised by their text.

        ``documents`` are those of one search, best first, and ``query`` is the question; ``shown`` returns a document's
        text as the prompt shows it. From the request that shows them the prompt's layout is learned, unless one is
        bound. Once this client has registered documents, those that are remembered are registered in the background.
        """
        found = list(documents)
        self.integration.prompts.remembered.add(found, shown, query=query)
        if self._registrations.is_used:
            self.register_in_background(found)

    def bind_prompt(
        self,
        prompt: Any,
        format_docs: FormatDocuments | None = None,
        *,
        context: str = "context",
        question: str = "question",
        is_default: bool = True,
        is_prefilled: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> BoundPrompt:
        """Return the prompt of a chain whose documents may be prefilled while they are still searched for.

        Of one that shows the question before the documents only the static part can be prefilled; a warning says so.

        Args:
            prompt: a prompt template of LangChain or LlamaIndex, a ``PromptLayout``, or a function of context and
                question that returns messages.
            format_docs: makes the context of the framework's documents, as in the chain. A ``PromptLayout`` needs none.
            context: the template's name of the documents (LlamaIndex: ``context_str``).
            question: the template's name of the question (LlamaIndex: ``query_str``).
            is_default: it is the prompt of every retriever that has none of its own.
            is_prefilled: only a prefill is asked ahead of a search's end; a whole answer needs no warning.
            settings: those of the requests that will show it which separate their KV:
                ``{"model": "my-adapter", "extra_body": {"cache_salt": "tenant-a"}}``. By default those of the requests
                so far; where these differ, nothing is prefilled.

        Raises:
            ConfigError: ``prompt`` cannot make messages of these variables.
        """
        return self.integration.prompts.bind_prompt(
            prompt,
            format_docs,
            context=context,
            question=question,
            is_default=is_default,
            is_prefilled=is_prefilled,
            settings=settings,
        )

    def arrange_documents(
        self,
        documents: Sequence[Document],
        order: DocumentOrder,
        *,
        keep_first: bool = False,
        prefix: bytes | None = None,
    ) -> Arrangement:
        """Return retrieved documents, the best first, in the order in which a prompt should show them.

        ``cache_aware`` goes by a local copy of what the engine has cached, which the first call begins to fetch; until
        it is there, and whenever the connection is lost, the documents stay as they are. Never waits for the server.

        Args:
            documents: what was retrieved, the best first.
            order: ``retrieval``, ``canonical`` or ``cache_aware``.
            keep_first: the best document stays in front.
            prefix: :func:`~ragcache_core.ordering.static_prefix_digest` of the prompt; without it the prefixes that
                the engine has seen last are tried.

        Raises:
            ValueError: there is no such order.
        """
        return self.integration.ordering.arrange(documents, order, keep_first=keep_first, prefix=prefix)

    # For clients of other makes

    def http_client(self) -> httpx.Client:
        """Return the client for requests to the server, which are sent again after a restart. The engine closes it."""
        return self._http

    def http_async_client(self) -> httpx.AsyncClient:
        """Return the asynchronous client, good for any event loop. The engine closes it."""
        return self._http_async

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
        prompts = self.integration.prompts
        settings = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **sampling}
        check_prompt(prompt)
        check_settings(settings, is_chat=not isinstance(prompt, str | RenderedPrompt))
        check_sendable(settings, "the request")
        match prompt:
            case str():
                check_text(prompt, "the prompt")
                plan = RequestPlan()
            case RenderedPrompt():
                plan = prompts.plan_rendered(prompt, settings=sampling, chunk_reuse=chunk_reuse)
            case _:
                plan = prompts.plan_chat(prompt, settings=sampling, chunk_reuse=chunk_reuse)
        if plan.prompt is not None:
            settings["max_tokens"] = min(max_tokens, self.max_model_len - len(plan.prompt.token_ids))
        return plan, streamed_body(prompt, plan, settings)

    def _read(self, page: str) -> EngineStats:
        return parse_metrics(page, num_restarts=self._watch.run - 1)
