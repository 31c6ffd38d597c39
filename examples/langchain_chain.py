"""An ordinary LangChain chain: the second question about the same documents starts from their cached KV.

Run it with ``python -m examples.langchain_chain``.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(store=store, engine=engine, k=4)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        chain = (
            {"context": retriever | format_documents, "question": RunnablePassthrough()}
            | prompt_from_layout()
            | llm
            | StrOutputParser()
        )
        for question in [q["question"] for q in demo_questions("single")[:3]]:
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(question, {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(question, note, answer, request))
    show(rows, options)


if __name__ == "__main__":
    main()
