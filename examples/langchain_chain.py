"""An ordinary LangChain chain: the engine reads the documents while they are still searched for.

The chain has its usual shape. ``bind_prompt`` tells the engine what its prompts begin with, so that each stage's
documents are prefilled during the search; the second time all of them are cached. Run it with
``python -m examples.langchain_chain``.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
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
        retriever = RAGCacheRetriever(store=SlowSearch(store), engine=engine, k=2)
        prompt = prompt_from_layout()
        engine.bind_prompt(prompt, format_documents)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        chain = (
            {"context": retriever | format_documents, "question": RunnablePassthrough()}
            | prompt
            | llm
            | StrOutputParser()
        )
        for question in [q["question"] for q in demo_questions("single")[:3]]:
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(question, {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(question, note, answer, request, stats.summary().overlapped_search_s))
    show(rows, options)


if __name__ == "__main__":
    main()
