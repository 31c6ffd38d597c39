"""Speculative requests: sent before their documents are final, buffered, and joined by the real request.

A speculation is an ordinary request for a completion, marked with an id. It runs in a background event loop of the
engine's handle. The transports hand its answer to the first real request with the same URL, API key and body, and tell
the engine that it is real from then on; one that failed or was cancelled has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any
from weakref import ref

import httpx

from ragcache_core import wire
from ragcache_core.client.http.attempt import ServerWatch, check_progress
from ragcache_core.client.http.buffered_response import BufferedBody, BufferedResponse, ResponseHead
from ragcache_core.client.http.errors import reports_engine_death
from ragcache_core.client.http.network import finish, with_abort_check
from ragcache_core.client.http.resume import ResumeStreams, can_resume
from ragcache_core.client.http.routing import BackgroundLoop, Replicas
from ragcache_core.client.speculation.request_capture import (
    CapturedRequest,
    asks_completion,
    capture,
    current_scope,
    request_key,
)
from ragcache_core.client.tracing import SPECULATION_EXTENSION, SpeculationTrace
from ragcache_core.errors import ConfigError, EngineClosedError, EngineDiedError, EngineError
from ragcache_core.log import logger_of
from ragcache_core.runtime.handle import OneProcess

_LAST_EVENT = b"data: [DONE]\n\n"
_MAX_KEPT = 64
"""How many finished answers are kept for requests that may join them (again)."""
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_SHORT_TIMEOUT = httpx.Timeout(5.0)
_CONFIRM_PAUSES_S = (0.05, 0.2, 1.0, 2.0, 5.0)
"""Before a confirmation that did not arrive is repeated; the last one from then on."""
_RETRY_S = 0.05
"""Before a server that had no news is asked again how long a speculation has waited; it waits for that itself."""
_ERROR_EVENT = re.compile(rb'data:\s*\{\s*"error"\s*:')
_LONGEST_CUT = 32
"""The beginning of an event may arrive apart from its rest; so much of it is looked at again."""
_KEEP_S = 60.0
"""How long a finished answer is kept for the request that may join it (again)."""

logger = logger_of(__name__)


class Speculation:
    """A speculative request and its answer. Its methods may be called by any thread.

    Attributes:
        id: its name in the engine.
        key: that of the real requests that may join it.
        scope: the request scope that it was sent in; only a request of the same scope, or without one, joins it.
        authorization: the header that says who asks, also for its confirmation.
        sent_s: when it was sent, by ``time.perf_counter()``.
        started_s: when it was sent, plus the time that it waited in the engine to be scheduled, once that has told. The
            way there is not counted: a request that is made when the search has ended has it before it as well.
        making_s: seconds of processor time that its request took to make, where that was measured.
        can_be_adopted: whether a real request may join it.
        has_documents: whether it reads any; what stands before them hides nothing of a search.
        is_reserved: whether any has.
        error: why it failed.
    """

    def __init__(
        self, owner: SpeculationManager, captured: CapturedRequest, *, can_be_adopted: bool, has_documents: bool
    ) -> None:
        self.id = uuid.uuid4().hex
        self.key = captured.key
        self.scope = captured.scope
        self.authorization = captured.authorization
        self.can_be_adopted, self.has_documents = can_be_adopted, has_documents
        self.sent_s = time.perf_counter()
        self.started_s: float | None = None
        self.making_s = 0.0
        self.error: Exception | None = None
        self.response = BufferedResponse()
        self._owner = owner
        self._lock = threading.Lock()
        self._is_done = self._is_cancelled = self._is_confirmed = self.is_reserved = False
        self._claimer: object | None = None
        self.trace = SpeculationTrace.begin(has_documents=has_documents, can_be_adopted=can_be_adopted)
        self._callbacks: list[Callable[[Speculation], None]] = []
        self._work: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it finished, failed or was cancelled."""
        return self._is_done

    @property
    def is_failed(self) -> bool:
        """Whether the engine refused it, died meanwhile, or could not be reached; ``error`` says why."""
        return self.error is not None

    @property
    def is_cancelled(self) -> bool:
        """Whether it was ended before its answer was whole."""
        return self._is_cancelled

    @property
    def is_claimed(self) -> bool:
        """Whether a real request joined it (of a scope's speculation, one in that scope), and was not sent itself."""
        is_theirs = self.scope is None or self.scope is self._claimer
        return self.is_reserved and is_theirs and (self.response.has_bytes or not self.is_failed)

    def cancel(self) -> None:
        """End the request in the engine, so that none can join it; one that was joined already goes on. Idempotent.

        It may have been joined by another request than its owner's, one about the same.
        """
        if self._owner._withdraw(self):
            self.abort()

    def abort(self) -> None:
        """End the request in the engine on behalf of the request that joined it. Idempotent."""
        self._owner._forget(self)
        if self._end(httpx.ReadError("the speculation was cancelled"), is_cancelled=True) and self._work is not None:
            self._work.cancel()

    def leave(self) -> None:
        """Abort it on behalf of the request that claimed it, unless all of the answer has arrived."""
        if not self.response.last_bytes().endswith(_LAST_EVENT):
            self.abort()

    def confirm(self) -> None:
        """Tell the engine that the request is a real one from now on. Returns at once; idempotent."""
        with self._lock:
            if self._is_confirmed or self._is_cancelled or self.error is not None:
                return
            self._is_confirmed = True
        if self.trace is not None:
            self.trace.confirmed()
        self._owner._confirm(self)

    def claim(self, claimer: object | None) -> None:
        """Have a real request join it, made in the scope ``claimer``."""
        self.is_reserved, self._claimer = True, claimer

    def add_done_callback(self, callback: Callable[[Speculation], None]) -> None:
        """Call ``callback`` once it is done, in whichever thread ends it; at once if it is done already."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, error: Exception | None, *, is_cancelled: bool = False) -> bool:
        """End it, for its readers with ``error``; return whether it had not ended before."""
        with self._lock:
            if self._is_done:
                return False
            self._is_done, self._is_cancelled = True, is_cancelled
            self.error = None if is_cancelled else error
            callbacks, self._callbacks = self._callbacks, []
        if self.trace is not None:
            self.trace.done(error, is_cancelled=is_cancelled)
        self.response.end(error)
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                logger.exception("RC-CALLBACK-FAILED: a callback of a speculation failed")
        return True

    def __repr__(self) -> str:
        states = {"cancelled": self._is_cancelled, "failed": self.is_failed, "done": self._is_done}
        state = next((name for name, holds in states.items() if holds), "running")
        return f"Speculation({self.id}, {state})"


class SpeculationRegistry:
    """Speculations that no request has joined yet, by what they ask, the oldest first. Thread-safe.

    True while there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[bytes, list[Speculation]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, speculation: Speculation) -> None:
        """Let a real request join ``speculation``."""
        with self._lock:
            self._by_key.setdefault(speculation.key, []).append(speculation)

    def take(self, key: bytes, scope: object | None) -> Speculation | None:
        """Return the oldest speculation with this key that did not fail, claimed for ``scope``. It is returned once.

        The scope's own are joined first, then those without a scope; another scope's only by a request without one.
        """
        with self._lock:
            while (speculation := self._oldest(key, scope)) is not None:
                self._drop(speculation)
                if not speculation.is_failed and not speculation.is_cancelled:
                    speculation.claim(scope)
                    return speculation
        return None

    def drop(self, speculation: Speculation) -> bool:
        """Make ``speculation`` impossible to join; return whether none has joined it."""
        with self._lock:
            self._drop(speculation)
            return not speculation.is_reserved

    def keep(self, speculation: Speculation) -> bool:
        """Return whether the whole answer of ``speculation`` may still be joined; of too many the oldest is dropped."""
        with self._lock:
            if speculation not in self._by_key.get(speculation.key, ()):
                return False
            ended = [s for waiting in self._by_key.values() for s in waiting if s.is_done]
            for oldest in sorted(ended, key=lambda s: s.sent_s)[: max(0, len(ended) + 1 - _MAX_KEPT)]:
                self._drop(oldest)
        return True

    def clear(self) -> None:
        """Make every speculation impossible to join."""
        with self._lock:
            self._by_key.clear()

    def _oldest(self, key: bytes, scope: object | None) -> Speculation | None:
        waiting = self._by_key.get(key, ())
        own = (s for s in waiting if s.scope is scope)
        return next(own, next((s for s in waiting if scope is None or s.scope is None), None))

    def _drop(self, speculation: Speculation) -> None:
        waiting = self._by_key.get(speculation.key, [])
        if speculation in waiting:
            waiting.remove(speculation)
            if not waiting:
                del self._by_key[speculation.key]


def marked_request(
    captured: CapturedRequest, speculation_id: str, *, resume_streams: ResumeStreams = "off"
) -> httpx.Request:
    """Return ``captured`` with the id of a speculation in its metadata.

    ``resume_streams``: the answers that continue after a cut, for which the server names their tokens.

    Raises:
        ConfigError: its body is no JSON object.
    """
    try:
        asked = json.loads(captured.body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError(f"a request whose body is no JSON object cannot be speculated: {captured.body[:80]!r}")
    params = dict(asked.get("kv_transfer_params") or {})
    metadata = params.get(wire.KEY) or {"version": wire.WIRE_VERSION, "documents": []}
    params[wire.KEY] = {**metadata, "speculation": speculation_id}
    names_tokens = {"return_token_ids": True} if can_resume(asked, resume_streams) else {}
    return httpx.Request(
        captured.method,
        captured.url,
        headers=captured.headers,
        content=json.dumps({**asked, "kv_transfer_params": params, **names_tokens}).encode(),
        extensions={"timeout": _TIMEOUT.as_dict()},
    )


async def receive(
    transport: httpx.AsyncBaseTransport,
    request: httpx.Request,
    response: BufferedResponse,
    *,
    is_reserved: Callable[[], bool],
) -> None:
    """Send ``request`` and write its answer into ``response`` to the end, which is left to the caller.

    An error that the server reports in a stream is raised until bytes are there that ``is_reserved`` to a real request;
    then it is passed on, as the transports do. Cancelling this ends the request in the engine.

    Raises:
        EngineError: the engine refused it, or died. httpx.TransportError: the connection failed.
    """
    answer = await transport.handle_async_request(request)
    try:
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        if answer.status_code >= 400:
            said = (await answer.aread()).decode(errors="replace")
            raise EngineError(f"the engine refused a speculation with status {answer.status_code}: {said:.300}")
        response.begin(ResponseHead(answer.status_code, list(answer.headers.raw)))
        async for part in answer.stream:
            if not (response.has_bytes and is_reserved()):
                _check(response.last_bytes()[-_LONGEST_CUT:] + part)
            response.append(part)
    finally:
        await answer.aclose()


def _check(events: bytes) -> None:
    """Raise the error that an event of a stream reports. In what the model says, quotes are escaped."""
    if (found := _ERROR_EVENT.search(events)) is not None:
        said = events[found.start() :].decode(errors="replace")
        if reports_engine_death(said):
            raise EngineDiedError("the engine died during a speculation")
        raise EngineError(f"the engine failed during a speculation: {said:.300}")


class SpeculationRoutes:
    """Two routes of the plugin. Their failures are logged, and affect no request.

    The event loop of the given ``transport`` sends all of it, and only the confirmation more than once.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        """``base_url`` ends in ``/v1``."""
        self._url = f"{base_url}/ragcache"
        self._authorization = f"Bearer {api_key}"

    async def confirm(self, transport: httpx.AsyncBaseTransport, speculation: Speculation) -> None:
        """Tell the engine that a speculation is a real request now, until it has acknowledged that or ends.

        A joined request whose confirmation is lost would wait behind every other one.
        """
        for pause_s in chain(_CONFIRM_PAUSES_S, repeat(_CONFIRM_PAUSES_S[-1])):
            answer = await self._ask(transport, "POST", speculation, "/confirm")
            if answer is not None and answer.status_code < 500:
                return
            await asyncio.sleep(pause_s)
            if speculation.is_done:
                return

    async def follow_wait(
        self, transport: httpx.AsyncBaseTransport, speculation: Speculation, note: Callable[[float], None]
    ) -> None:
        """Call ``note`` with the seconds that a speculation has waited to be scheduled, each time the engine tells.

        It does so when it begins, and when it goes on after a pause. Returns when the speculation is done,
        or when the server is one that does not tell.
        """
        num_reports = 0
        while True:
            was_over = speculation.is_done
            after = 0 if was_over else num_reports  # at the end it does not wait for what is known
            answer = await self._ask(transport, "GET", speculation, f"?after={after}")
            if answer is not None and answer.status_code < 500:
                match _json(answer):
                    case {"waited_s": float() | int() as waited_s, "num_reports": int() as num_reports}:
                        note(float(waited_s))
                        if not was_over:
                            continue
                    case {"waited_s": None}:
                        pass  # it waited for the engine, in vain
                    case _:
                        return
            if was_over:
                return
            await asyncio.sleep(_RETRY_S)

    async def _ask(
        self, transport: httpx.AsyncBaseTransport, method: str, speculation: Speculation, route: str
    ) -> httpx.Response | None:
        """Return the server's answer, read to its end; ``None`` if there was none.

        It is asked as who sent the speculation: a tenant's are known to that tenant alone.
        """
        extensions = {"timeout": _SHORT_TIMEOUT.as_dict()}
        headers = {"Authorization": speculation.authorization or self._authorization}
        url = f"{self._url}/speculations/{speculation.id}{route}"
        request = httpx.Request(method, url, headers=headers, extensions=extensions)
        try:
            answer = await transport.handle_async_request(request)
            try:
                await answer.aread()
            finally:
                await answer.aclose()
            return answer
        except httpx.HTTPError as error:
            logger.debug("%s %s: %s: %s", method, url, type(error).__name__, error)
            return None


def _json(answer: httpx.Response) -> object:
    """Return what a route answers; ``None`` if it refuses, or answers something else."""
    try:
        return answer.json() if answer.status_code == 200 else None
    except ValueError:
        return None


class SpeculationManager:
    """The speculative requests of one engine's handle, and the thread that they run in.

    The thread starts with the first of them and ends in :meth:`close`. True while a real request may find one to join.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        watch: ServerWatch | None = None,
        *,
        resume_streams: ResumeStreams = "off",
        replicas: Replicas | None = None,
    ) -> None:
        """``base_url`` ends in ``/v1``, and ``watch`` knows whether its engine hangs. ``replicas`` are a fleet's.

        ``resume_streams``: the answers that a request which joins them continues after a cut.
        """
        self._home = f"{httpx.URL(base_url)}/"
        self._routes = SpeculationRoutes(base_url, api_key)
        self._check = (lambda: None) if watch is None else partial(check_progress, watch)
        self._resume_streams = resume_streams
        self._replicas = replicas
        self._has_certificate = base_url.startswith("https")
        self._closed = False
        self._process = OneProcess()
        self._lock = threading.Lock()
        self._live: dict[Speculation, None] = {}
        self._claims = SpeculationRegistry()
        self._background: BackgroundLoop | None = None

    def __bool__(self) -> bool:
        return bool(self._claims)

    def start(
        self, captured: CapturedRequest, *, can_be_adopted: bool = True, has_documents: bool = True
    ) -> Speculation:
        """Send ``captured`` as a speculation and return at once. ``can_be_adopted``: whether its answer is of any use.

        Raises:
            ConfigError: its body is no JSON object.
            EngineClosedError: the engine's handle was closed, or made before a fork.
        """
        self._process.check()
        speculation = Speculation(self, captured, can_be_adopted=can_be_adopted, has_documents=has_documents)
        request = marked_request(captured, speculation.id, resume_streams=self._resume_streams)
        if speculation.trace is not None:
            speculation.trace.inject(request)
        with self._lock:
            self._live[speculation] = None
        if can_be_adopted:
            self._claims.add(speculation)
        try:
            speculation._work = self._run(self._send(speculation, request))
        except BaseException:
            self._forget(speculation)
            raise
        if speculation.is_done:  # it was ended before there was work to cancel
            speculation._work.cancel()
        return speculation

    def join(self, request: httpx.Request) -> httpx.Response | None:
        """Return the answer of a speculation that is ``request`` once its first bytes are there; ``None``: send it.

        Closing the response early cancels the speculation, as interrupting this call does. In a rehearsal of this
        request, it ends that.
        """
        return finish(self._join(request, is_blocking=True))

    async def ajoin(self, request: httpx.Request) -> httpx.Response | None:
        """Do :meth:`join` without blocking the event loop."""
        return await self._join(request, is_blocking=False)

    async def _join(self, request: httpx.Request, *, is_blocking: bool) -> httpx.Response | None:
        if self._is_own_server(request):
            capture(request, self)
        if self._claims and (speculation := self._claim_for(request)) is not None:
            timeout_s, answer = _read_timeout_s(request), speculation.response
            with self._joining(speculation):
                speculation.confirm()
                if answer.read(0, timeout_s) if is_blocking else await answer.aread(0, timeout_s):
                    return _joined(speculation, timeout_s)
        return None

    @contextmanager
    def _joining(self, speculation: Speculation) -> Iterator[None]:
        """Send a request that joins ``speculation`` itself if that failed; cancel that if the request is given up."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, Exception) and speculation.is_done):
                speculation.abort()
                raise
            if self._closed:
                raise _closed_error() from error

    def _is_own_server(self, request: httpx.Request) -> bool:
        """Return whether ``request`` goes to this handle's server; its client may be used to ask another one."""
        return str(request.url).startswith(self._home)

    def _claim_for(self, request: httpx.Request) -> Speculation | None:
        return self._claims.take(request_key(request), current_scope()) if asks_completion(request) else None

    def close(self) -> None:
        """Cancel all, and end the thread. May be called again, also after an interruption."""
        self._process.check()
        with self._lock:
            self._closed = True
            self._claims.clear()
            live, background = list(self._live), self._background
        for speculation in live:
            speculation.abort()
        if background is not None:
            background.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run ``work`` in the background; return its future."""
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            if self._background is None:
                self._background = BackgroundLoop(
                    "ragcache-speculation", verify=self._has_certificate, replicas=self._replicas
                )
            return self._background.run(work)

    def _confirm(self, speculation: Speculation) -> None:
        with contextlib.suppress(EngineClosedError):
            self._run(self._send_confirmation(speculation))

    def _withdraw(self, speculation: Speculation) -> bool:
        """Make ``speculation`` impossible to claim; return whether it was unclaimed."""
        return self._claims.drop(speculation)

    def _forget(self, speculation: Speculation) -> None:
        """Make ``speculation`` impossible to claim, and forget it: nothing cancels it any more."""
        with self._lock:
            self._live.pop(speculation, None)
        self._claims.drop(speculation)
        if speculation.trace is not None:
            speculation.trace.forgotten()

    # In the background

    async def _send(self, speculation: Speculation, request: httpx.Request) -> None:
        noting = asyncio.create_task(self._note_wait(speculation))
        try:
            with with_abort_check(self._check):
                await receive(
                    self._transport(), request, speculation.response, is_reserved=lambda: speculation.is_reserved
                )
        except asyncio.CancelledError:
            noting.cancel()
            speculation.abort()
            raise
        except Exception as error:
            noting.cancel()
            logger.debug("speculation %s failed: %s: %s", speculation.id, type(error).__name__, error)
            self._forget(speculation)
            speculation._end(error)
            return
        self._keep(speculation)
        speculation._end(None)
        await noting

    async def _note_wait(self, speculation: Speculation) -> None:
        def note(waited_s: float) -> None:
            speculation.started_s = speculation.sent_s + waited_s
            if speculation.trace is not None:
                speculation.trace.admitted(waited_s)

        await self._routes.follow_wait(self._transport(), speculation, note)

    async def _send_confirmation(self, speculation: Speculation) -> None:
        await self._routes.confirm(self._transport(), speculation)

    def _transport(self) -> httpx.AsyncBaseTransport:
        assert self._background is not None
        return self._background.transport

    def _keep(self, speculation: Speculation) -> None:
        """Keep a finished, unclaimed answer for a while: its real request may come later."""
        with self._lock:
            self._live.pop(speculation, None)
        if self._claims.keep(speculation):
            asyncio.get_running_loop().call_later(_KEEP_S, self._forget_kept, ref(speculation))

    def _forget_kept(self, kept: ref[Speculation]) -> None:
        """Drop it, unless it was dropped or claimed before: the timer must not keep its answer alive."""
        if (speculation := kept()) is not None:
            self._forget(speculation)


def _joined(speculation: Speculation, timeout_s: float | None) -> httpx.Response:
    head, body = speculation.response.head(), BufferedBody(speculation.response, timeout_s, speculation.leave)
    traced = {} if speculation.trace is None else {SPECULATION_EXTENSION: speculation.trace}
    return httpx.Response(head.status_code, headers=head.headers, stream=body, extensions=traced)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the engine was closed: launch or connect again")


def _read_timeout_s(request: httpx.Request) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s
