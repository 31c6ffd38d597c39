"""The routes of a store's service, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ragcache_core.errors import (
    ConfigError,
    EmptyStoreError,
    RAGCacheError,
    SearchError,
    SearchTimeoutError,
    StoreError,
)
from ragcache_core.retrieval.embedders.base import check_query
from ragcache_core.retrieval.hybrid import Question
from ragcache_core.retrieval.service.metrics import ServiceMetrics
from ragcache_core.retrieval.service.protocol import (
    MAX_IDS,
    PROTOCOL,
    StoreFacts,
    document_said,
    error_said,
    hello,
    line,
    stage_said,
)
from ragcache_core.retrieval.service.streaming import Door, LineResponse, TooLargeError, status_of
from ragcache_core.retrieval.storage.snapshot import Snapshot
from ragcache_core.retrieval.store import DocumentStore
from ragcache_core.retrieval.threads import SearchThreads, in_thread
from ragcache_core.retrieval.wanted import MMR, Wanted
from ragcache_core.runtime.api_keys import ApiKeys
from ragcache_core.types import DocId, RetrievalUpdate

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_RETRY_AFTER_S = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service takes at most.

    Attributes:
        max_k: documents of a search, and candidates of one whose documents shall differ.
        max_body_bytes: of a request.
        max_searches: that run at the same time, texts that are embedded alone among them; others are refused, and
            asked again by :class:`RemoteStore`.
        search_s: seconds of a search, with the sending of its stages.
    """

    max_k: int = 1000
    max_body_bytes: int = 1 << 20
    max_searches: int = 64
    search_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_k", "max_body_bytes", "max_searches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r:.80}: give a whole number of at least 1")
        if not self.search_s > 0:
            raise ConfigError(f"search_s is {self.search_s!r:.80}: give seconds above 0")

    def said(self) -> dict[str, int]:
        """Return those that a client can keep to."""
        return {"max_k": self.max_k, "max_body_bytes": self.max_body_bytes, "max_ids": MAX_IDS}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_StrictT = TypeVar("_StrictT", bound=_Strict)


class _MMR(_Strict):
    fetch_k: int = 20
    lambda_mult: float = 0.5


class _Asked(_Strict):
    """A search."""

    query: str | None = None
    vector: list[float] | None = None
    k: int
    stages: int | list[float] | None = None
    where: dict[str, Any] | None = None
    score_threshold: float | None = None
    mmr: _MMR | None = None


class _AskedDocuments(_Strict):
    ids: list[str]


class _AskedVectors(_Strict):
    texts: list[str]
    of: str = "query"


class StoreApp:
    """A store's routes. The store stays its owner's; the application only reads it, and takes up what others change.

    ``refresh_s``: how often it is looked whether the store has changed on disk.
    """

    def __init__(self, store: DocumentStore, *, keys: ApiKeys, limits: Limits, refresh_s: float) -> None:
        self._store = store
        self._limits = limits
        self._refresh_s = refresh_s
        self._metrics = ServiceMetrics()
        self._num_running = 0
        self._stale_because: str | None = None
        self._note_store()
        routes = [
            Route("/v1/store", self._hello),
            Route("/v1/search", self._search, methods=["POST"]),
            Route("/v1/documents", self._documents, methods=["POST"]),
            Route("/v1/ids", self._ids),
            Route("/v1/embed", self._embed, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._scrape),
        ]
        handlers: Mapping[Any, Any] = {RAGCacheError: _refused, ClientDisconnect: _left}
        starlette = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        self.asgi: ASGIApp = Door(starlette, keys)

    # Routes

    async def _hello(self, _request: Request) -> Response:
        return JSONResponse(hello(self._facts(), self._limits.said()))

    async def _search(self, request: Request) -> ASGIApp:
        asked = await self._read(request, _Asked)
        if (refusal := self._refusal()) is not None:
            return refusal
        snapshot, threads = self._store.begin_search()
        self._check_size("k", min(asked.k, len(snapshot.documents)))
        if asked.mmr is not None:
            self._check_size("fetch_k", asked.mmr.fetch_k)
        self._count_running(1)
        updates = self._stages(snapshot, threads, asked)
        return LineResponse(self._counted(snapshot, updates), at_end=lambda: self._count_running(-1))

    def _refusal(self) -> Response | None:
        """Return the answer to who asks for more than is done at the same time; None where there is room."""
        if self._num_running < self._limits.max_searches:
            return None
        self._metrics.num_searches.labels("refused").inc()
        message = f"{self._num_running} searches run, which is all that this service takes: ask again in a moment"
        said = {"error": {"type": "StoreUnreachableError", "message": message}}
        return JSONResponse(said, 503, {"Retry-After": str(_RETRY_AFTER_S)})

    def _count_running(self, difference: int) -> None:
        self._num_running += difference
        self._metrics.num_running.set(self._num_running)

    async def _stages(
        self, snapshot: Snapshot, threads: SearchThreads, asked: _Asked
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        mmr = None if asked.mmr is None else MMR(asked.mmr.fetch_k, asked.mmr.lambda_mult)

        def read() -> Wanted:
            return snapshot.wanted(asked.k, asked.where, asked.score_threshold, mmr)

        wanted = read() if asked.where is None else await threads.run(read)  # a megabyte of filter takes a while
        if (asked.query is None) == (asked.vector is None):
            raise SearchError("the search has neither a query nor a vector, or both: give one of them")
        if asked.query is not None:
            updates = threads.text_updates(snapshot, asked.query, wanted, asked.stages)
        else:
            question = Question(check_query(asked.vector, snapshot.manifest.dimension))
            updates = threads.updates(snapshot, question, wanted, asked.stages)
        async with aclosing(updates):
            async for update in updates:
                yield update

    async def _counted(
        self, snapshot: Snapshot, updates: AsyncGenerator[RetrievalUpdate, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a search, which counts by how it ended."""
        began_s, outcome = time.perf_counter(), "cancelled"
        known: set[DocId] = set()
        head = line({"protocol": PROTOCOL, "store": StoreFacts.of(snapshot).said()})
        limit = asyncio.timeout(self._limits.search_s)
        try:
            async with limit, aclosing(updates):
                async for update in updates:
                    took_s = time.perf_counter() - began_s
                    if head:
                        self._metrics.first_stage_s.observe(took_s)
                    if update.is_final:
                        outcome = "done"
                        self._metrics.search_s.observe(took_s)
                    yield head + line(stage_said(update, known))
                    head = b""
        except TimeoutError as error:
            outcome = "failed"
            if not limit.expired():  # the embedder's
                raise
            raise SearchTimeoutError(
                f"the search took longer than the {self._limits.search_s:g} s that this service allows"
            ) from error
        except Exception as error:
            outcome = "rejected" if isinstance(error, ValueError | EmptyStoreError) else "failed"
            raise
        finally:
            self._metrics.num_searches.labels(outcome).inc()

    async def _documents(self, request: Request) -> Response:
        asked = await self._read(request, _AskedDocuments)
        _check_number("ids", len(asked.ids))

        snapshot, threads = self._store.begin_search()

        def found() -> list[dict[str, Any]]:
            internal = snapshot.documents.find(asked.ids)
            return [document_said(each) for each in snapshot.documents.read(list(internal.values())).values()]

        return JSONResponse({"protocol": PROTOCOL, "documents": await threads.run(found)})

    async def _ids(self, _request: Request) -> ASGIApp:
        """Answer with the ids of all documents, many on a line, after one that says of which state."""
        snapshot, threads = self._store.begin_search()

        async def lines() -> AsyncGenerator[bytes, None]:
            ids = await threads.run(lambda: list(snapshot.documents.doc_ids()))
            yield line({"protocol": PROTOCOL, "store": StoreFacts.of(snapshot).said()})
            for start in range(0, len(ids), MAX_IDS):
                yield line({"ids": ids[start : start + MAX_IDS]})
            yield line({"is_final": True})

        return LineResponse(lines())

    async def _embed(self, request: Request) -> Response:
        asked = await self._read(request, _AskedVectors)
        _check_number("texts", len(asked.texts))
        if (refusal := self._refusal()) is not None:
            return refusal
        snapshot, threads = self._store.begin_search()
        embedder = snapshot.embedder

        def embed() -> list[list[float]]:
            if asked.of == "query":
                return [embedder.embed_query(text).tolist() for text in asked.texts]
            rows: list[list[float]] = embedder.embed_documents(asked.texts).tolist()
            return rows

        self._count_running(1)
        try:
            vectors = await threads.run(embed)
        finally:
            self._count_running(-1)
        return JSONResponse({"protocol": PROTOCOL, "vectors": vectors})

    async def _health(self, _request: Request) -> Response:
        stats = self._facts().stats
        said = {"status": "ok", "num_documents": stats.num_documents, "generation": stats.generation}
        if self._stale_because is not None:
            said["stale_because"] = self._stale_because
        return JSONResponse(said)

    async def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type=self._metrics.media_type)

    # The store on disk

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch_store())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await in_thread(self._store.refresh)
                self._stale_because = None
            except Exception as error:
                self._metrics.num_failed_refreshes.inc()
                if self._stale_because is None:
                    _logger.warning("the store has changed and cannot be read, the state before is searched: %s", error)
                self._stale_because = f"{error}"
            self._note_store()

    def _note_store(self) -> None:
        with suppress(StoreError):  # closed
            self._metrics.note(self._facts().stats)

    def _facts(self) -> StoreFacts:
        return StoreFacts.of(self._store.begin_search()[0])

    # What is asked

    async def _read(self, request: Request, kind: type[_StrictT]) -> _StrictT:
        """Return what a body asks for.

        Raises:
            SearchError: it is too large, no JSON, or asks for what there is not.
        """
        limit, body = self._limits.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(self._limits.search_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise TooLargeError(f"the request has more than {limit} bytes, all that is taken: ask for less")
        except TimeoutError as error:
            raise SearchTimeoutError(f"the request was not here after {self._limits.search_s:g} s") from error
        try:
            return kind.model_validate(json.loads(bytes(body)))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors()[:5])
            raise SearchError(f"the request cannot be understood ({wrong:.400})") from error
        except (ValueError, RecursionError) as error:
            raise SearchError(f"the request is no JSON ({error})") from error

    def _check_size(self, name: str, value: int) -> None:
        if value > self._limits.max_k:
            raise SearchError(f"{name} is {value}, this service finds at most {self._limits.max_k}: use a smaller k")


def _check_number(name: str, number: int) -> None:
    if number > MAX_IDS:
        raise SearchError(f"the request names {number} {name}, one may name {MAX_IDS}: ask several times")


async def _refused(_request: Request, error: Exception) -> Response:
    return JSONResponse(error_said(error), status_of(error))


async def _left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
