"""Staged search in a Qdrant collection by ``hnsw_ef``, the number of candidates in its graph search."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.retrieval.base import extra_module
from ragcache_core.retrieval.embedders.base import as_embedder
from ragcache_core.retrieval.remote.growing import Found, GrowingEffort
from ragcache_core.types import Document

QdrantEffort = int | Literal["exact"]
_TEXTS = ("page_content", "text", "document")


def qdrant_stages(
    client: Any,
    collection_name: str,
    embedder: object,
    *,
    efforts: Sequence[QdrantEffort] = (16, 128),
    query_filter: Any = None,
    using: str | None = None,
    document_of: Callable[[str, Mapping[str, Any]], Document] | None = None,
) -> GrowingEffort[QdrantEffort]:
    """Return a staged retriever over a Qdrant collection.

    ::

        source = qdrant_stages(QdrantClient("http://qdrant:6333"), "docs", embeddings, efforts=(16, 128))
        retriever = RAGCacheRetriever(store=source, engine=engine)

    Scores are Qdrant's. Its local mode, ``QdrantClient(":memory:")``, is exact whatever the effort is.

    Args:
        client: a ``QdrantClient`` or an ``AsyncQdrantClient``, which stays the caller's.
        collection_name: the collection.
        embedder: what embeds the question: one of ours, LangChain's or LlamaIndex's.
        efforts: ``hnsw_ef`` of each stage; the last may be ``"exact"``, which compares all vectors.
        query_filter: Qdrant's own ``Filter``.
        using: the name of the vector, where points have several.
        document_of: makes a document of a point's id and payload; by default its text is ``page_content`` (LangChain),
            ``text`` or ``document``, and its metadata ``metadata``, or all the rest.

    Raises:
        ConfigError: an effort that is none, or the extra ``qdrant`` is not installed.
    """
    models = extra_module("qdrant_client.models", "qdrant")
    for effort in efforts:
        if effort != "exact" and (isinstance(effort, bool) or not isinstance(effort, int) or effort < 1):
            raise ConfigError(f"an effort is {effort!r:.80}: give an hnsw_ef of at least 1, or 'exact'")
    made, embed = document_of or _document_of, as_embedder(embedder).embed_query

    def settings(vector: Any, k: int, effort: QdrantEffort) -> dict[str, Any]:
        params = models.SearchParams(exact=True) if effort == "exact" else models.SearchParams(hnsw_ef=effort)
        return {
            "collection_name": collection_name,
            "query": vector.tolist(),
            "using": using,
            "query_filter": query_filter,
            "limit": k,
            "search_params": params,
            "with_payload": True,
        }

    def documents(response: Any) -> Found:
        return [(made(str(point.id), point.payload or {}), point.score) for point in response.points]

    def find(vector: Any, k: int, effort: QdrantEffort) -> Found:
        return documents(client.query_points(**settings(vector, k, effort)))

    async def find_awaited(vector: Any, k: int, effort: QdrantEffort) -> Found:
        return documents(await client.query_points(**settings(vector, k, effort)))

    is_async = inspect.iscoroutinefunction(client.query_points)
    return GrowingEffort(find_awaited if is_async else find, efforts, embed=embed, identity=f"qdrant {collection_name}")


def _document_of(point_id: str, payload: Mapping[str, Any]) -> Document:
    key = next((key for key in _TEXTS if isinstance(payload.get(key), str)), None)
    if key is None:
        raise SearchError(
            f"the payload of point {point_id} has no {', '.join(_TEXTS)}, but {', '.join(payload) or 'nothing'}: "
            "give document_of=, which makes a Document of a point's id and payload"
        )
    metadata = payload.get("metadata")
    rest = {name: value for name, value in payload.items() if name != key}
    return Document(point_id, payload[key], metadata if isinstance(metadata, Mapping) else rest)
