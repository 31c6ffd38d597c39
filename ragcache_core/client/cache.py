"""What is in an engine's cache, looked into and acted upon: ``engine.cache``, over ``/v1/ragcache``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from ragcache_core.client.documents import BESIDES_S, CONNECT_S, REFUSALS, check_wait, message_of, read_receipt
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
from ragcache_core.wire import read_doc_ids

_Answer = TypeVar("_Answer")
_WAIT_S = 30.0


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
