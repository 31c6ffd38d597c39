"""The engine's door: launch vLLM's server as a child, or connect to one that runs elsewhere; then ask it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai

from ragcache_core.client.failures import translate_errors
from ragcache_core.client.generation import (
    AnswerReader,
    Generation,
    GenerationChunk,
    Prompt,
    streamed_body,
    whole,
)
from ragcache_core.client.handshake import Handshake
from ragcache_core.client.launch import launch_server
from ragcache_core.client.metrics import parse_metrics
from ragcache_core.client.plan import RememberedDocuments, RequestPlan, plan_chat, plan_rendered, server_renders
from ragcache_core.client.process import GRACE_S
from ragcache_core.client.supervisor import Supervisor
from ragcache_core.client.tokenizer import ModelTokenizer, checked_tokenizer
from ragcache_core.client.transport import AsyncRetryingTransport, RetryingTransport
from ragcache_core.config import CacheConfig
from ragcache_core.errors import EngineUnreachableError, TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptTokenizer, RenderedPrompt
from ragcache_core.stats import EngineStats
from ragcache_core.types import Document

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_open_engines: set[Engine] = set()
"""Engines that own a server, until they are closed: the end of the program closes them."""


class Engine:
    """A running vLLM server, and the one way to ask it.

    Make one with :meth:`launch` or :meth:`connect`. Both kinds do the same; a launched engine owns its server and ends
    it in :meth:`close`, at the end of a ``with`` block, at the end of the program, and when the program is killed.
    Every method may be called by any thread, the asynchronous ones from any event loop.

    Attributes:
        model: the name under which the server serves its model.
        base_url: the root of its OpenAI protocol, ``http://host:port/v1``.
        api_key: the key that it asks for.
        max_model_len: its context window in tokens.
        log_path: the log of a launched server.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        supervisor: Supervisor | None = None,
        tokenizer: Callable[[str], PromptTokenizer],
        log_path: Path | None = None,
    ) -> None:
        """Join the server at ``base_url``; use :meth:`launch` or :meth:`connect` instead.

        ``tokenizer`` is told the model that the server runs.
        """
        self.base_url = base_url
        self.api_key = api_key
        self.log_path = log_path
        self._supervisor = supervisor
        self._transport = RetryingTransport(supervisor)
        self._async_transport = AsyncRetryingTransport(supervisor)
        self._http = httpx.Client(transport=self._transport, timeout=_TIMEOUT)
        self._http_async = httpx.AsyncClient(transport=self._async_transport, timeout=_TIMEOUT)
        self._openai = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=self._http, max_retries=0)
        self._openai_async = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=self._http_async, max_retries=0
        )
        self._remembered = RememberedDocuments()
        self._closing = threading.Lock()
        _open_engines.add(self)
        try:
            server = Handshake(self._http, base_url, api_key)
            card = server.model_card()
            self.model: str = card.name
            self.max_model_len: int = card.max_model_len
            self._tokenizer = checked_tokenizer(
                lambda: tokenizer(card.root), lambda messages: server.token_ids(card.name, messages)
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def launch(
        cls,
        model: str,
        *,
        cache: CacheConfig | None = CacheConfig(),  # noqa: B008 (frozen)
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        tokenizer: str | None = None,
        startup_timeout_s: float = 600.0,
        max_restarts: int = 1,
        log_path: str | Path | None = None,
        progress: bool | Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        cancel: threading.Event | None = None,
        **vllm_args: object,
    ) -> Self:
        """Start a server for ``model`` as a child process and return it when it is ready.

        Args:
            model: a folder in Hugging Face format, or a name of the hub.
            cache: what to keep; ``None`` runs plain vLLM.
            host, port: where to listen; by default loopback and a free port.
            api_key: the key to ask for; by default a random one.
            tokenizer: folder or name of the tokenizer, if it is not the model's.
            startup_timeout_s: how long loading may take.
            max_restarts: how often the server is started again if it dies. A request in flight before its first
                token is sent again; afterwards it fails with :class:`EngineDiedError`.
            log_path: the server's log, kept; by default a new file in the user's log folder.
            progress: draw a progress bar on stderr; by default on a terminal. A function is told each stage instead.
            env: variables added to the server's environment.
            extra_args: arguments of vLLM's server as they are, ``["--max-model-len", "2048"]``.
            cancel: set it in another thread to give the launch up.
            **vllm_args: the same with underscores, ``max_model_len=2048``.

        Raises:
            EngineStartError: no model there, the port is taken, or the server ended or was not ready in time.
            EngineClosedError: the launch was given up.
            ConfigError: an argument that has a door of its own.
        """
        server = launch_server(
            model,
            cache=cache,
            host=host,
            port=port,
            api_key=api_key,
            tokenizer=tokenizer,
            startup_timeout_s=startup_timeout_s,
            max_restarts=max_restarts,
            log_path=None if log_path is None else Path(log_path),
            progress=progress,
            env=env,
            extra_args=extra_args,
            cancel=cancel,
            vllm_args=vllm_args,
        )
        return cls(
            server.base_url,
            server.api_key,
            supervisor=server.supervisor,
            tokenizer=lambda _: server.tokenizer(),
            log_path=server.log_path,
        )

    @classmethod
    async def alaunch(cls, model: str, **settings: Any) -> Self:
        """Do :meth:`launch` without blocking the event loop. If it is cancelled, the server is ended."""
        cancel = threading.Event()

        def launch() -> Any:
            engine = cls.launch(model, cancel=cancel, **settings)
            if cancel.is_set():
                engine.close()
            return engine

        launching: asyncio.Task[Self] = asyncio.ensure_future(asyncio.to_thread(launch))
        try:
            return await asyncio.shield(launching)
        except BaseException:
            cancel.set()
            launching.add_done_callback(_close_result)
            raise

    @classmethod
    def connect(
        cls, url: str, *, api_key: str | None = None, tokenizer: str | None = None, timeout_s: float = 10.0
    ) -> Self:
        """Join a server that runs already, at ``http://host:port`` (with or without ``/v1``).

        Documents are found in prompts with the model's tokenizer: ``tokenizer`` names its folder where the server's
        own model path is not readable here. Without one, requests still work; their documents are not known.

        Raises:
            EngineUnreachableError: nothing answers there within ``timeout_s`` seconds.
            EngineAuthError: the key is wrong or missing.
            EngineError: what answers is not a vLLM server.
        """
        base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            with httpx.Client(transport=httpx.HTTPTransport(), timeout=timeout_s) as client:
                client.get(f"{base_url.removesuffix('/v1')}/health")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise EngineUnreachableError(
                f"no engine answers at {url} ({error}): is the server running, and the URL right?"
            ) from error
        return cls(base_url, api_key or "none", tokenizer=lambda root: ModelTokenizer(tokenizer or root))

    @classmethod
    async def aconnect(cls, url: str, **settings: Any) -> Self:
        """Do :meth:`connect` without blocking the event loop."""
        return await asyncio.to_thread(cls.connect, url, **settings)

    # Asking

    def generate(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 0.0, **sampling: Any
    ) -> Generation:
        """Return the whole answer to ``prompt``; see :meth:`stream`."""
        return whole(list(self.stream(prompt, max_tokens=max_tokens, temperature=temperature, **sampling)))

    def stream(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 0.0, **sampling: Any
    ) -> Generator[GenerationChunk]:
        """Yield the answer to ``prompt`` as it is generated; closing the iterator ends the request in the engine.

        Args:
            prompt: a text to continue, a :class:`RenderedPrompt`, or messages of the OpenAI protocol.
            max_tokens: the most tokens to generate; fewer where the context window ends before.
            temperature: 0 is greedy.
            **sampling: other fields of the OpenAI protocol, ``stop=["\\n"]``; vLLM's own go into ``extra_body``.

        Raises:
            PromptTooLongError, RequestRejectedError, EngineDiedError, EngineUnreachableError, ...
        """
        plan, body = self._request(prompt, max_tokens, temperature, sampling)
        reader = AnswerReader(plan)
        create: Any = self._openai.chat.completions.create if "messages" in body else self._openai.completions.create
        with translate_errors(), create(**body) as events:
            for event in events:
                if (chunk := reader.read(event)) is not None:
                    yield chunk
        yield reader.last()

    async def agenerate(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 0.0, **sampling: Any
    ) -> Generation:
        """Return the whole answer to ``prompt``; see :meth:`stream`. Cancelling it ends the request in the engine."""
        async with aclosing(self.astream(prompt, max_tokens=max_tokens, temperature=temperature, **sampling)) as chunks:
            return whole([chunk async for chunk in chunks])

    async def astream(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 0.0, **sampling: Any
    ) -> AsyncGenerator[GenerationChunk]:
        """Yield the answer to ``prompt`` as it is generated; see :meth:`stream`."""
        plan, body = self._request(prompt, max_tokens, temperature, sampling)
        reader = AnswerReader(plan)
        api = self._openai_async
        create: Any = api.chat.completions.create if "messages" in body else api.completions.create
        with translate_errors():
            async with await create(**body) as events:
                async for event in events:
                    if (chunk := reader.read(event)) is not None:
                        yield chunk
        yield reader.last()

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a text (with the model's special tokens) or of messages, as the server has them.

        Raises:
            TokenizerUnavailableError: the model's tokenizer is not at hand here.
        """
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt, add_special_tokens=True).token_ids)
        return list(tokenizer.encode(tokenizer.render(prompt)).token_ids)

    def stats(self) -> EngineStats:
        """Return the server's counters."""
        with translate_errors():
            page = self._http.get(self._metrics_url()).raise_for_status().text
        return parse_metrics(page, num_restarts=self._num_restarts())

    async def astats(self) -> EngineStats:
        """Return the server's counters."""
        with translate_errors():
            page = (await self._http_async.get(self._metrics_url())).raise_for_status().text
        return parse_metrics(page, num_restarts=self._num_restarts())

    # For the frameworks' doors

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer and chat template.

        Raises:
            TokenizerUnavailableError: it is not at hand here.
        """
        if isinstance(self._tokenizer, TokenizerUnavailableError):
            raise self._tokenizer
        return self._tokenizer

    def http_client(self) -> httpx.Client:
        """Return the client to ask the server with: it sends again what a death cut off. The engine closes it."""
        return self._http

    def http_async_client(self) -> httpx.AsyncClient:
        """Return the asynchronous client, good for any event loop. The engine closes it."""
        return self._http_async

    def remember_documents(self, documents: Iterable[Document], shown: Callable[[Document], str] | None = None) -> None:
        """Note what was retrieved: a later chat request that holds such a text is known to show that document."""
        self._remembered.add(documents, shown)

    def plan_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        documents: Iterable[Document] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RequestPlan:
        """Return what a chat request carries besides ``messages``: token ids, and the spans of its documents.

        ``documents`` are found by their text, and so are those that were remembered. ``settings`` are the other fields
        of the request (tools, ``extra_body``, ...). Requests with tools or settings of the chat template, messages
        other than plain text, and engines whose tokenizer is not at hand are left to the server: their plan is empty.

        Raises:
            PromptTooLongError: the prompt does not fit into the context window.
        """
        if isinstance(self._tokenizer, TokenizerUnavailableError) or server_renders(messages, settings or {}):
            return RequestPlan()
        given = [(d.doc_id, d.text) for d in documents or ()]
        known = {doc_id for doc_id, _ in given}
        shown = given + [(doc_id, text) for doc_id, text in self._remembered.shown() if doc_id not in known]
        return plan_chat(self._tokenizer, messages, shown, max_model_len=self.max_model_len)

    # Ending

    @property
    def pid(self) -> int | None:
        """Process id of a launched server."""
        return self._supervisor.pid if self._supervisor is not None else None

    def close(self, grace_s: float = GRACE_S) -> None:
        """Close the connections, and end a launched server with everything it started.

        May be called twice, by several threads (each returns when it is done), and again after an interruption.
        """
        with self._closing:
            self._async_transport.close()
            try:
                self._transport.close()
            finally:
                if self._supervisor is not None:
                    self._supervisor.close(grace_s)
            _open_engines.discard(self)

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

    def __repr__(self) -> str:
        return f"Engine(model={self.model!r}, base_url={self.base_url!r})"

    def _request(
        self, prompt: Prompt, max_tokens: int, temperature: float, sampling: Mapping[str, Any]
    ) -> tuple[RequestPlan, dict[str, Any]]:
        match prompt:
            case str():
                plan = RequestPlan()
            case RenderedPrompt():
                plan = plan_rendered(prompt, max_model_len=self.max_model_len)
            case _:
                plan = self.plan_chat(prompt, settings=sampling)
        if plan.num_prompt_tokens is not None:
            max_tokens = min(max_tokens, self.max_model_len - plan.num_prompt_tokens)
        settings = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **sampling}
        return plan, streamed_body(prompt, plan, settings)

    def _metrics_url(self) -> str:
        return f"{self.base_url.removesuffix('/v1')}/metrics"

    def _num_restarts(self) -> int:
        return self._supervisor.num_restarts if self._supervisor is not None else 0


def _close_result(launching: asyncio.Future[Any]) -> None:
    if not launching.cancelled() and launching.exception() is None:
        threading.Thread(target=launching.result().close, name="ragcache-close").start()


os.register_at_fork(after_in_child=_open_engines.clear)  # a fork does not own its parent's servers


@atexit.register
def _close_open_engines() -> None:
    for engine in list(_open_engines):
        engine.close(grace_s=5.0)
