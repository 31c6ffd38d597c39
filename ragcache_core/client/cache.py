"""What is in an engine's cache: shown, pinned, forgotten, and read from disk ahead of a request.

::

    /v1/ragcache/cache, /v1/ragcache/documents/...   engine.cache, engine.forget
    POST /v1/ragcache/prefetch                       {"prompt_token_ids": [1, 17, ...], "cache_salt": ..., "model": ...}
                                                     ->  {"num_read_tokens": 4096}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import httpx
from pydantic import TypeAdapter, ValidationError

from ragcache_core.client.http.attempt import SENT_ONCE
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.errors import ConfigError, EngineError, RequestRejectedError
from ragcache_core.stats import (
    CONTENTS_ORDERS,
    MAX_LISTED,
    CacheContents,
    CollectedFolders,
    ForgetReceipt,
    PinReceipt,
    PrefetchReceipt,
)
from ragcache_core.types import DocId
from ragcache_core.wire import MAX_DOCUMENTS, read_doc_ids

_MAX_WAIT_S = 600.0
CONNECT_S = 10.0
BESIDES_S = 120.0
"""An engine is asked between two steps, and its first step may compile."""
_RECEIPT = TypeAdapter(ForgetReceipt)
REFUSALS = (400, 403, 404, 405, 409, 413)
_TIMEOUT_S = 10.0
"""The engine answers between two steps."""
_Answer = TypeVar("_Answer")
_WAIT_S = 30.0


class StandsOnDocuments(Protocol):
    """What is kept here of documents, beside the engine's KV: a cache of answers."""

    def forget(self, doc_ids: list[DocId]) -> object:
        """Drop what stands on these documents."""
        ...


class DocumentRoutes:
    """Asks one server. May be used by any thread and any event loop.

    Attributes:
        answer_caches: of the models that ask this engine here; they forget first, whatever the engine answers.
    """

    def __init__(self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient) -> None:
        """``base_url`` ends in ``/v1``; the clients stay their owner's."""
        self._url = f"{base_url}/ragcache/documents"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._http = http
        self._http_async = http_async
        self.answer_caches: WeakSet[StandsOnDocuments] = WeakSet()

    def forget(self, doc_ids: Iterable[DocId], wait_s: float) -> ForgetReceipt:
        """Do what :meth:`EngineClient.forget <ragcache_core.client.engine_client.EngineClient.forget>` says."""
        receipts = []
        for body in self.begin(doc_ids, wait_s):
            with translate_errors():
                answer = self._http.post(f"{self._url}/forget", json=body, **self._how(wait_s))
                receipts.append(read_receipt(answer))
        return reduce(ForgetReceipt.plus, receipts, ForgetReceipt())

    async def aforget(self, doc_ids: Iterable[DocId], wait_s: float) -> ForgetReceipt:
        """Do :meth:`forget` without blocking the event loop."""
        receipts = []
        for body in self.begin(doc_ids, wait_s):
            with translate_errors():
                answer = await self._http_async.post(f"{self._url}/forget", json=body, **self._how(wait_s))
                receipts.append(read_receipt(answer))
        return reduce(ForgetReceipt.plus, receipts, ForgetReceipt())

    def begin(self, doc_ids: Iterable[DocId], wait_s: float) -> list[dict[str, Any]]:
        """Have the caches of answers forget, and return what to ask the engine."""
        bodies = list(_bodies(doc_ids, wait_s))
        for answers in list(self.answer_caches):
            answers.forget([doc_id for body in bodies for doc_id in body["ids"]])
        return bodies

    def _how(self, wait_s: float) -> dict[str, Any]:
        return {"headers": self._headers, "timeout": httpx.Timeout(wait_s + BESIDES_S, connect=CONNECT_S)}


def _bodies(doc_ids: Iterable[DocId], wait_s: float) -> Iterator[dict[str, Any]]:
    check_wait(wait_s)
    if isinstance(doc_ids, str):
        raise ConfigError(f"doc_ids is {doc_ids!r:.80}, a text: give a list of ids, [{doc_ids!r:.80}]")
    wanted = list(dict.fromkeys(doc_ids))
    for start in range(0, len(wanted), MAX_DOCUMENTS):
        yield {"ids": read_doc_ids(wanted[start : start + MAX_DOCUMENTS]), "wait_s": wait_s}


def check_wait(wait_s: float) -> None:
    """Raise ConfigError unless a server may be asked to wait so long."""
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MAX_WAIT_S:
        raise ConfigError(f"wait_s is {wait_s!r:.80}: give 0 to {_MAX_WAIT_S:g} seconds")


def read_receipt(answer: httpx.Response) -> ForgetReceipt:
    """Return the receipt in an answer.

    Raises:
        RequestRejectedError: the server refuses. EngineError: it says something else.
    """
    if answer.status_code in REFUSALS:
        raise RequestRejectedError(f"the engine forgets nothing: {message_of(answer)}")
    answer.raise_for_status()
    try:
        return _RECEIPT.validate_python({**answer.json(), "is_complete": None})
    except (ValidationError, ValueError, TypeError) as error:
        raise EngineError(
            f"the engine's receipt cannot be read ({error}): install the same version of ragcache here and there"
        ) from error


def message_of(answer: httpx.Response) -> str:
    """Return why a server refuses."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {answer.status_code}, as a server without RAGCache does, or an older one"


class Prefetching(Protocol):
    """Has what is on disk of a prompt read before it is asked. May be used by any thread and any event loop."""

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return for how many tokens KV is being read now.

        Args:
            token_ids: the prompt.
            cache_salt: the salt of the request.
            model: its model, which may be an adapter; ``None`` is the engine's own.
            authorization: its ``Authorization`` header; ``None`` is that of the engine's handle.
        """
        ...

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int: ...


class PrefetchRoute:
    """Asks one server. May be used by any thread and any event loop."""

    def __init__(self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient) -> None:
        """``base_url`` ends in ``/v1``; the clients stay their owner's."""
        self._url = f"{base_url}/ragcache/prefetch"
        self._authorization = f"Bearer {api_key}"
        self._http = http
        self._http_async = http_async

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return for how many tokens KV is being read now; 0 where none is on disk alone, or there is no disk.

        Raises:
            EngineError: the server cannot be asked, or refuses.
        """
        with translate_errors():
            asking = self._asking(token_ids, cache_salt, model, authorization)
            return _num_tokens(self._http.post(self._url, **asking))

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int:
        """Do :meth:`prefetch` without blocking the event loop."""
        with translate_errors():
            asking = self._asking(token_ids, cache_salt, model, None)
            return _num_tokens(await self._http_async.post(self._url, **asking))

    def _asking(
        self, token_ids: Sequence[int], cache_salt: str | None, model: str | None, authorization: str | None
    ) -> dict[str, Any]:
        given = {"cache_salt": cache_salt, "model": model}
        body = {"prompt_token_ids": list(token_ids), **{name: v for name, v in given.items() if v is not None}}
        headers = {"Authorization": authorization or self._authorization}
        return {"json": body, "headers": headers, "timeout": _TIMEOUT_S, "extensions": SENT_ONCE}


def _num_tokens(answer: httpx.Response) -> int:
    if answer.status_code == 404:  # plain vLLM
        return 0
    match answer.raise_for_status().json():
        case {"num_read_tokens": int(num_tokens)}:
            return num_tokens
    return 0


class CacheRoutes:
    """The cache of one server. Each method has an async one beside it. May be used by any thread and event loop.

    Ids without cached KV are no error: every answer about documents names them as ``unknown``.
    All of them raise ``RequestRejectedError`` where the server refuses, with what to do, ``ConfigError`` for what is no
    id, no order or no number, and ``EngineError`` where the server cannot be asked.
    """

    def __init__(self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient) -> None:
        """``base_url`` ends in ``/v1``; the clients stay their owner's."""
        self._url = f"{base_url}/ragcache"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._http = http
        self._http_async = http_async

    def ls(self, *, sort: str = "bytes", limit: int = 50) -> CacheContents:
        """Return the ``limit`` cached documents with most ``bytes``, ``uses``, ``saved`` seconds or ``age``."""
        return _read(CacheContents, self._get(_listing(sort, limit)))

    async def als(self, *, sort: str = "bytes", limit: int = 50) -> CacheContents:
        """Do :meth:`ls` without blocking the event loop."""
        return _read(CacheContents, await self._aget(_listing(sort, limit)))

    def show(self, doc_ids: Iterable[DocId]) -> CacheContents:
        """Return what is cached of some documents, each with the paths on which it stands."""
        return _read(CacheContents, self._post("documents/show", _ids(doc_ids)))

    async def ashow(self, doc_ids: Iterable[DocId]) -> CacheContents:
        """Do :meth:`show` without blocking the event loop."""
        return _read(CacheContents, await self._apost("documents/show", _ids(doc_ids)))

    def pin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Have the paths of documents evicted last, in every tier, until :meth:`unpin`, ``forget`` or :meth:`purge`.

        Those on which they will stand as well, as far as ``CacheConfig.pinned_share`` allows. Where it does not allow
        what is there already, nothing is pinned. What is not cached is not pinned, but ``unknown``. Pins end with the
        engine: after a restart, pin again.
        """
        return _read(PinReceipt, self._post("documents/pin", _ids(doc_ids)))

    async def apin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Do :meth:`pin` without blocking the event loop."""
        return _read(PinReceipt, await self._apost("documents/pin", _ids(doc_ids)))

    def unpin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Have documents evicted as any others."""
        return _read(PinReceipt, self._post("documents/unpin", _ids(doc_ids)))

    async def aunpin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Do :meth:`unpin` without blocking the event loop."""
        return _read(PinReceipt, await self._apost("documents/unpin", _ids(doc_ids)))

    def prefetch(self, doc_ids: Iterable[DocId]) -> PrefetchReceipt:
        """Have what is on disk alone of documents read into host memory, on all their paths; return at once.

        ``engine.prefetch`` does so with a prompt.
        """
        return _read(PrefetchReceipt, self._post("documents/prefetch", _ids(doc_ids)))

    async def aprefetch(self, doc_ids: Iterable[DocId]) -> PrefetchReceipt:
        """Do :meth:`prefetch` without blocking the event loop."""
        return _read(PrefetchReceipt, await self._apost("documents/prefetch", _ids(doc_ids)))

    def gc(self, *, unused_days: float = 7, is_trial: bool = False) -> CollectedFolders:
        """Delete the folders in the engine's directory that no engine has open, nor had for so many days.

        They are of other models, weights and releases. With ``is_trial`` they are only named.
        """
        return _read(CollectedFolders, self._post("cache/gc", {"unused_days": unused_days, "is_trial": is_trial}))

    async def agc(self, *, unused_days: float = 7, is_trial: bool = False) -> CollectedFolders:
        """Do :meth:`gc` without blocking the event loop."""
        body = {"unused_days": unused_days, "is_trial": is_trial}
        return _read(CollectedFolders, await self._apost("cache/gc", body))

    def purge(self, *, wait_s: float = _WAIT_S) -> ForgetReceipt:
        """Remove everything from every tier, as ``engine.forget`` does with documents.

        Requests that are being answered keep what they have until they end. Pins end.
        """
        return read_receipt(self._answer("cache/purge", _waiting(wait_s), wait_s))

    async def apurge(self, *, wait_s: float = _WAIT_S) -> ForgetReceipt:
        """Do :meth:`purge` without blocking the event loop."""
        return read_receipt(await self._aanswer("cache/purge", _waiting(wait_s), wait_s))

    def _get(self, query: Mapping[str, Any]) -> httpx.Response:
        with translate_errors():
            return self._http.get(f"{self._url}/cache", params=query, **self._how())

    async def _aget(self, query: Mapping[str, Any]) -> httpx.Response:
        with translate_errors():
            return await self._http_async.get(f"{self._url}/cache", params=query, **self._how())

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._answer(path, body, 0.0)

    async def _apost(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return await self._aanswer(path, body, 0.0)

    def _answer(self, path: str, body: Mapping[str, Any], wait_s: float) -> httpx.Response:
        with translate_errors():
            return self._http.post(f"{self._url}/{path}", json=body, **self._how(wait_s))

    async def _aanswer(self, path: str, body: Mapping[str, Any], wait_s: float) -> httpx.Response:
        with translate_errors():
            return await self._http_async.post(f"{self._url}/{path}", json=body, **self._how(wait_s))

    def _how(self, wait_s: float = 0.0) -> dict[str, Any]:
        return {"headers": self._headers, "timeout": httpx.Timeout(wait_s + BESIDES_S, connect=CONNECT_S)}


def _listing(sort: str, limit: int) -> dict[str, object]:
    if sort not in CONTENTS_ORDERS:
        raise ConfigError(f"sort is {sort!r:.80}: give one of {', '.join(CONTENTS_ORDERS)}")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LISTED:
        raise ConfigError(f"limit is {limit!r:.80}: give 1 to {MAX_LISTED}")
    return {"sort": sort, "limit": limit}


def _ids(doc_ids: Iterable[DocId]) -> dict[str, object]:
    if isinstance(doc_ids, str):
        raise ConfigError(f"doc_ids is {doc_ids!r:.80}, a text: give a list of ids, [{doc_ids!r:.80}]")
    return {"ids": read_doc_ids(list(dict.fromkeys(doc_ids)))}


def _waiting(wait_s: float) -> dict[str, object]:
    check_wait(wait_s)
    return {"wait_s": wait_s}


def _read(kind: type[_Answer], answer: httpx.Response) -> _Answer:
    if answer.status_code in REFUSALS:
        raise RequestRejectedError(f"the engine refuses: {message_of(answer)}")
    answer.raise_for_status()
    try:
        return TypeAdapter(kind).validate_python(answer.json())
    except (ValidationError, ValueError, TypeError) as error:
        raise EngineError(
            f"the engine's answer cannot be read ({error}): install the same version of ragcache here and there"
        ) from error
