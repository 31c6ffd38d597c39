"""Staged search in a Postgres table with pgvector, by ``hnsw.ef_search`` or ``ivfflat.probes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.retrieval.base import extra_module
from ragcache_core.retrieval.embedders.base import as_embedder
from ragcache_core.retrieval.remote.growing import Found, GrowingEffort
from ragcache_core.types import Document

PgvectorEffort = int | Literal["exact"]
PgvectorIndex = Literal["hnsw", "ivfflat"]
PgvectorMetric = Literal["l2", "cosine", "ip"]

_SETTINGS = {"hnsw": ("hnsw.ef_search", 1000), "ivfflat": ("ivfflat.probes", 32768)}
"""The setting of an effort, and its maximum in pgvector."""
_OPERATORS = {"l2": "<->", "cosine": "<=>", "ip": "<#>"}


def pgvector_stages(
    connect: Callable[[], AbstractContextManager[Any]],
    table: str,
    embedder: object,
    *,
    index: PgvectorIndex = "hnsw",
    efforts: Sequence[PgvectorEffort] = (10, 40),
    metric: PgvectorMetric = "cosine",
    where: str | None = None,
    params: Mapping[str, Any] | None = None,
    id_column: str = "id",
    text_column: str = "text",
    metadata_column: str | None = None,
    vector_column: str = "embedding",
) -> GrowingEffort[PgvectorEffort]:
    """Return a staged retriever over a table with a pgvector index.

    ::

        pool = psycopg_pool.ConnectionPool("dbname=docs", min_size=2)
        source = pgvector_stages(pool.connection, "docs", embeddings, efforts=(10, 40))
        retriever = RAGCacheRetriever(store=source, engine=engine)

    Scores are pgvector's distances. Each effort uses its own connection, in a transaction that changes only its
    setting.

    Args:
        connect: opens a connection of psycopg for a ``with``: ``pool.connection``, or ``lambda: psycopg.connect(...)``.
        table: the table, with its schema if it needs one: ``"public.docs"``.
        embedder: embeds the question: one of RAGCache, LangChain or LlamaIndex.
        index: kind of the vectors' index.
        efforts: ``hnsw.ef_search`` of each stage (pgvector's own is 40; at least ``k``, since it finds no more than
            that), or ``ivfflat.probes`` (pgvector's own is 1); the last may be ``"exact"``, which compares all vectors.
        metric: distance of the index.
        where: an SQL condition such as ``"tenant = %(tenant)s"``. pgvector applies it to the index's results, so it may
            find fewer than ``k``, unless iterative scans are switched on for the connection.
        params: the values of ``where``.
        id_column: column of document ids.
        text_column: column of texts.
        metadata_column: column of metadata, in ``jsonb``; ``None`` for none.
        vector_column: column of vectors.

    Raises:
        ConfigError: an invalid effort, index or metric, or the extra ``pgvector`` is not installed.
    """
    sql = extra_module("psycopg.sql", "pgvector")
    if index not in _SETTINGS or metric not in _OPERATORS:
        raise ConfigError(
            f"index is {quoted(index)} and metric {quoted(metric)}: give one of {', '.join(_SETTINGS)}, and of "
            f"{', '.join(_OPERATORS)}"
        )
    setting, most = _SETTINGS[index]
    for effort in efforts:
        if effort != "exact" and (isinstance(effort, bool) or not isinstance(effort, int) or not 1 <= effort <= most):
            raise ConfigError(f"an effort is {quoted(effort)}: give {setting} of 1 to {most}, or 'exact'")
    given = dict(params or {})
    if taken := given.keys() & {"query_vector", "k"}:
        raise ConfigError(f"params has {', '.join(sorted(taken))}, which the search itself uses: name it otherwise")
    asked = sql.SQL(
        "SELECT {id}, {text}, {metadata}, {vector} {operator} %(query_vector)s::vector AS distance FROM {table} "
        "WHERE {where} ORDER BY distance LIMIT %(k)s"
    ).format(
        id=sql.Identifier(id_column),
        text=sql.Identifier(text_column),
        metadata=sql.NULL if metadata_column is None else sql.Identifier(metadata_column),
        vector=sql.Identifier(vector_column),
        operator=sql.SQL(_OPERATORS[metric]),
        table=sql.Identifier(*table.split(".")),
        where=sql.SQL("true" if where is None else f"({where})"),
    )

    def find(vector: Any, k: int, effort: PgvectorEffort) -> Found:
        if effort == "exact":
            set_to = {"enable_indexscan": "off", "enable_seqscan": "on"}
        else:
            set_to = {setting: str(min(max(effort, k), most) if index == "hnsw" else effort)}
        values = {**given, "query_vector": str(vector.tolist()), "k": k}
        with connect() as connection, connection.transaction():
            for named in set_to.items():
                connection.execute("SELECT set_config(%s, %s, true)", named)
            rows = connection.execute(asked, values).fetchall()
        return [(Document(str(doc_id), text, metadata or {}), distance) for doc_id, text, metadata, distance in rows]

    return GrowingEffort(find, efforts, embed=as_embedder(embedder).embed_query, identity=f"pgvector {table}")
