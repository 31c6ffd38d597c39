"""Staged search in a LanceDB table by ``nprobes``, the number of searched lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.embedders.base import as_embedder
from ragcache_core.retrieval.remote.growing import Found, GrowingEffort
from ragcache_core.types import Document

_OF_LANCEDB = {"_distance", "_relevance_score", "_rowid"}


def lancedb_stages(
    table: Any,
    embedder: object,
    *,
    efforts: Sequence[int] = (2, 20),
    refine_factor: int | None = None,
    where: str | None = None,
    vector_column: str = "vector",
    document_of: Callable[[Mapping[str, Any]], Document] | None = None,
) -> GrowingEffort[int]:
    """Return a staged retriever over a LanceDB table with an IVF index; without one every stage is exact.

    Args:
        table: an open table, which the caller closes.
        embedder: embeds the question: one of RAGCache, LangChain or LlamaIndex.
        efforts: ``nprobes`` of each stage; LanceDB's own is 20.
        refine_factor: how many times ``k`` vectors are compared uncompressed, in the last stage.
        where: LanceDB's filter in SQL, applied before the search.
        vector_column: the column that is searched.
        document_of: makes a document of a row; by default its columns ``id`` and ``text``, and the rest as metadata.

    Raises:
        ConfigError: an invalid effort.
    """
    for effort in efforts:
        if isinstance(effort, bool) or not isinstance(effort, int) or effort < 1:
            raise ConfigError(f"an effort is {effort!r:.80}: give nprobes of at least 1")
    made = document_of or _document_of

    def find(vector: Any, k: int, effort: int) -> Found:
        search = table.search(vector, vector_column_name=vector_column).nprobes(effort).limit(k)
        if where is not None:
            search = search.where(where, prefilter=True)
        if refine_factor is not None and effort == efforts[-1]:
            search = search.refine_factor(refine_factor)
        rows = search.to_list()
        kept = [{name: value for name, value in row.items() if name != vector_column} for row in rows]
        return [(made(row), row["_distance"]) for row in kept]

    identity = f"lancedb {getattr(table, 'name', '')}"
    return GrowingEffort(find, efforts, embed=as_embedder(embedder).embed_query, identity=identity)


def _document_of(row: Mapping[str, Any]) -> Document:
    rest = {name: value for name, value in row.items() if name not in {"id", "text", *_OF_LANCEDB}}
    return Document(str(row["id"]), str(row["text"]), rest)
