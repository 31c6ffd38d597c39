"""Registration of documents with a server, which then recognises them in the prompts of any client.

::

    POST /v1/ragcache/documents/register  {"documents": [{"id": "faq-7", "text": ..., "acl": ["hr"]}, ...]}
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import httpx

from ragcache_core.client.server_api import Call, ServerAPI
from ragcache_core.errors import EngineError, RAGCacheError, RequestRejectedError
from ragcache_core.log import logger_of
from ragcache_core.stats import RegistrationReceipt
from ragcache_core.types import DocId, Document

logger = logger_of(__name__)

_MAX_DOCUMENTS = 256
_MAX_CHARS = 2 << 20
"""Of a request: the server tokenises it within seconds, and takes bodies of 16 MiB."""
_MAX_SENT = 1 << 17
_MAX_EPOCHS = 256
_MAX_WAITING = 1 << 14
_TIMEOUT = httpx.Timeout(120.0, connect=10.0)


class DocumentRegistrations:
    """Registers documents with one server. May be used by any thread.

    Args:
        api: asks the server.

    Attributes:
        is_used: documents were registered here, so those that retrievers return are registered as well.
    """

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self._sent: OrderedDict[DocId, bytes] = OrderedDict()
        self._waiting: queue.Queue[Document | None] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self._epochs: OrderedDict[str, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_warned = False
        self.is_used = False

    def register(
        self, documents: Iterable[Document], progress: Callable[[int], object] | None = None
    ) -> RegistrationReceipt:
        """Register documents; see ``Engine.register``."""
        self.is_used = True
        receipts = []
        for batch in _batches(documents):
            receipt, epoch = self._api.ask(_registering(batch))
            receipts.append(receipt)
            self.saw(epoch)
            with self._lock:
                failed = receipts[-1].errors
                for document in batch:
                    if document.doc_id not in failed:
                        self._sent[document.doc_id] = _digest(document)
                        self._sent.move_to_end(document.doc_id)
                while len(self._sent) > _MAX_SENT:
                    self._sent.popitem(last=False)
            if progress is not None:
                progress(len(batch))
        return reduce(RegistrationReceipt.merge, receipts, RegistrationReceipt())

    def register_in_background(self, documents: Iterable[Document]) -> None:
        """Register the documents that this client has not registered yet, without waiting.

        Of more than 16,384 that wait, the newest are left out, and registered when they are given again.
        """
        self.is_used = True
        for document in documents:
            with self._lock:
                if self._is_closed or self._sent.get(document.doc_id) == _digest(document):
                    continue
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ragcache-register", daemon=True)
                    self._thread.start()
            try:
                self._waiting.put_nowait(document)
            except queue.Full:
                return

    def saw(self, epoch: str | None) -> None:
        """Record the server's registry: a new one has none of the documents that were registered here."""
        with self._lock:
            if epoch is None or epoch in self._epochs:
                return
            is_lost = bool(self._epochs) and bool(self._sent)
            self._epochs[epoch] = None
            while len(self._epochs) > _MAX_EPOCHS:
                self._epochs.popitem(last=False)
            if is_lost:
                self._sent.clear()
        if is_lost:
            logger.warning(
                "RC-REGISTRATIONS-GONE: a server has none of the documents that were registered: it was restarted "
                "without a disk tier, or is another replica. Those that retrievers return are registered again; "
                "register others with engine.register"
            )

    def forget(self, doc_ids: Iterable[DocId]) -> None:
        """Register documents again when they are given again: the server has forgotten them."""
        with self._lock:
            for doc_id in doc_ids:
                self._sent.pop(doc_id, None)

    def close(self) -> None:
        """End the thread; documents that wait are left out."""
        with self._lock:
            self._is_closed, thread = True, self._thread
        if thread is None:
            return
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout=_TIMEOUT.read)

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < _MAX_DOCUMENTS and not self._waiting.empty():
                if (document := self._waiting.get()) is None:
                    return
                batch.append(document)
            try:
                receipt = self.register(batch)
            except RAGCacheError as error:
                self._warn(f"{len(batch)} documents are not registered: {error}")
            else:
                for doc_id, why in list(receipt.errors.items())[:1]:
                    self._warn(f"{len(receipt.errors)} documents are not registered, {doc_id!r:.80}: {why}")

    def _warn(self, message: str) -> None:
        if not self._is_warned and not self._is_closed:
            logger.warning("RC-NOT-REGISTERED: plain clients have no statistics of some documents: %s", message)
        self._is_warned = True


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        if batch and (len(batch) == _MAX_DOCUMENTS or num_chars + len(document.text) > _MAX_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(document)
        num_chars += len(document.text)
    if batch:
        yield batch


def _registering(documents: Iterable[Document]) -> Call[tuple[RegistrationReceipt, str | None]]:
    records = [{"id": d.doc_id, "text": d.text, **({} if d.acl is None else {"acl": list(d.acl)})} for d in documents]
    body = {"documents": records}
    return Call("/v1/ragcache/documents/register", _read, method="POST", body=body, timeout=_TIMEOUT)


def _read(answer: httpx.Response) -> tuple[RegistrationReceipt, str | None]:
    if answer.status_code in (400, 403, 404, 405, 413):
        raise RequestRejectedError(
            f"the server registers no documents (status {answer.status_code}: {answer.text:.200}): use one with "
            "RAGCache, and look for RC-RECOGNITION-OFF in its log"
        )
    answer.raise_for_status()
    try:
        body: dict[str, Any] = answer.json()
        results: list[dict[str, Any]] = body["documents"]
        receipt = RegistrationReceipt(
            num_registered=sum(bool(each["registered"]) for each in results),
            errors={str(each.get("id")): each["error"] for each in results if "error" in each},
            warnings={str(each.get("id")): each["warning"] for each in results if "warning" in each},
        )
        return receipt, body.get("epoch")
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"the server's answer to a registration cannot be read: {error}") from error


def _digest(document: Document) -> bytes:
    return hashlib.sha256(repr((document.text, document.acl)).encode("utf-8", "replace")).digest()[:8]
