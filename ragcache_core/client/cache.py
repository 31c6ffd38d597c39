"""Inspect and manage an engine's cache: list, pin, delete and prefetch documents.

::

    /v1/ragcache/cache, /v1/ragcache/documents/...   engine.cache, engine.forget
    POST /v1/ragcache/prefetch                       {"prompt_token_ids": [1, 17, ...], "cache_salt": ..., "model": ...}
                                                     ->  {"num_read_tokens": 4096}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import httpx
from pydantic import TypeAdapter, ValidationError

from ragcache_core.client.server_api import Call, ServerAPI
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
_CONNECT_S = 10.0
_BESIDES_S = 120.0
"""The engine answers between two steps, and its first step may compile."""
_REFUSALS = (400, 403, 404, 405, 409, 413)
_PREFETCH_TIMEOUT_S = 10.0
_Answer = TypeVar("_Answer")
_WAIT_S = 30.0


class DocumentDependent(Protocol):
    """A client-side cache of answers that depend on documents."""

    def forget(self, doc_ids: list[DocId]) -> object:
        """Delete the answers that were made from these documents."""
        ...


class DocumentRoutes:
    """Removes documents from one server. May be used by any thread and any event loop.

    Attributes:
        answer_caches: of the models that ask this engine here; they forget first, whatever the engine answers.
    """

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self.answer_caches: WeakSet[DocumentDependent] = WeakSet()

    def forget(self, doc_ids: Iterable[DocId], wait_s: float) -> ForgetReceipt:
        """Do what :meth:`EngineClient.forget <ragcache_core.client.engine_client.EngineClient.forget>` says."""
        return _sum(self._api.ask(call) for call in self.begin(doc_ids, wait_s))

    async def aforget(self, doc_ids: Iterable[DocId], wait_s: float) -> ForgetReceipt:
        """Do :meth:`forget` without blocking the event loop."""
        return _sum([await self._api.aask(call) for call in self.begin(doc_ids, wait_s)])

    def begin(self, doc_ids: Iterable[DocId], wait_s: float) -> list[Call[ForgetReceipt]]:
        """Delete the dependent answers, and return the requests to send to the engine."""
        calls = list(_forgetting(doc_ids, wait_s))
        for answers in list(self.answer_caches):
            answers.forget([doc_id for call in calls for doc_id in (call.body or {})["ids"]])
        return calls


class PrefetchRoute:
    """Reads a prompt's blocks from disk into host memory, before the prompt is sent. Thread-safe."""

    def __init__(self, api: ServerAPI) -> None:
        self._api = api

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return the number of tokens whose KV is being read now; 0 if none of it is only on disk.

        Args:
            token_ids: the prompt.
            cache_salt: the salt of the request.
            model: its model, which may be an adapter; ``None`` is the engine's own.
            authorization: its ``Authorization`` header; ``None`` is that of the engine's handle.

        Raises:
            EngineError: the server cannot be asked, or refuses.
        """
        return self._api.ask(_prefetching(token_ids, cache_salt, model, authorization))

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int:
        """Do :meth:`prefetch` without blocking the event loop."""
        return await self._api.aask(_prefetching(token_ids, cache_salt, model, None))


class CacheRoutes:
    """Inspects and manages the cache of one server. Each method has an async variant. Thread-safe.

    Ids without cached KV are no error; results list them as ``unknown``. All methods raise ``RequestRejectedError``,
    with a hint, if the server rejects the call, ``ConfigError`` for invalid arguments, and ``EngineError`` if the
    server does not answer.
    """

    def __init__(self, api: ServerAPI) -> None:
        self._api = api

    def ls(self, *, sort: str = "bytes", limit: int = 50) -> CacheContents:
        """Return the ``limit`` cached documents with most ``bytes``, ``uses``, ``saved`` seconds or ``age``."""
        return self._api.ask(_listing(sort, limit))

    async def als(self, *, sort: str = "bytes", limit: int = 50) -> CacheContents:
        """Do :meth:`ls` without blocking the event loop."""
        return await self._api.aask(_listing(sort, limit))

    def show(self, doc_ids: Iterable[DocId]) -> CacheContents:
        """Return the cached prefixes of some documents."""
        return self._api.ask(_about("show", doc_ids, CacheContents))

    async def ashow(self, doc_ids: Iterable[DocId]) -> CacheContents:
        """Do :meth:`show` without blocking the event loop."""
        return await self._api.aask(_about("show", doc_ids, CacheContents))

    def pin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Evict the prefixes of documents last, in every tier, until :meth:`unpin`, ``forget`` or :meth:`purge`.

        Later prefixes of the documents are included, within ``CacheConfig.pinned_share``. If the present ones exceed
        it, nothing is pinned. Documents without cached KV are ``unknown``. Pins end with the engine: pin again after a
        restart.
        """
        return self._api.ask(_about("pin", doc_ids, PinReceipt))

    async def apin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Do :meth:`pin` without blocking the event loop."""
        return await self._api.aask(_about("pin", doc_ids, PinReceipt))

    def unpin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Evict documents as usual again."""
        return self._api.ask(_about("unpin", doc_ids, PinReceipt))

    async def aunpin(self, doc_ids: Iterable[DocId]) -> PinReceipt:
        """Do :meth:`unpin` without blocking the event loop."""
        return await self._api.aask(_about("unpin", doc_ids, PinReceipt))

    def prefetch(self, doc_ids: Iterable[DocId]) -> PrefetchReceipt:
        """Read the blocks of documents that are only on disk into host memory, and return at once.

        ``engine.prefetch`` does so with a prompt.
        """
        return self._api.ask(_about("prefetch", doc_ids, PrefetchReceipt))

    async def aprefetch(self, doc_ids: Iterable[DocId]) -> PrefetchReceipt:
        """Do :meth:`prefetch` without blocking the event loop."""
        return await self._api.aask(_about("prefetch", doc_ids, PrefetchReceipt))

    def gc(self, *, unused_days: float = 7, dry_run: bool = False) -> CollectedFolders:
        """Delete unused cache namespaces of the engine's directory, which no engine has opened for some days.

        They are of other models, weights and releases. With ``dry_run`` they are only named.
        """
        return self._api.ask(_collecting(unused_days, dry_run=dry_run))

    async def agc(self, *, unused_days: float = 7, dry_run: bool = False) -> CollectedFolders:
        """Do :meth:`gc` without blocking the event loop."""
        return await self._api.aask(_collecting(unused_days, dry_run=dry_run))

    def purge(self, *, wait_s: float = _WAIT_S) -> ForgetReceipt:
        """Delete all KV from every tier.

        Requests that are being answered keep what they have until they end. Pins end.
        """
        return self._api.ask(_purging(wait_s))

    async def apurge(self, *, wait_s: float = _WAIT_S) -> ForgetReceipt:
        """Do :meth:`purge` without blocking the event loop."""
        return await self._api.aask(_purging(wait_s))


def _listing(sort: str, limit: int) -> Call[CacheContents]:
    if sort not in CONTENTS_ORDERS:
        raise ConfigError(f"sort is {sort!r:.80}: give one of {', '.join(CONTENTS_ORDERS)}")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LISTED:
        raise ConfigError(f"limit is {limit!r:.80}: give 1 to {MAX_LISTED}")
    params = {"sort": sort, "limit": limit}
    return Call("/v1/ragcache/cache", partial(_read, CacheContents), params=params, timeout=_timeout(0.0))


def _about(what: str, doc_ids: Iterable[DocId], kind: type[_Answer]) -> Call[_Answer]:
    ids = read_doc_ids(listed(doc_ids))
    return _posting(f"documents/{what}", {"ids": ids}, partial(_read, kind))


def _collecting(unused_days: float, *, dry_run: bool) -> Call[CollectedFolders]:
    body = {"unused_days": unused_days, "dry_run": dry_run}
    return _posting("cache/gc", body, partial(_read, CollectedFolders))


def _purging(wait_s: float) -> Call[ForgetReceipt]:
    _check_wait(wait_s)
    return _posting("cache/purge", {"wait_s": wait_s}, _read_receipt, wait_s)


def _forgetting(doc_ids: Iterable[DocId], wait_s: float) -> Iterator[Call[ForgetReceipt]]:
    _check_wait(wait_s)
    wanted = listed(doc_ids)
    for start in range(0, len(wanted), MAX_DOCUMENTS):
        ids = read_doc_ids(wanted[start : start + MAX_DOCUMENTS])
        yield _posting("documents/forget", {"ids": ids, "wait_s": wait_s}, _read_receipt, wait_s)


def _prefetching(
    token_ids: Sequence[int], cache_salt: str | None, model: str | None, authorization: str | None
) -> Call[int]:
    given = {"cache_salt": cache_salt, "model": model}
    body = {"prompt_token_ids": list(token_ids), **{name: v for name, v in given.items() if v is not None}}
    return Call(
        "/v1/ragcache/prefetch",
        _num_tokens,
        method="POST",
        body=body,
        timeout=_PREFETCH_TIMEOUT_S,
        authorization=authorization,
        is_sent_once=True,
    )


def _posting(
    path: str, body: Mapping[str, Any], read: Callable[[httpx.Response], _Answer], wait_s: float = 0.0
) -> Call[_Answer]:
    return Call(f"/v1/ragcache/{path}", read, method="POST", body=body, timeout=_timeout(wait_s))


def _timeout(wait_s: float) -> httpx.Timeout:
    return httpx.Timeout(wait_s + _BESIDES_S, connect=_CONNECT_S)


def listed(doc_ids: Iterable[DocId]) -> list[DocId]:
    """Return ids of documents, each once.

    Raises:
        ConfigError: it is one text.
    """
    if isinstance(doc_ids, str):
        raise ConfigError(f"doc_ids is {doc_ids!r:.80}, a text: give a list of ids, [{doc_ids!r:.80}]")
    return list(dict.fromkeys(doc_ids))


def _check_wait(wait_s: float) -> None:
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MAX_WAIT_S:
        raise ConfigError(f"wait_s is {wait_s!r:.80}: give 0 to {_MAX_WAIT_S:g} seconds")


def _sum(receipts: Iterable[ForgetReceipt]) -> ForgetReceipt:
    return reduce(ForgetReceipt.merge_sequential, receipts, ForgetReceipt())


def _num_tokens(answer: httpx.Response) -> int:
    if answer.status_code == 404:  # plain vLLM
        return 0
    match answer.raise_for_status().json():
        case {"num_read_tokens": int(num_tokens)}:
            return num_tokens
    return 0


def _read_receipt(answer: httpx.Response) -> ForgetReceipt:
    return _read(ForgetReceipt, answer, refusal="the engine forgets nothing", added={"is_complete": None})


def _read(
    kind: type[_Answer],
    answer: httpx.Response,
    *,
    refusal: str = "the engine refuses",
    added: Mapping[str, object] | None = None,
) -> _Answer:
    """Return a server's response as an object of ``kind``, with the fields ``added``.

    Raises:
        RequestRejectedError: it refuses. EngineError: it says something else.
    """
    if answer.status_code in _REFUSALS:
        raise RequestRejectedError(f"{refusal}: {_message_of(answer)}")
    answer.raise_for_status()
    try:
        return TypeAdapter(kind).validate_python({**answer.json(), **(added or {})})
    except (ValidationError, ValueError, TypeError) as error:
        raise EngineError(
            f"the engine's answer cannot be read ({error}): install the same version of ragcache here and there"
        ) from error


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {answer.status_code}, as a server without RAGCache does, or an older one"
