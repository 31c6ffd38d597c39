"""What is done to an engine's cache by document: forgotten, over ``/v1/ragcache/documents``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, Protocol
from weakref import WeakSet

import httpx
from pydantic import TypeAdapter, ValidationError

from ragcache_core.client.http.errors import translate_errors
from ragcache_core.errors import ConfigError, EngineError, RequestRejectedError
from ragcache_core.stats import ForgetReceipt
from ragcache_core.types import DocId
from ragcache_core.wire import MAX_DOCUMENTS, read_doc_ids

_MAX_WAIT_S = 600.0
CONNECT_S = 10.0
BESIDES_S = 120.0
"""An engine is asked between two steps, and its first step may compile."""
_RECEIPT = TypeAdapter(ForgetReceipt)
REFUSALS = (400, 403, 404, 405, 409, 413)


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
