"""Documents of LangChain as documents of the core, and back. Ids and metadata survive the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.documents import Document as LangChainDocument

from ragcache_core.retrieval.storage.framework_documents import content_id
from ragcache_core.types import Document
from ragcache_integrations.rag.search import DocumentView

AnyDocument = Document | LangChainDocument | Mapping[str, Any]
"""A document of the core, of LangChain, or as JSON: ``{"id": ..., "page_content": ...}``."""


def to_core(documents: Iterable[AnyDocument]) -> list[Document]:
    """Return documents of the core.

    Raises:
        TypeError: something else than a document.
    """
    return [_to_core(document) for document in documents]


def to_langchain(document: Document) -> LangChainDocument:
    """Return a document of LangChain with its id and its metadata."""
    return LangChainDocument(id=document.doc_id, page_content=document.text, metadata=dict(document.metadata))


def _to_core(document: AnyDocument) -> Document:
    match document:
        case Document():
            return document
        case LangChainDocument():
            text = document.page_content
            return Document(document.id or content_id(text), text, document.metadata)
        case {"page_content": str(text)} | {"text": str(text)}:
            return Document(str(document.get("id") or content_id(text)), text, document.get("metadata") or {})
    raise TypeError(
        f"{document!r:.80} is not a document: pass ragcache or LangChain documents, or dictionaries with page_content"
    )


VIEW: DocumentView[LangChainDocument] = DocumentView(lambda documents: [to_langchain(d) for d in documents], to_core)
