"""A LlamaIndex query engine that answers while it searches; the second time its documents come out of the cache.

Run it with ``python -m examples.llamaindex_query_engine``.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import request_stats_from_dict
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(SlowSearch(store), engine, similarity_top_k=2)
        llm = RAGCacheLLM(engine, temperature=0, max_tokens=32)
        query_engine = RAGCacheQueryEngine(retriever, llm, streaming=True)
        for question in [q["question"] for q in demo_questions("single")[:3]]:
            for note in ("cold", "again"):
                response = query_engine.query(question)
                answer = "".join(response.response_gen)
                stats = request_stats_from_dict(response.metadata["ragcache"])
                hidden_s = response.metadata["ragcache"]["pipeline"]["overlapped_search_s"]
                rows.append(Row.of(question, note, answer, stats, hidden_s))
    show(rows, options)


if __name__ == "__main__":
    main()
