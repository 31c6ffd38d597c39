"""A batch of questions with LangChain: all searches first, then the requests in the order of their common prefixes.

``chain.batch`` returns the answers in the order of the questions. Questions about the same documents follow each other
in the engine, whatever their order here. Run it with ``python -m examples.offline_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, open_demo_store, open_engine, read_options, show
from examples.document_order import popular_questions
from ragcache_core import request_stats_from_dict
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, format_documents, prompt_from_layout


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    asked = popular_questions(24)
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(store=store, engine=engine, k=2)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=24)
        chain = (
            {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt_from_layout() | llm
        )
        answers = chain.batch([each.question for each in asked], {"max_concurrency": 8})
    rows = []
    for each, answer in zip(asked, answers, strict=True):
        text = str(answer.content).strip()
        stats = request_stats_from_dict(answer.response_metadata["ragcache"])
        rows.append(Row.of(each.question, "right" if text == each.answer else "wrong", text, stats))
    show(rows, options)


if __name__ == "__main__":
    main()
