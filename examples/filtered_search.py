"""Filters and MMR: only documents that may be found, and not the same thing twice, in every stage of a search.

The demo documents say in their metadata what they are about, as ``{"kind": "city"}``. A question about a person is
asked of the documents about people alone, a question about a place of cities and countries, and its documents are
chosen to differ from each other. Run it with ``python -m examples.filtered_search``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_documents, open_engine, read_options, show
from ragcache_core import Document
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    StagedFAISS,
    format_documents,
    prompt_from_layout,
)

SEARCHES: list[tuple[str, dict[str, Any]]] = [
    ("What did Irene Luvsith work as?", {"search_kwargs": {"filter": {"kind": "person"}}}),
    (
        "In which country is Memgexdak?",
        {
            "search_type": "mmr",
            "search_kwargs": {"fetch_k": 10, "lambda_mult": 0.7, "filter": {"kind": {"$in": ["city", "country"]}}},
        },
    ),
]


def with_kind(document: Document) -> Document:
    """Return a demo document with what it is about, which its first sentence says."""
    said = re.search(r" is an? (\w+)\.", document.text)
    return replace(document, metadata={"kind": said.group(1) if said else "other"})


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_engine(options) as engine,
        StagedFAISS.create(Path(folder) / "store") as store,
    ):
        store.store.add([with_kind(document) for document in demo_documents()])
        prompt = prompt_from_layout()
        engine.bind_prompt(prompt, format_documents)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        for question, search in SEARCHES:
            retriever = RAGCacheRetriever(store=store, engine=engine, k=2, **search)
            documents = {"context": retriever | format_documents, "question": RunnablePassthrough()}
            chain = documents | prompt | llm | StrOutputParser()
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(question, {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(question, note, answer, request))
    show(rows, options)


if __name__ == "__main__":
    main()
