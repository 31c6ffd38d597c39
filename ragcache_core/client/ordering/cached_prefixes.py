"""Client-side cache index: a copy of the prefixes that an engine has cached, from which orders are chosen."""

from __future__ import annotations

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import httpx

from ragcache_core.client.http.routing import BackgroundLoop
from ragcache_core.log import logger_of
from ragcache_core.ordering import PATHS_VERSION, CachedPaths, best_order
from ragcache_core.routing.index import PathIndex
from ragcache_core.runtime.handle import OneProcess
from ragcache_core.types import DocId

_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
"""The engine answers between two steps."""
_POLL_INTERVAL_S = 1.0
_NUM_AT_ONCE = 2
"""Questions of who waits: an answer that is on its way does not know what has just been cached."""
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_UNSUPPORTED_PAUSE_S = 60.0
_PART_PAUSE_S = 0.01
_PART_PAUSE_GROWTH = 1.03
"""A copy in parts, one for 1,000 changes, is requested quickly at first: 50 parts in 1 s, 100 in 6 s."""
_MAX_ANSWER_BYTES = 1 << 26
_MAX_ENGINES = 1024
_MAX_CURSOR_CHARS = 1 << 15
"""The server takes the cursor of at most 1,024 engines: each is 30 characters."""

_Answer = TypeVar("_Answer")

logger = logger_of(__name__)


class _UnsupportedError(Exception):
    """The server does not report cached prefixes, or not to this client."""


class CachedPrefixIndex(ABC):
    """The cached prefixes of one or several engines, as far as they are known. May be used by any thread."""

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether it is known as it was a moment ago."""

    def order(self, documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool) -> tuple[int, ...] | None:
        """Return the order whose prefix is cached the furthest; None where that is not known (yet)."""
        return self.look(lambda engines: best_order(engines, documents, prefix=prefix, keep_first=keep_first))

    def look(self, answer: Callable[[Sequence[CachedPaths]], _Answer]) -> _Answer | None:
        """Return what ``answer`` makes of what each engine has cached; None where that is not known (yet).

        Never waits for a server. The first call begins to ask it.
        """
        with self.reading() as engines:
            return None if engines is None else answer(engines)

    @abstractmethod
    def reading(self) -> AbstractContextManager[Sequence[CachedPaths] | None]:
        """Give what each engine has cached, which does not change inside; None where that is not known (yet)."""

    @abstractmethod
    def refresh(self, timeout_s: float) -> bool:
        """Ask the engines now, and return whether they have answered within ``timeout_s`` seconds.

        For who measures: a request need not wait for it.
        """

    @abstractmethod
    def close(self) -> None:
        """End what asks. May be called again."""


class CachedPrefixes(CachedPrefixIndex):
    """Asks one server each second from the first question on, in a thread of its own, until :meth:`close`.

    While the server does not answer nothing is known: what was cached before may be gone.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        """Ask nothing yet; ``base_url`` ends in ``/v1``."""
        self._url = f"{base_url}/ragcache/cached_paths"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._is_closed = False
        self._process = OneProcess()
        self._engines: list[CachedPaths] | None = None
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        """Held while a copy joins or leaves an index, in pieces: it is in one index, or in the other."""
        self._index: PathIndex | None = None
        """A fleet's, which has that as well."""
        self._starting = threading.Lock()
        self._read = threading.Condition()
        self._num_read = 0
        self._num_at_once = 0
        self._is_wanted = asyncio.Event()
        self._thread: BackgroundLoop | None = None

    @property
    def is_current(self) -> bool:
        """Whether the engine's cache is known as it was a moment ago."""
        return self._engines is not None

    @contextmanager
    def reading(self) -> Iterator[Sequence[CachedPaths] | None]:
        self._process.check()
        if self._thread is None:
            self._start()
        with self._changing():
            yield self._engines

    def keep_in(self, index: PathIndex, lock: threading.Lock) -> None:
        """Keep what is known in an ``index`` as well, and from now on change it under ``lock`` alone: a fleet's.

        It is in the index of the fleet that was made last.
        """
        self._process.check()
        with self._moving, self._locked_with(lock):
            for paths in self._engines or ():
                if self._index is not None:
                    deque(self._index.leave(paths), 0)
                deque(index.join(paths), 0)
            self._index, self._lock = index, lock

    def known_in(self, index: PathIndex) -> Sequence[CachedPaths] | None:
        """Return what each engine has cached, for who holds the lock of this index; None where that is not known."""
        if self._thread is None:
            self._start()
        return self._engines if self._index is index else None

    @contextmanager
    def _locked_with(self, other: threading.Lock) -> Iterator[None]:
        """Hold this lock and another: two fleets of the same engines take both in the same order."""
        while True:
            own = self._lock
            first, second = sorted((own, other), key=id)
            with first, nullcontext() if second is first else second:
                if own is self._lock:
                    yield
                    return

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock under which the index is read and changed."""
        while True:
            with (lock := self._lock):
                if lock is self._lock:  # no fleet has come in between
                    yield
                    return

    def _replace(self, engines: list[CachedPaths]) -> None:
        """Let ``engines`` be what is known; none: nothing is. Takes the lock for moments."""
        with self._moving:
            index = self._index
            if index is not None:
                new = (paths for paths in engines if not paths.bit)
                self._in_pieces(piece for paths in new for piece in index.join(paths))
            with self._changing():
                old, self._engines = self._engines or [], engines or None
            if index is not None:
                self._in_pieces(piece for paths in old if paths not in engines for piece in index.leave(paths))

    def _in_pieces(self, pieces: Iterator[None]) -> None:
        is_done = False
        while not is_done:
            with self._changing():
                is_done = next(pieces, self) is self

    def refresh(self, timeout_s: float) -> bool:
        """Ask the server now, and return whether it has answered within ``timeout_s`` seconds.

        For who measures: a request need not wait for it.
        """
        self._process.check()
        if self._thread is None:
            self._start()
        if (thread := self._thread) is None or self._is_closed:
            return False
        with self._read:
            num_wanted = self._num_read + _NUM_AT_ONCE
            thread.run(self._hurry())
            return self._read.wait_for(lambda: self._num_read >= num_wanted, timeout_s)

    async def _hurry(self) -> None:
        self._num_at_once = _NUM_AT_ONCE
        self._is_wanted.set()

    def close(self) -> None:
        """End the thread and its connection. May be called again."""
        self._process.check()
        with self._starting:
            self._is_closed = True
        if self._thread is not None:
            self._thread.close()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._is_closed:
                thread = BackgroundLoop("ragcache-mirror", verify=self._url.startswith("https:"))
                thread.run(self._follow(thread.transport))
                self._thread = thread

    async def _follow(self, transport: httpx.AsyncBaseTransport) -> None:
        client = httpx.AsyncClient(transport=transport, timeout=_TIMEOUT, headers=self._headers)
        pause_s, is_warned = _FIRST_PAUSE_S, False
        while True:
            try:
                await self._mirror(client)
            except _UnsupportedError as error:  # until the server is replaced, or has the key: asked again less often
                is_warned = is_warned and not self.is_current
                if not is_warned:
                    logger.warning(
                        "RC-ORDER-OFF: documents keep the order of retrieval instead of a cache-aware one: %s", error
                    )
                is_warned = True
                pause_s = min(max(2 * pause_s, _LAST_PAUSE_S), _UNSUPPORTED_PAUSE_S)
            except Exception as error:  # a broken connection or answer: what comes after a pause may be whole
                logger.debug("the mirror of the engine's cache lost %s: %s: %s", self._url, type(error).__name__, error)
                pause_s = _FIRST_PAUSE_S if self.is_current else min(2 * pause_s, _LAST_PAUSE_S)
            finally:
                self._replace([])
            await asyncio.sleep(pause_s)

    async def _mirror(self, client: httpx.AsyncClient) -> None:
        """Keep a copy of each data-parallel engine's until an answer is missing or makes no sense."""
        cursor, engines = "", list[CachedPaths]()
        part_pause_s = _PART_PAUSE_S
        while True:
            answer = await self._ask(client, cursor)
            reports = answer["engines"]  # what was before a reset serves until all is complete
            cursor = str(answer["cursor"])
            if len(reports) > _MAX_ENGINES or len(cursor) > _MAX_CURSOR_CHARS:
                raise ValueError(f"{len(reports)} engines and a cursor of {len(cursor)} characters are too many")
            engines = [CachedPaths() if each["is_reset"] else engines[i] for i, each in enumerate(reports)]
            read = {id(paths) for paths in self._engines or ()}
            for paths, each in zip(engines, reports, strict=True):
                # No reader has a copy that is not complete yet.
                with self._changing() if id(paths) in read else nullcontext():
                    paths.apply(each["changes"])
            if not answer["is_complete"]:
                await asyncio.sleep(min(part_pause_s, _POLL_INTERVAL_S))
                part_pause_s *= _PART_PAUSE_GROWTH
            else:
                part_pause_s = _PART_PAUSE_S
                self._replace(engines)
                with self._read:
                    self._num_read += 1
                    self._read.notify_all()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until it is time to ask again, or a caller of :meth:`refresh` waits."""
        if self._num_at_once == 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL_S):  # wait_for may lose a cancellation
                    await self._is_wanted.wait()
            self._is_wanted.clear()
        self._num_at_once = max(self._num_at_once - 1, 0)

    async def _ask(self, client: httpx.AsyncClient, cursor: str) -> dict[str, Any]:
        params = {"cursor": cursor} if cursor else None
        async with client.stream("GET", self._url, params=params) as response:
            if response.status_code in (401, 403):
                raise _UnsupportedError(f"the server refused the API key for {self._url}")
            if response.status_code in (404, 405):
                raise _UnsupportedError(
                    f"there is no {self._url}; start the server with Engine.launch or `ragcache serve`, of this version"
                )
            response.raise_for_status()
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ValueError(f"an answer about cached documents has more than {_MAX_ANSWER_BYTES} bytes")
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError(f"{answer!r:.80} says nothing of cached documents")  # noqa: TRY004 (JSON of another)
        if (version := answer.get("version")) != PATHS_VERSION:
            raise _UnsupportedError(f"the server reports its cache in version {version!r:.80}, this is {PATHS_VERSION}")
        return answer
