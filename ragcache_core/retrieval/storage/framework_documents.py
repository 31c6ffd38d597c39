"""Convert documents of LangChain and LlamaIndex to core documents, without importing the frameworks."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Protocol
from uuid import UUID

from ragcache_core.errors import DocumentError
from ragcache_core.log import logger_of
from ragcache_core.types import DocId, Document

logger = logger_of(__name__)


class LangChainDocument(Protocol):
    """The attributes of a LangChain ``Document`` that a store reads."""

    @property
    def id(self) -> str | None: ...

    @property
    def page_content(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class LlamaIndexNode(Protocol):
    """The attributes of a LlamaIndex node that a store reads."""

    @property
    def node_id(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def get_content(self) -> str: ...


AnyDocument = Document | LangChainDocument | LlamaIndexNode


class _Store(Protocol):
    @property
    def put(self) -> Callable[..., object]: ...

    @property
    def delete(self) -> Callable[..., object]: ...


def as_documents(documents: Iterable[AnyDocument]) -> list[Document]:
    """Return core documents: core documents as they are, documents of the frameworks converted.

    A LangChain document without an id gets one that is made of its text and metadata, and of a number where a batch
    holds the same document several times: the same batch has the same ids at every run.

    Raises:
        DocumentError: an object that is not a document, or one document instead of several.
    """
    if isinstance(documents, (str, bytes, Mapping)) or _is_document(documents) or not isinstance(documents, Iterable):
        raise DocumentError(
            f"documents is a {_type_name(documents)}: put takes a list of documents, as add does; pass [document]"
        )
    num_same: Counter[DocId] = Counter()
    found = []
    for document in documents:
        if isinstance(document, Document):
            found.append(document)
            continue
        doc_id, text, metadata = _parts(document)
        text, metadata = plain_text(text), plain_metadata(metadata)
        if not doc_id:
            doc_id = content_id(text, metadata)
            num_same[doc_id] += 1
            doc_id += f"-{num_same[doc_id]}" if num_same[doc_id] > 1 else ""
        found.append(Document(str(doc_id), text, metadata))
    return found


def content_id(text: str, metadata: Mapping[str, Any] | None = None) -> DocId:
    """Return an id for a document without one: a hash of its content."""
    content = text + json.dumps(metadata, sort_keys=True, default=str) if metadata else text
    return f"text-{hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


def plain_text(text: str) -> str:
    """Return a text that a store accepts: NUL characters removed, lone surrogates replaced."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as JSON values: dates and times in ISO format, infinite numbers and NaN as ``None``."""
    try:
        return {str(key): _plain(value) for key, value in metadata.items()}
    except RecursionError:  # the store refuses it, and names the document
        return dict(metadata)


def put_nonblank(
    store: _Store, documents: Sequence[Document], *, embeddings: Sequence[Any] | None = None, **settings: Any
) -> None:
    """Store documents that have a text, the last of several with one id, and warn once about the others.

    A blank document also removes the stored document with its id: blank is its newest version.

    Args:
        store: the store.
        documents: the documents.
        embeddings: a vector for each of ``documents``.
        **settings: of the store's ``put``.
    """
    newest = {document.doc_id: i for i, document in enumerate(documents)}
    blank = [doc_id for doc_id, i in newest.items() if not documents[i].text.strip()]
    kept = [i for doc_id, i in newest.items() if documents[i].text.strip()]
    if embeddings is not None and len(embeddings) == len(documents):
        embeddings = [embeddings[i] for i in kept]
    store.put([documents[i] for i in kept], embeddings=embeddings, **settings)
    if blank:
        store.delete(blank, missing_ok=True)
        logger.warning(
            "RC-DOCUMENTS-BLANK: %d of %d documents have no text and are not stored", len(blank), len(newest)
        )


def _parts(document: Any) -> tuple[object, str, Mapping[str, Any]]:
    """Return id, text and metadata of a framework's document."""
    if _is_document(document):
        if isinstance(text := getattr(document, "page_content", None), str):
            return getattr(document, "id", None), text, document.metadata
        return document.node_id, document.get_content(), document.metadata
    raise DocumentError(
        f"{_type_name(document)} is not a document: pass ragcache_core.Document(doc_id, text), a "
        "LangChain document or a LlamaIndex node"
    )


def _is_document(value: Any) -> bool:
    """Return whether ``value`` is a core document, or has the attributes of a framework's document."""
    if isinstance(value, Document):
        return True
    if isinstance(value, type) or not isinstance(getattr(value, "metadata", None), Mapping):
        return False
    is_node = hasattr(value, "node_id") and callable(getattr(value, "get_content", None))
    return is_node or isinstance(getattr(value, "page_content", None), str)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    match value:
        case date() | time():
            return value.isoformat()
        case UUID() | PurePath() | Decimal():
            return str(value)
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted((_plain(each) for each in value), key=str)
    if getattr(value, "shape", None) == ():  # a number of NumPy
        return _plain(value.item())
    return value
