"""Retrieval as a service: documents in Postgres with pgvector, searched in stages while the engine prefills.

The example copies the demo store into a table and asks questions about it. Each search is sent twice at the same time:
with little effort, whose documents are prefilled, and with all of it, whose documents are final. It needs
``pip install "ragcache[langchain,retrieval,pgvector]"`` and a database with the extension. Run it with
``python -m examples.vector_database --postgres "host=db dbname=docs"``. Without the option libpq's variables count
(``PGHOST``, ``PGDATABASE``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from psycopg import sql
from psycopg.types.json import Jsonb

from examples._shared import Row, demo_questions, open_demo_store, open_engine, option_parser, options_of, show
from ragcache_core import DocumentStore, pgvector_stages
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)

TABLE = "ragcache_demo"
BATCH_SIZE = 500
CREATE = """
    CREATE TABLE IF NOT EXISTS {table}
    (id text PRIMARY KEY, text text NOT NULL, metadata jsonb NOT NULL, embedding vector({dimension}) NOT NULL)
"""
INSERT = """
    INSERT INTO {table} VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO UPDATE
    SET text = excluded.text, metadata = excluded.metadata, embedding = excluded.embedding
"""
INDEX = "CREATE INDEX IF NOT EXISTS {index} ON {table} USING hnsw (embedding vector_cosine_ops)"


def copy_store(store: DocumentStore, connection: psycopg.Connection[Any], table: str = TABLE) -> int:
    """Copy all documents of a store into a table, and return their number.

    The store's embedder embeds the texts again. A document that is in the table is replaced. Stores with the same
    embedder may be copied into the same table.
    """
    names = {"table": sql.Identifier(table), "index": sql.Identifier(f"{table}_embedding")}
    doc_ids = store.ids()
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        cursor.execute(sql.SQL(CREATE).format(**names, dimension=sql.Literal(store.dimension)))
        for first in range(0, len(doc_ids), BATCH_SIZE):
            documents = store.get(doc_ids[first : first + BATCH_SIZE])
            vectors = store.embedder.embed_documents([document.text for document in documents])
            rows = [
                (document.doc_id, document.text, Jsonb(dict(document.metadata)), str(vector.tolist()))
                for document, vector in zip(documents, vectors, strict=True)
            ]
            cursor.executemany(sql.SQL(INSERT).format(**names), rows)
        cursor.execute(sql.SQL(INDEX).format(**names))
    return len(doc_ids)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--postgres", default="", metavar="CONNECTION", help="a database with pgvector")
    given = parser.parse_args(arguments)
    options, rows = options_of(given), []

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(given.postgres)

    with open_demo_store() as store:
        with connect() as connection:
            copy_store(store, connection)
        embedder = store.embedder
    source = pgvector_stages(connect, TABLE, embedder, efforts=(10, 40), metadata_column="metadata")
    with open_engine(options) as engine:
        prompt = prompt_from_layout()
        engine.bind_prompt(prompt, format_documents)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        retriever = RAGCacheRetriever(store=source, engine=engine, k=2)
        documents = {"context": retriever | format_documents, "question": RunnablePassthrough()}
        chain = documents | prompt | llm | StrOutputParser()
        for asked in demo_questions("single")[:3]:
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(asked["question"], {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(asked["question"], note, answer, request))
    show(rows, options)


if __name__ == "__main__":
    main()
