"""Hears of the documents that LangChain's retrievers return, in every chain: importing this is enough."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document as LangChainDocument
from langchain_core.tracers.context import register_configure_hook

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_integrations.langchain.documents import to_core

CURE = (
    "Search with a retriever, vector_store.as_retriever() for example, and show its documents' page_content unchanged; "
    "or name what the prompt shows: llm.bind(documents=[Document(id=..., page_content=<the text as shown>)])"
)

_MAX_STARTED = 1000


class _RetrieverListener(BaseCallbackHandler):
    """Remembers what retrievers were asked and return, before the chain goes on."""

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
register_configure_hook(_listener, inheritable=False)  # not handed down: every run asks for it itself
