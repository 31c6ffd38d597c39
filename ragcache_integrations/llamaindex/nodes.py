"""Convert LlamaIndex's nodes and filters. Importing this module records the nodes of every retriever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.filters import AllOf, AnyOf, FieldCondition, Not, Operator, Where
from ragcache_core.retrieval.storage.framework_documents import plain_metadata, plain_text
from ragcache_core.types import ACL, DocId, Document

_NODE_CONTENT = "_node_content"
_NO_SOURCE = "None"
"""LlamaIndex's ``ref_doc_id`` of a node without a source."""


def document_from_node(node: BaseNode) -> Document:
    """Return a node as a document: its text, and the rest except its embedding as metadata."""
    related = {
        kind: [_plain(each) for each in nodes] if isinstance(nodes, list) else _plain(nodes)
        for kind, nodes in node.relationships.items()
    }
    plain = node.model_copy(update={"metadata": plain_metadata(node.metadata), "relationships": related})
    text = plain_text(node.get_content(metadata_mode=MetadataMode.NONE))
    return Document(node.node_id, text, node_to_metadata_dict(plain, remove_text=True))


def _plain(node: RelatedNodeInfo) -> RelatedNodeInfo:
    return node.model_copy(update={"metadata": plain_metadata(node.metadata)})


def node_from_document(document: Document) -> BaseNode:
    """Return the node stored by :func:`document_from_node`, or a text node for another document.

    The metadata of another document is not shown to the LLM or to an embedding model: only its text is. So its tokens
    and cached KV are the same from every framework.
    """
    metadata = dict(document.metadata)
    if _NODE_CONTENT in metadata:
        return metadata_dict_to_node(metadata, text=document.text)
    return TextNode(
        id_=document.doc_id,
        text=document.text,
        metadata=metadata,
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document.doc_id)},
    )


def source_of(document: Document) -> DocId | None:
    """Return the id of the document from which a stored node was made; another document's own id."""
    if _NODE_CONTENT not in document.metadata:
        return document.doc_id
    source = str(document.metadata.get("ref_doc_id"))
    return None if source == _NO_SOURCE else source


def shown_document(node: BaseNode) -> Document:
    """Return a node as the LLM reads it: its text with the metadata for LLMs."""
    return Document(node.node_id, node.get_content(metadata_mode=MetadataMode.LLM), acl=node.metadata.get(ACL))


def shown_documents(nodes: Sequence[NodeWithScore]) -> list[Document]:
    """Return retrieved nodes as the LLM reads them."""
    return [shown_document(n.node) for n in nodes]


_OPERATORS: dict[FilterOperator, Operator] = {
    FilterOperator.EQ: "eq",
    FilterOperator.NE: "ne",
    FilterOperator.GT: "gt",
    FilterOperator.GTE: "gte",
    FilterOperator.LT: "lt",
    FilterOperator.LTE: "lte",
    FilterOperator.IN: "in",
    FilterOperator.NIN: "nin",
    FilterOperator.CONTAINS: "contains",
    FilterOperator.ANY: "any",
    FilterOperator.ALL: "all",
    FilterOperator.TEXT_MATCH: "text_match",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "text_match_insensitive",
    FilterOperator.IS_EMPTY: "is_empty",
}


def where_of(filters: MetadataFilters | None) -> Where | None:
    """Return the expression of ``filters``; ``None`` if all nodes pass. Filters may be nested.

    Raises:
        ConfigError: an invalid filter, or an operator that does not fit its value.
    """
    if filters is None:
        return None
    if not isinstance(filters, MetadataFilters):
        raise ConfigError(f"filters is {filters!r:.80}: pass LlamaIndex's MetadataFilters(filters=[...])")
    return _where_of(filters) if filters.filters else None


def _where_of(part: MetadataFilters | MetadataFilter) -> Where:
    if isinstance(part, MetadataFilter):
        if part.operator not in _OPERATORS:
            known = ", ".join(operator.value for operator in _OPERATORS)
            raise ConfigError(f"filter {part.key!r} has the operator {part.operator.value!r}: these are known: {known}")
        return FieldCondition(part.key, _OPERATORS[part.operator], part.value)
    parts = tuple(_where_of(each) for each in part.filters)
    if not parts or part.condition in (FilterCondition.AND, None):
        return AllOf(parts)
    return AnyOf(parts) if part.condition == FilterCondition.OR else Not(AnyOf(parts))


CURE = (
    "Search with a retriever, index.as_retriever() for example, and show its nodes as they are, "
    "node.get_content(MetadataMode.LLM); or name what the prompt shows: "
    "llm.engine.remember_documents([Document(id, <the text as shown>)])"
)


class _RetrievalListener(BaseEventHandler):
    """Records the results of retrievers, before the query continues."""

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
