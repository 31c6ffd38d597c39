"""Hears of the nodes that LlamaIndex's retrievers return, in every query engine: importing this is enough."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_integrations.llamaindex.nodes import shown_documents

CURE = (
    "Search with a retriever, index.as_retriever() for example, and show its nodes as they are, "
    "node.get_content(MetadataMode.LLM); or name what the prompt shows: "
    "llm.engine.remember_documents([Document(id, <the text as shown>)])"
)


class _RetrievalListener(BaseEventHandler):
    """Remembers what retrievers return, before the query goes on."""

    @classmethod
    def class_name(cls) -> str:
        return "RAGCacheRetrievalListener"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            asked = event.str_or_query_bundle
            query = asked if isinstance(asked, str) else asked.query_str
            retriever = (event.span_id or "").partition(".")[0] or None  # a span's id begins with the class's name
            RETRIEVED.add(shown_documents(event.nodes), query=query, retriever=retriever)


get_dispatcher().add_event_handler(_RetrievalListener())
