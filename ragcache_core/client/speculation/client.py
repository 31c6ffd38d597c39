"""Requests that are sent before a search has ended, while the engine's load allows them.

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
"""After a request that failed, none is sent for so long: the search goes on meanwhile."""
_UNSUPPORTED_PAUSE_S = 60.0
"""A server that takes no speculative requests may be replaced by one that does: it is asked again after so long."""
_MAX_THREADS = 32
_threads = DaemonThreadPool("ragcache-speculate", most=_MAX_THREADS)
"""Shared by all starts; some may be stuck."""
logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How many real requests wait for their first token, and how many speculative ones the engine takes at a time.

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
        """Return it as a load. An older engine does not say whether it admits one: its count decides."""
        has_room = self.num_pending_prefills < self.max_prefill_bs if self.has_room is None else self.has_room
        return EngineLoad(self.num_pending_prefills, self.max_prefill_bs, has_room, self.reads_ahead)


_ANSWER = TypeAdapter(_Answer)


class LoadRoute:
    """Asks one server about its load. May be used by any thread and any event loop."""

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self._call = Call("/v1/ragcache/load", self._read, timeout=_TIMEOUT_S, is_sent_once=True)
        self._may_speculate: bool | None = None
        self._paused_until_s = 0.0
        self._latest: tuple[float, EngineLoad | None] = (-_FRESH_S, None)

    async def amay_speculate(self) -> bool:
        """Return whether the server takes speculative requests. Logs once why it does not. Never fails."""
        if not self._may_speculate:
            await self.apending()
        return self._may_speculate is True

    def may_speculate(self) -> bool:
        """Do :meth:`amay_speculate`, and block."""
        if not self._may_speculate:
            finish(self._pending(is_blocking=True))
        return self._may_speculate is True

    async def apending(self) -> EngineLoad | None:
        """Return the engine's load; ``None`` if it does not say, or says that it never speculates. Never fails."""
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
    """Return what the route says; ``None`` where there is no such route, or another version's."""
    try:
        return _ANSWER.validate_json(response.content) if response.status_code == 200 else None
    except ValidationError:
        return None


class PreparedRequest:
    """A request that was made ahead: sent as a speculation when it is called, or only read ahead."""

    def __init__(
        self,
        start: Callable[[CapturedRequest], Speculation],
        prefetching: PrefetchRoute,
        captured: CapturedRequest,
        tokens_of: Callable[[Mapping[str, Any]], Sequence[int] | None],
    ) -> None:
        """``tokens_of`` returns the tokens of a request's body; ``None`` where they are not known."""
        self._start = start
        self._prefetching = prefetching
        self._captured = captured
        self._tokens_of = tokens_of

    def __call__(self) -> Speculation:
        return self._start(self._captured)

    def prefetch(self) -> None:
        """Have the engine read what it has on disk of the prompt.

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
    """Sends one engine requests before they are certain."""

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
        """``speculations`` are those of the transports that send its requests.

        ``scopes`` says what separates the KV of the requests for which something is prefilled.
        """
        self._scopes, self._prompts = scopes, prompts
        self._api = api
        self._model = model
        self._max_model_len = max_model_len
        self._speculations = speculations
        self._load = load
        self._prefetching = prefetching

    async def acan_speculate(self) -> bool:
        """Return whether the engine takes speculative requests.

        It is asked once; a server without RAGCache's scheduler is named in one warning. Never fails.
        """
        return await self._load.amay_speculate()

    async def apending_prefills(self) -> EngineLoad | None:
        """Return the prefills that wait in the engine, and whether one more fits; ``None`` if it does not say.

        Never fails.
        """
        return await self._load.apending()

    def capture_request(self, call: Callable[[], object]) -> CapturedRequest:
        """Return the request for a completion that ``call`` would send to this engine; it is not sent.

        ``call`` is the very code that will make the request later, with the engine's ``http_client()``; it
        ends where it would send that request. Its other requests are sent.

        Raises:
            ConfigError: it sent none.
            Exception: whatever ``call`` raised before it came to that.
        """
        return request_capture.capture_request(call, self._speculations)

    def prepare(self, call: Callable[[], object]) -> PreparedRequest:
        """Return what sends the request of ``call`` as a speculation: a real one that is the same joins it.

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
        """Return what prefills the beginning of a prompt about documents, for the request that will show them.

        Args:
            bound: the prompt.
            shown_documents: the documents as the framework's, for the user's own formatting.
            documents: the same documents.

        Returns:
            ``None`` where nothing is known of the prompt that is worth a prefill, or where it is not known what
            separates the KV of its requests.

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
        """Return what has ``prompt`` prefilled while the engine is idle: later requests that begin with it find it.

        ``has_documents`` says whether documents are in it; without any it hides nothing of the search for them. It is
        computed exactly, since KV that was assembled from reused chunks serves no other request; with ``"store"`` its
        documents are kept for others to reuse as well. The engine counts it neither as a request nor as a use of its
        documents: with ``expected_uses`` they rank by those. Requests of its ``scope`` find it, and no others.

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
    """Knows what can be sent ahead. It is called in a thread: it may block for the milliseconds of tokenising."""

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation] | None:
        """Make the request that follows from ``documents``, in the order of the prompt; return what sends it.

        ``None`` if nothing can be sent.
        """
        ...


class StartedSpeculation:
    """One start: in a thread first, then in the engine.

    Attributes:
        number: which start of its search it is, once it may be sent.
        stage: the stage that it was sent at.
    """

    def __init__(self, speculator: Speculator, documents: tuple[Document, ...]) -> None:
        """Have a thread make its request, in a copy of the caller's context; :meth:`send` lets it go."""
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
        """Send it as soon as it is made."""
        self.number, self.stage = number, stage
        self._sendable_s, self._may_send = time.perf_counter(), True
        self._decided.set()

    def prefetch(self) -> None:
        """Do not send it: only have the engine read what it has on disk of it, as soon as it is made."""
        self._may_prefetch = True
        self._decided.set()

    @property
    def is_sent(self) -> bool:
        """Whether the thread has sent it, or failed to."""
        return self._future.done() and not self._future.cancelled()

    @property
    def speculation(self) -> Speculation | None:
        """What was sent, if it was."""
        outcome = self._outcome()
        return None if isinstance(outcome, BaseException) else outcome

    @property
    def is_alive(self) -> bool:
        """Whether it was sent, and neither failed nor was cancelled."""
        speculation = self.speculation
        return speculation is not None and not (speculation.is_failed or speculation.is_cancelled)

    @property
    def error(self) -> BaseException | None:
        """What the speculator raised, if it did."""
        outcome = self._outcome()
        return outcome if isinstance(outcome, BaseException) else None

    def abandon(self) -> None:
        """Cancel what was sent, or what a thread is about to send. Safe at any moment, and more than once."""
        self._may_send = False
        self._decided.set()
        if not self._future.cancel():
            self._future.add_done_callback(lambda _: self._cancel())

    def add_sent_callback(self, f: Callable[[], None]) -> None:
        """Call ``f`` once :attr:`is_sent`, in any thread."""
        self._future.add_done_callback(lambda _: f())

    async def wait_until_sent(self, grace_s: float) -> None:
        """Wait for a thread that began, and might send, at most ``grace_s`` ago; what has not begun is cancelled."""
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
    """The starts of one search; at most one of them is made before it is known whether it may be sent."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._ahead: StartedSpeculation | None = None

    def make(self, documents: tuple[Document, ...]) -> None:
        """Make a request from ``documents`` ahead, unless that is done; what was made from others is dropped."""
        if self._ahead is None or self._ahead.documents != documents:
            self.drop()
            self._ahead = StartedSpeculation(self._speculator, documents)

    def take(self, documents: tuple[Document, ...]) -> StartedSpeculation:
        """Return the start from ``documents``, its request made ahead or being made now; it is the caller's."""
        self.make(documents)
        assert self._ahead is not None
        taken, self._ahead = self._ahead, None
        return taken

    def drop(self) -> None:
        """Abandon what was made ahead."""
        if self._ahead is not None:
            self._ahead.abandon()
            self._ahead = None
