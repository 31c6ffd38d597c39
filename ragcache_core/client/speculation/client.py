"""Send speculative requests before a search has ended, if the engine's load allows it.

::

    GET /v1/ragcache/load   {"num_pending_prefills": 3, "max_prefill_bs": 4, "is_speculative": true, "has_room": true,
                             "reads_ahead": true}
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from ragcache_core.client.cache import PrefetchRoute
from ragcache_core.client.http.network import finish
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, KVScope, KVScopes
from ragcache_core.client.prompts.client import PromptClient
from ragcache_core.client.prompts.request_plan import merge_bodies, plan_rendered
from ragcache_core.client.server_api import Call, ServerAPI
from ragcache_core.client.speculation import request_capture
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.client.speculation.speculation import Speculation, SpeculationManager
from ragcache_core.errors import EngineError
from ragcache_core.log import logger_of
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.runtime.daemon_threads import DaemonThreadPool
from ragcache_core.types import Document

_TIMEOUT_S = 1.0
_FRESH_S = 0.02
"""So long an answer serves every search of this process: many of them would otherwise ask a busy server at once."""
_PAUSE_S = 10.0
"""Seconds without load requests after a failure."""
_UNSUPPORTED_PAUSE_S = 60.0
"""Seconds until a server without speculation is checked again, as another may replace it."""
_MAX_THREADS = 32
_threads = DaemonThreadPool("ragcache-speculate", most=_MAX_THREADS)
"""Shared by all starts; some may be stuck."""
logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Number of real requests that wait for their first token, and of speculative ones that the engine admits.

    ``has_room``: whether the scheduler would admit a speculative one now, which it alone decides. ``reads_ahead``:
    whether it has a disk, from which it can read for a prompt ahead of its request.
    """

    num_pending_prefills: int
    max_prefill_bs: int
    has_room: bool
    reads_ahead: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    num_pending_prefills: Annotated[int, Field(ge=0)]
    max_prefill_bs: Annotated[int, Field(ge=0)]
    is_speculative: bool = True
    has_room: bool | None = None
    reads_ahead: bool = False

    def load(self) -> EngineLoad:
        """Return the report as a load. Older engines report no admission; then their count decides."""
        has_room = self.num_pending_prefills < self.max_prefill_bs if self.has_room is None else self.has_room
        return EngineLoad(self.num_pending_prefills, self.max_prefill_bs, has_room, self.reads_ahead)


_ANSWER = TypeAdapter(_Answer)


class LoadRoute:
    """Reads the load of one server. Thread-safe, for any event loop."""

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self._call = Call("/v1/ragcache/load", self._read, timeout=_TIMEOUT_S, is_sent_once=True)
        self._may_speculate: bool | None = None
        self._paused_until_s = 0.0
        self._latest: tuple[float, EngineLoad | None] = (-_FRESH_S, None)

    async def amay_speculate(self) -> bool:
        """Return whether the server accepts speculative requests. Logs a reason once. Never raises."""
        if not self._may_speculate:
            await self.apending()
        return self._may_speculate is True

    def may_speculate(self) -> bool:
        """Do :meth:`amay_speculate`, and block."""
        if not self._may_speculate:
            finish(self._pending(is_blocking=True))
        return self._may_speculate is True

    async def apending(self) -> EngineLoad | None:
        """Return the engine's load; ``None`` if unknown, or if it never speculates. Never raises."""
        return await self._pending(is_blocking=False)

    async def _pending(self, *, is_blocking: bool) -> EngineLoad | None:
        if (load := self._fresh()) is not None:
            return load
        if time.monotonic() >= self._paused_until_s:
            with self._pausing_after_failure():
                return await self._api.call_async(self._call, is_blocking=is_blocking)
        return None

    def _fresh(self) -> EngineLoad | None:
        reported_s, load = self._latest
        return load if self._may_speculate and time.monotonic() - reported_s < _FRESH_S else None

    def _read(self, response: httpx.Response) -> EngineLoad | None:
        if response.status_code != 404:  # whatever else is refused may be allowed later
            response.raise_for_status()
        answer = _answer(response)
        if not self._may_speculate:
            is_first = self._may_speculate is None
            self._may_speculate = answer is not None and answer.is_speculative and answer.max_prefill_bs > 0
            if not self._may_speculate:
                self._paused_until_s = time.monotonic() + _UNSUPPORTED_PAUSE_S
            if is_first and not self._may_speculate and (answer is None or answer.max_prefill_bs > 0):
                logger.warning(
                    "RC-SPECULATION-OFF: the server at %s cannot prefill for documents that are not final: it runs "
                    "without RAGCache's scheduler. Requests are sent when retrieval has ended; start it with "
                    "Engine.launch or `ragcache serve`, of this version, to overlap the search.",
                    self._api.root,
                )
        load = None if answer is None else answer.load()
        self._latest = (time.monotonic(), load)
        return load

    @contextmanager
    def _pausing_after_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            logger.debug("the engine's load is unknown: %s: %s", type(error).__name__, error)


def _answer(response: httpx.Response) -> _Answer | None:
    """Return the response of the route; ``None`` if the server has none of this version."""
    try:
        return _ANSWER.validate_json(response.content) if response.status_code == 200 else None
    except ValidationError:
        return None


class PreparedRequest:
    """A request prepared in advance: calling it sends it as a speculation; :meth:`prefetch` only reads its blocks."""

    def __init__(
        self,
        start: Callable[[CapturedRequest], Speculation],
        prefetching: PrefetchRoute,
        captured: CapturedRequest,
        tokens_of: Callable[[Mapping[str, Any]], Sequence[int] | None],
    ) -> None:
        """Take ``tokens_of``, which returns the tokens of a request body; ``None`` if unknown."""
        self._start = start
        self._prefetching = prefetching
        self._captured = captured
        self._tokens_of = tokens_of

    def __call__(self) -> Speculation:
        return self._start(self._captured)

    def prefetch(self) -> None:
        """Read the prompt's blocks from disk into host memory.

        Raises:
            EngineError: the server cannot be asked, or refuses.
        """
        asked = json.loads(self._captured.body)
        if token_ids := self._tokens_of(asked):
            self._prefetching.prefetch(
                token_ids,
                asked.get("cache_salt"),
                model=asked.get("model"),
                authorization=self._captured.authorization,
            )


class SpeculationClient:
    """Sends speculative requests to one engine."""

    def __init__(
        self,
        api: ServerAPI,
        *,
        model: str,
        max_model_len: int,
        speculations: SpeculationManager,
        load: LoadRoute,
        prefetching: PrefetchRoute,
        scopes: KVScopes,
        prompts: PromptClient,
    ) -> None:
        """Take ``speculations``, those of the transports that send the engine's requests.

        ``scopes`` are the KV scopes of the requests for which documents are prefilled.
        """
        self._scopes, self._prompts = scopes, prompts
        self._api = api
        self._model = model
        self._max_model_len = max_model_len
        self._speculations = speculations
        self._load = load
        self._prefetching = prefetching

    async def acan_speculate(self) -> bool:
        """Return whether the engine accepts speculative requests.

        It is asked once; a server without RAGCache's scheduler is named in one warning. Never fails.
        """
        return await self._load.amay_speculate()

    async def apending_prefills(self) -> EngineLoad | None:
        """Return the number of prefills that wait in the engine, and whether it admits one more; ``None`` if unknown.

        Never fails.
        """
        return await self._load.apending()

    def capture_request(self, call: Callable[[], object]) -> CapturedRequest:
        """Return the completion request that ``call`` would send to this engine, without sending it.

        ``call`` is the very code that will make the request later, with the engine's ``http_client()``; it
        ends where it would send that request. Its other requests are sent.

        Raises:
            ConfigError: it sent none.
            Exception: whatever ``call`` raised before it came to that.
        """
        return request_capture.capture_request(call, self._speculations)

    def prepare(self, call: Callable[[], object]) -> PreparedRequest:
        """Return a callable that sends the request of ``call`` as a speculation, which an equal real request adopts.

        Ask :meth:`acan_speculate` before: plain vLLM would treat it as any other request.

        Raises:
            ConfigError: ``call`` sent no request.
            EngineClosedError: when it is sent: this handle was closed.
            Exception: whatever ``call`` raised before it came to that.
        """
        return self._prepared(self._speculations.start, self.capture_request(call))

    def prepare_prefill(
        self, bound: BoundPrompt, shown_documents: Sequence[Any], documents: Sequence[Document]
    ) -> PreparedRequest | None:
        """Return a callable that prefills the beginning of a prompt about documents.

        Args:
            bound: the prompt.
            shown_documents: the framework's documents, for the user's formatting.
            documents: the same documents.

        Returns:
            ``None`` if too little of the prompt is known for a prefill, or the KV scope of its requests is unknown.

        Raises:
            PromptTooLongError: it does not fit into the context window.
        """
        if (scope := self._scopes.of(bound.scope)) is None:
            return None
        if (known := bound.prefix(shown_documents, documents)) is None:
            return None
        return self.prepare_warm(known, has_documents=bound.has_documents, scope=scope)

    def prepare_warm(
        self,
        prompt: RenderedPrompt,
        *,
        scope: KVScope,
        has_documents: bool = True,
        expected_uses: int = 0,
        chunk_reuse: Literal["store", False] = False,
    ) -> PreparedRequest:
        """Return a callable that prefills ``prompt`` while the engine is idle, for later requests with this prefix.

        ``has_documents``: whether the prompt has documents; without any it overlaps nothing of their search. The
        prefill is exact, as KV from chunk reuse serves no other request; with ``"store"`` its documents are also stored
        for chunk reuse. The engine counts it neither as a request nor as an access of its documents, which rank by
        ``expected_uses``. Only requests of its ``scope`` hit it.

        Raises:
            PromptTooLongError: it does not fit into the context window.
            EngineClosedError: when it is sent: this handle was closed.
        """
        plan = plan_rendered(
            prompt,
            self._prompts.facts,
            max_model_len=self._max_model_len,
            chunk_reuse=chunk_reuse,
            is_prefill=True,
            expected_uses=expected_uses,
        )
        asked = {"model": self._model, "prompt": list(prompt.token_ids), "max_tokens": 1, "temperature": 0.0}
        body = merge_bodies(asked, scope.fields(), plan.extra_body)
        headers = {**self._api.headers, "Content-Type": "application/json", **scope.headers()}
        url = f"{self._api.base_url}/completions"
        request = httpx.Request("POST", url, headers=headers, content=json.dumps(body).encode())
        captured = CapturedRequest.of(request)
        start = partial(self._speculations.start, can_be_adopted=False, has_documents=has_documents)
        return self._prepared(start, captured)

    def _prepared(self, start: Callable[[CapturedRequest], Speculation], captured: CapturedRequest) -> PreparedRequest:
        return PreparedRequest(start, self._prefetching, captured, self._prompts.tokens_of)


class Speculator(Protocol):
    """Makes speculative requests. Called in a thread: it may block for the milliseconds of tokenisation."""

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation] | None:
        """Make the request for ``documents`` in prompt order, and return a callable that sends it.

        ``None`` if nothing can be sent.
        """
        ...


class StartedSpeculation:
    """One speculative request: made in a thread, then sent to the engine.

    Attributes:
        number: which start of its search it is, once it may be sent.
        stage: the stage that it was sent at.
    """

    def __init__(self, speculator: Speculator, documents: tuple[Document, ...]) -> None:
        """Start a thread that makes the request, in a copy of the caller's context; :meth:`send` sends it."""
        self.number = self.stage = -1
        self.documents = documents
        self.is_announced = False
        self._begun_s: float | None = None
        self._sendable_s = 0.0
        self._may_send = self._may_prefetch = False
        self._decided = threading.Event()
        self._future: Future[Speculation | BaseException | None] = Future()
        try:
            is_begun = _threads.run(partial(self._run, speculator))
        except RuntimeError as error:  # no more threads
            self._future.set_result(error)
            return
        if not is_begun:
            self._future.set_result(
                EngineError(f"{_MAX_THREADS} other starts are on their way: see whether the speculator hangs")
            )

    def send(self, *, number: int, stage: int) -> None:
        """Send the request as soon as it is made."""
        self.number, self.stage = number, stage
        self._sendable_s, self._may_send = time.perf_counter(), True
        self._decided.set()

    def prefetch(self) -> None:
        """Do not send the request; only read its blocks from disk as soon as it is made."""
        self._may_prefetch = True
        self._decided.set()

    @property
    def is_sent(self) -> bool:
        """Whether the thread has sent the request, or failed."""
        return self._future.done() and not self._future.cancelled()

    @property
    def speculation(self) -> Speculation | None:
        """The sent speculation; ``None`` before."""
        outcome = self._outcome()
        return None if isinstance(outcome, BaseException) else outcome

    @property
    def is_alive(self) -> bool:
        """Whether the request was sent, and neither failed nor was cancelled."""
        speculation = self.speculation
        return speculation is not None and not (speculation.is_failed or speculation.is_cancelled)

    @property
    def error(self) -> BaseException | None:
        """The exception of the speculator, if there was one."""
        outcome = self._outcome()
        return outcome if isinstance(outcome, BaseException) else None

    def abandon(self) -> None:
        """Cancel the request, sent or about to be sent. Idempotent and safe at any time."""
        self._may_send = False
        self._decided.set()
        if not self._future.cancel():
            self._future.add_done_callback(lambda _: self._cancel())

    def add_sent_callback(self, f: Callable[[], None]) -> None:
        """Call ``f`` once :attr:`is_sent` is true, in any thread."""
        self._future.add_done_callback(lambda _: f())

    async def wait_until_sent(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for a thread that is about to send; cancel work that has not begun."""
        if self._future.done() or self._future.cancel() or self._begun_s is None:
            return
        left_s = max(self._begun_s, self._sendable_s) + grace_s - time.perf_counter()
        if left_s > 0:
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=left_s)

    def _outcome(self) -> Speculation | BaseException | None:
        return self._future.result() if self.is_sent else None

    def _cancel(self) -> None:
        if (speculation := self.speculation) is not None:
            speculation.cancel()

    def _run(self, speculator: Speculator) -> None:
        self._begun_s = time.perf_counter()
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            outcome: Speculation | BaseException | None = self._send(speculator)
        except BaseException as error:  # whatever it is: the answer does not depend on it
            outcome = error
        self._future.set_result(outcome)

    def _send(self, speculator: Speculator) -> Speculation | None:
        began_s = time.thread_time()
        send = speculator.prepare(self.documents)
        making_s = time.thread_time() - began_s
        if send is None:
            return None
        self._decided.wait()  # its owner sends or abandons it
        if self._may_prefetch and isinstance(send, PreparedRequest):
            send.prefetch()
        if not self._may_send:
            return None
        speculation = send()
        speculation.making_s = making_s
        return speculation


class SpeculativeRequests:
    """The speculative requests of one search; at most one is prepared before it may be sent."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._ahead: StartedSpeculation | None = None

    def make(self, documents: tuple[Document, ...]) -> None:
        """Prepare a request for ``documents``, unless it is prepared; drop one for other documents."""
        if self._ahead is None or self._ahead.documents != documents:
            self.drop()
            self._ahead = StartedSpeculation(self._speculator, documents)

    def take(self, documents: tuple[Document, ...]) -> StartedSpeculation:
        """Return the prepared request for ``documents``; the caller owns it."""
        self.make(documents)
        assert self._ahead is not None
        taken, self._ahead = self._ahead, None
        return taken

    def drop(self) -> None:
        """Cancel the prepared request."""
        if self._ahead is not None:
            self._ahead.abandon()
            self._ahead = None
