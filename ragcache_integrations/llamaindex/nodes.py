"""LlamaIndex's nodes as the core's documents, and back."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from ragcache_core.retrieval.storage.framework_documents import plain_metadata, plain_text
from ragcache_core.types import ACL, DocId, Document

_NODE_CONTENT = "_node_content"
_NO_SOURCE = "None"
"""What LlamaIndex writes as ``ref_doc_id`` of a node without a source."""


def document_from_node(node: BaseNode) -> Document:
    """Return a node as a document: its text, and all the rest of it as metadata. The embedding is left out."""
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
    """Return the node that :func:`document_from_node` stored, or a text node for a document from elsewhere.

    The metadata of a document from elsewhere is not shown to the LLM or to an embedding model: its text is the whole
    document, so that its tokens, and what is cached of them, are the same from every framework.
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
    """Return the id of the document that a stored node was made from; a document from elsewhere is its own source."""
    if _NODE_CONTENT not in document.metadata:
        return document.doc_id
    source = str(document.metadata.get("ref_doc_id"))
    return None if source == _NO_SOURCE else source


def shown_document(node: BaseNode) -> Document:
    """Return a node as the document that the LLM shall read: with the metadata that the node shows to an LLM."""
    return Document(node.node_id, node.get_content(metadata_mode=MetadataMode.LLM), acl=node.metadata.get(ACL))


def shown_documents(nodes: Sequence[NodeWithScore]) -> list[Document]:
    """Return retrieved nodes as the documents that the LLM shall read."""
    return [shown_document(n.node) for n in nodes]
