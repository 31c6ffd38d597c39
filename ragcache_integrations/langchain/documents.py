"""LangChain's documents: as core documents, in prompts, and from retrievers.

::

    chain = (
        {"context": retriever | format_documents, "question": RunnablePassthrough()}
        | prompt_from_layout()
        | ChatRAGCache(engine=engine)
        | StrOutputParser()
    )

The prompt is laid out so that requests about the same documents share their prefix. Importing this module is enough
for the documents of every LangChain retriever to be recognised in prompts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document as LangChainDocument
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tracers.context import register_configure_hook

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval.storage.framework_documents import content_id
from ragcache_core.types import Document
from ragcache_integrations.rag.search import DocumentView

AnyDocument = Document | LangChainDocument | Mapping[str, Any]
"""A document of the core, of LangChain, or as JSON: ``{"id": ..., "page_content": ...}``."""


def to_core(documents: Iterable[AnyDocument]) -> list[Document]:
    """Return core documents.

    Raises:
        TypeError: something else than a document.
    """
    return [_to_core(document) for document in documents]


def to_langchain(document: Document) -> LangChainDocument:
    """Return a LangChain document with its id and metadata."""
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

RANK_KEY = "relevance_rank"
"""Key of a document's metadata for its place in the search's result, where the retriever returned another order."""

_DEFAULT = PromptLayout()


def format_documents(documents: Iterable[AnyDocument], layout: PromptLayout = _DEFAULT) -> str:
    """Return the documents as prompt text in the given order, followed by the ``relevance_hint``."""
    shown = to_core(documents)
    ranks = {d.doc_id: rank for d in shown if isinstance(rank := d.metadata.get(RANK_KEY), int)}
    is_ranked = len(ranks) == len(shown)
    hint = layout.hint(shown, sorted(shown, key=lambda d: ranks[d.doc_id]) if is_ranked else None)
    return layout.document_separator.join(filter(None, (layout.context(shown), hint)))


def prompt_from_layout(layout: PromptLayout = _DEFAULT) -> ChatPromptTemplate:
    """Return a prompt template of ``{context}`` and ``{question}`` with the messages of ``layout``.

    The context is the result of :func:`format_documents` for at least one document.
    """
    before, after = (_literal(part) for part in layout.question_format.split("{question}"))
    asked = f"{{context}}{_literal(layout.document_separator)}{before}{{question}}{after}"
    prefix = [("system", _literal(layout.static_prefix))] if layout.static_prefix else []
    return ChatPromptTemplate.from_messages([*prefix, ("human", asked)])


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


CURE = (
    "Search with a retriever, vector_store.as_retriever() for example, and show its documents' page_content unchanged; "
    "or name what the prompt shows: llm.bind(documents=[Document(id=..., page_content=<the text as shown>)])"
)

_MAX_STARTED = 1000


class _RetrieverListener(BaseCallbackHandler):
    """Records queries and results of retrievers, before the chain continues."""

    run_inline = True

    def __init__(self) -> None:
        super().__init__()
        self._started: OrderedDict[UUID, tuple[str, str | None]] = OrderedDict()  # query, name of the retriever
        self._lock = threading.Lock()

    @property
    def ignore_llm(self) -> bool:
        return True

    @property
    def ignore_chat_model(self) -> bool:
        return True

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._started[run_id] = query, kwargs.get("name")
            if len(self._started) > _MAX_STARTED:  # a failed search has no end event
                self._started.popitem(last=False)

    def on_retriever_end(self, documents: Sequence[LangChainDocument], *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            query, name = self._started.pop(run_id, (None, None))
        RETRIEVED.add(to_core(documents), query=query, retriever=name)


_LISTENER = _RetrieverListener()

_listener: ContextVar[BaseCallbackHandler | None] = ContextVar("ragcache_listener", default=_LISTENER)
register_configure_hook(_listener, inheritable=False)  # not inherited: every run requests it
